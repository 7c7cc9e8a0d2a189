"""OpenAI's and vLLM's sampling parameters, and the one place that makes `SamplingParams` of them."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from jetspec_jax.arguments import check_number
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.bodies import Body, Listed
from jetspec_jax.serve.errors import ApiError, refused
from jetspec_jax.serve.settings import ServeSettings

#: Fields that are `SamplingParams`' own by name.
SAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "bad_words", "allowed_token_ids", "prompt_logprobs"),
)
#: Of a request, and their characters: each is looked for in every piece of text.
MOST_STOPS, LONGEST_STOP = 64, 1024
_GUIDED = 'put it into structured_outputs, as {"structured_outputs": {"json": …}}'


class StreamOptions(Body):
    """What a stream has beside its pieces."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """A schema of ``response_format``."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for a form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False


class SamplingFields(Body):
    """What requests of both kinds may hold."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | Listed[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Numbers, checked up to the first that is none.
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    # OpenAI's, about the account, its records and its caches: without effect here.
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Listed[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Listed[str] | None = None
    allowed_token_ids: Listed[int] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False
    # This server's own.
    budget: int | None = None
    return_rounds: bool = False

    hints: ClassVar[dict[str, str]] = {
        "guided_json": _GUIDED,
        "guided_regex": _GUIDED,
        "guided_choice": _GUIDED,
        "guided_grammar": _GUIDED,
        "use_beam_search": "ask for several completions by n",
        "modalities": "this server writes text alone",
        "audio": "this server writes text alone",
        "prediction": "drafts are the draft head's",
    }

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def renamed(self) -> dict[str, str]:
        """What this request calls parameters of `SamplingParams` that it has under other names."""
        by_format = self.response_format is not None and self.structured_outputs is None
        return {"structured_outputs": "response_format"} if by_format else {}


def sampling_params(
    request: SamplingFields,
    settings: ServeSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    form: StructuredOutputsParams | None = None,
    **fixed: Any,
) -> SamplingParams:
    """How a request is sampled; as at OpenAI, a temperature that is not given is 1.

    Args:
        request: The request.
        settings: The server's.
        max_tokens: Most tokens of each completion; None goes on to the context's end.
        logprobs: Alternatives that are told with each token.
        form: What the text must be, where that is not what the request's fields say. Its size is checked.
        **fixed: Parameters that the request cannot choose.

    Raises:
        ApiError: Something is out of its range, or contradicts something else.
    """
    _check(request, settings)
    given = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    given = {"temperature": 1.0, **given, **fixed, "max_tokens": max_tokens, "logprobs": logprobs}
    names = type(request).model_fields
    try:
        if request.logit_bias is not None:
            given["logit_bias"] = _biases(request.logit_bias)
        form = _form(request, settings) if form is None else form
        return SamplingParams(**given, structured_outputs=form)
    except (TypeError, ValueError) as error:
        raise refused(error, names, renamed=request.renamed) from error


def check_grammar_size(param: str, kind: str, source: Any, settings: ServeSettings) -> None:
    """Checks the bytes of a grammar as a client sent it, before anything reads it.

    Args:
        param: The parameter of the request that holds it.
        kind: What it is: a schema, a regular expression, choices or a grammar.
        source: Its text, or the JSON value that it is.
        settings: The server's.

    Raises:
        ApiError: It is too large.
    """
    text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
    if (size := len(text.encode())) > (most := settings.max_grammar_bytes):
        message = f"{param}: its {kind} has {size} bytes, and this server reads {most}"
        raise ApiError(400, message, param=param, code="grammar_too_large")


def _check(request: SamplingFields, settings: ServeSettings) -> None:
    """What needs no model."""
    for name, given in (
        ("stream_options", request.stream_options is not None),
        ("return_rounds", request.return_rounds),
    ):
        if given and not request.stream:
            message = f"{name} needs a stream: say stream=true, or leave it out"
            raise ApiError(400, message, param=name, code="invalid_value")
    if request.prompt_logprobs is not None and request.stream:
        message = "prompt_logprobs are not told in a stream: leave stream out, or them"
        raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")
    if request.priority and settings.scheduling_policy != "priority":
        message = "priority must be 0 here; the server takes others with --scheduling-policy priority"
        raise ApiError(400, message, param="priority", code="invalid_value")
    if not -(2**31) <= request.priority <= 2**31:
        message = f"priority must lie in {-(2**31)}..{2**31}"
        raise ApiError(400, message, param="priority", code="invalid_value")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    longest = max(map(len, stops), default=0)
    if len(stops) > MOST_STOPS or longest > LONGEST_STOP:
        found = str(len(stops)) if len(stops) > MOST_STOPS else f"one of {longest} characters"
        message = f"stop may have {MOST_STOPS} texts of {LONGEST_STOP} characters at most, and it has {found}"
        raise ApiError(400, message, param="stop", code="invalid_value")


def _biases(given: Mapping[str, Any]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            message = f'logit_bias must have token ids as names, as in {{"42": -1}}, not {token[:32]!r}'
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
    return {int(token): check_number(f"logit_bias of token {token}", bias) for token, bias in given.items()}


def _form(request: SamplingFields, settings: ServeSettings) -> StructuredOutputsParams | None:
    """The form that the text must have.

    Raises:
        ApiError: It is too large.
        TypeError: As `StructuredOutputsParams`.
        ValueError: As `StructuredOutputsParams`, or there are two.
    """
    asked, own = request.response_format, request.structured_outputs
    if asked is not None and asked.type == "text":
        asked = None
    if asked is not None and own is not None:
        raise ValueError("response_format and structured_outputs say both what the form is: give one")
    if own is not None:
        given = own.model_dump(by_alias=True)
        for kind in ("json", "regex", "choice", "grammar"):
            check_grammar_size("structured_outputs", kind, given[kind] or "", settings)
        return StructuredOutputsParams(**given)
    if asked is None:
        return None
    if asked.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if asked.json_schema is None:
        raise ValueError(
            'response_format of type "json_schema" needs "json_schema": {"name": …, "schema": …}'
        )
    check_grammar_size("response_format", "schema", asked.json_schema.schema_, settings)
    try:
        return StructuredOutputsParams(json=asked.json_schema.schema_)
    except (TypeError, ValueError) as error:
        raise ValueError(f"response_format: {error}") from error
