"""OpenAI's and vLLM's sampling parameters, and their conversion to `SamplingParams`."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal

from pydantic import Field

from jetspec_jax.arguments import check_number, shown
from jetspec_jax.engine.prompts import naming
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.bodies import Body, Listed
from jetspec_jax.serve.errors import ApiError, refused, wrong
from jetspec_jax.serve.settings import ServeSettings

#: Most stop strings of a request, and their most characters: each piece of text is searched for all.
MOST_STOPS, LONGEST_STOP = 64, 1024
# vLLM's earlier fields of `StructuredOutputs`.
_GUIDED = ("json", "regex", "choice", "grammar", "json_object")


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """A schema of ``response_format``."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's field for structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's field for structured outputs."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True


class SamplingFields(Body):
    """Fields of both completions and chats."""

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
    # Numbers, checked up to the first wrong one.
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: Any = None
    # OpenAI's fields about accounts, records and caches, without effect here.
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # vLLM's fields.
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
    # Fields of this server only.
    budget: int | None = None
    return_rounds: bool = False

    hints: ClassVar[dict[str, str]] = {
        **{f"guided_{name}": f'say {{"structured_outputs": {{"{name}": …}}}}' for name in _GUIDED},
        "use_beam_search": "ask for several completions by n",
        "audio": "this server writes only text",
        "prediction": "drafts come from the draft head",
        "suffix": "the model continues a prompt, and cannot insert text before a suffix",
    }

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_in_every_chunk(self) -> bool:
        """Whether each chunk of a stream has the usage so far; as in vLLM, only beside ``include_usage``."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @property
    def renamed(self) -> dict[str, str]:
        """The request's names of parameters that `SamplingParams` has under other names."""
        by_format = self.response_format is not None and self.structured_outputs is None
        return {"structured_outputs": "response_format"} if by_format else {}


#: Fields with the same name in `SamplingParams`.
SAME = {field.name for field in fields(SamplingParams)} & SamplingFields.model_fields.keys()


def sampling_params(
    request: SamplingFields,
    settings: ServeSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    form: StructuredOutputsParams | None = None,
    **fixed: Any,
) -> SamplingParams:
    """The sampling parameters of a request; as in OpenAI's API, the default temperature is 1.

    ``form`` replaces the request's structured output. ``fixed`` are parameters that it cannot set.
    """
    _check(request, settings)
    given = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    given = {"temperature": 1.0, **given, **fixed, "max_tokens": max_tokens, "logprobs": logprobs}
    names = type(request).model_fields
    try:
        if request.logit_bias is not None:
            given["logit_bias"] = _biases(request.logit_bias)
        given["structured_outputs"] = _form(request, settings) if form is None else form
        return SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise refused(error, names, renamed=request.renamed) from error


def check_grammar_size(param: str, kind: str, source: Any, settings: ServeSettings) -> None:
    """Checks the size of a client's grammar before it is parsed."""
    text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
    if (size := len(text.encode())) > (most := settings.max_grammar_bytes):
        message = f"{param}: its {kind} has {size} bytes, and this server reads {most}"
        raise ApiError(400, message, param=param, code="grammar_too_large")


def _check(request: SamplingFields, settings: ServeSettings) -> None:
    """The checks that need no model."""
    if request.modalities not in (None, ["text"]):
        message = (
            f'modalities must be ["text"], not {shown(request.modalities)}: this server writes only text'
        )
        raise ApiError(400, message, param="modalities", code="unsupported")
    for name, given in (
        ("stream_options", request.stream_options is not None),
        ("return_rounds", request.return_rounds),
    ):
        if given and not request.stream:
            raise wrong(name, f"{name} needs a stream: set stream=true, or leave it out")
    if request.prompt_logprobs is not None and request.stream:
        message = "prompt_logprobs are not available in a stream: leave out stream or prompt_logprobs"
        raise wrong("prompt_logprobs", message)
    if request.priority and settings.scheduling_policy != "priority":
        message = "priority must be 0 here; other values need a server with --scheduling-policy priority"
        raise wrong("priority", message)
    if not -(2**31) <= request.priority <= 2**31:
        raise wrong("priority", f"priority must lie in {-(2**31)}..{2**31}")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    longest = max(map(len, stops), default=0)
    if len(stops) > MOST_STOPS or longest > LONGEST_STOP:
        found = str(len(stops)) if len(stops) > MOST_STOPS else f"one of {longest} characters"
        message = f"stop may have {MOST_STOPS} texts of {LONGEST_STOP} characters at most, and it has {found}"
        raise wrong("stop", message)


def _biases(given: Mapping[str, Any]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 12):
            message = f'logit_bias must have token ids as names, as in {{"42": -1}}, not {name[:32]!r}'
        elif (token := int(name)) in biases:
            message = f"logit_bias has token {token} twice, once as {name!r}: give each token once"
        else:
            biases[token] = check_number(f"logit_bias of token {name}", bias)
            continue
        raise wrong("logit_bias", message)
    return biases


def _form(request: SamplingFields, settings: ServeSettings) -> StructuredOutputsParams | None:
    """The structured output of a request, or None."""
    response_format, structured = request.response_format, request.structured_outputs
    if response_format is not None and response_format.type == "text":
        response_format = None
    if response_format is not None and structured is not None:
        raise ValueError("response_format and structured_outputs both give a form: give only one")
    if structured is not None:
        given = structured.model_dump(by_alias=True)
        for kind in ("json", "regex", "choice", "grammar"):
            check_grammar_size("structured_outputs", kind, given[kind] or "", settings)
        return StructuredOutputsParams(**given)
    if response_format is None:
        return None
    if response_format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if response_format.json_schema is None:
        raise ValueError(
            'response_format of type "json_schema" needs "json_schema": {"name": …, "schema": …}'
        )
    check_grammar_size("response_format", "schema", response_format.json_schema.schema_, settings)
    with naming("response_format"):
        return StructuredOutputsParams(json=response_format.json_schema.schema_)
