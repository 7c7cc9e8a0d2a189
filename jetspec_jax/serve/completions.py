"""``/v1/completions``: continuations of prompts."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jetspec_jax.async_llm import Delta
from jetspec_jax.engine.detokenizer import TextStream, whole_text
from jetspec_jax.engine.output import Completion, Logprob
from jetspec_jax.engine.prompts import EncodedPrompt, naming, read_prompt
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.serve.answers import Writer, answer, ending, prompt_logprobs, rounds, usage_fields, value_of
from jetspec_jax.serve.bodies import read_body
from jetspec_jax.serve.errors import ApiError, refused, wrong
from jetspec_jax.serve.sampling import SamplingFields, sampling_params
from jetspec_jax.serve.service import GenerationRequest, Service
from jetspec_jax.serve.settings import ServeSettings

#: OpenAI's default.
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    """The body of a request."""

    prompt: Any
    max_tokens: int = DEFAULT_MAX_TOKENS
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    hints: ClassVar[dict[str, str]] = {
        **SamplingFields.hints,
        "messages": "they belong to /v1/chat/completions; give a prompt",
        "max_completion_tokens": "it belongs to /v1/chat/completions; use max_tokens",
        "tools": "they belong to /v1/chat/completions",
    }

    @property
    def scores_prompt(self) -> bool:
        """Whether ``logprobs`` of a choice includes the prompt's tokens."""
        return self.echo and self.logprobs is not None

    @property
    def prompt_only(self) -> bool:
        """Whether the text of the response is only the prompt."""
        return self.echo and self.max_tokens == 0

    @property
    def renamed(self) -> dict[str, str]:
        """As in `SamplingFields`."""
        return super().renamed | ({"prompt_logprobs": "logprobs"} if self.scores_prompt else {})


def completion_routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, service.settings)
        model = service.check_model(body.model)
        _check(body)
        params = await asyncio.to_thread(_params, body, service.settings)
        prompts = await asyncio.to_thread(_prompts, service, body)
        names = CompletionRequest.model_fields
        options = (body.priority, body.cache_salt, body.budget, body.prompt_only)
        generation = GenerationRequest(prompts, params, names, "prompt", body.renamed, *options)
        writer = CompletionWriter(request.state.record["request_id"], model, body, generation, service)
        return await answer(service, request, generation, writer, body)

    return router


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = (
            f"best_of={body.best_of} must equal n={body.n or 1}: ask for n completions with logprobs, "
            "and choose by the sum of their log-probabilities"
        )
        raise ApiError(400, message, param="best_of", code="unsupported")
    if not body.scores_prompt:
        return
    if body.stream:
        message = "a stream has no log-probabilities of its prompt: leave out stream, echo or logprobs"
        raise ApiError(400, message, param="echo", code="unsupported")
    if body.prompt_logprobs not in (None, body.logprobs):
        message = f"echo gives the prompt's tokens logprobs={body.logprobs} too: leave prompt_logprobs out"
        raise wrong("prompt_logprobs", message)


def _params(body: CompletionRequest, settings: ServeSettings) -> SamplingParams:
    """The sampling parameters. For ``prompt_only`` the engine generates one token, which is dropped."""
    scores: dict[str, Any] = {"prompt_logprobs": body.logprobs} if body.scores_prompt else {}
    most, logprobs = (1, None) if body.prompt_only else (body.max_tokens, body.logprobs)
    return sampling_params(body, settings, max_tokens=most, logprobs=logprobs, **scores)


def _prompts(service: Service, body: CompletionRequest) -> list[EncodedPrompt]:
    """The prompts of a body: text, token ids, or a list of either."""
    given, target = body.prompt, service.llm.llm.target
    several = isinstance(given, list) and bool(given) and all(isinstance(item, str | list) for item in given)
    each = given if several else [given]
    if len(each) > service.settings.max_completions:
        most = service.settings.max_completions
        raise wrong("prompt", f"prompt holds {len(each)} prompts; at most {most}")
    prompts = []
    for number, prompt in enumerate(each):
        try:
            if not isinstance(prompt, str | list):
                raise TypeError(f"prompt must be a text, token ids, or a list of either, not {prompt!r:.80}")
            with naming(f"prompt[{number}]" if several else ""):
                prompts.append(read_prompt(target, prompt))
        except (TypeError, ValueError) as error:
            raise refused(error, ("prompt",), "prompt") from error
    return prompts


class CompletionWriter(Writer):
    """Formats responses in OpenAI's form for completions."""

    KIND, CHUNK = "cmpl", "text_completion"
    _body: CompletionRequest

    def __init__(self, *request: Any):
        super().__init__(*request)
        self._offsets: dict[int, _Offsets] = {}
        self._begun: set[int] = set()

    def feed(self, choice: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """As in `Writer`."""
        text, first = delta.text, choice not in self._begun
        prompt = choice // self._generation.params.n
        if first:
            self._begun.add(choice)
            text = self._echo(prompt) + text
        has_logprobs = delta.logprobs is not None and bool(delta.token_ids)
        has_extras = (self._body.return_token_ids or self._body.return_rounds) and bool(delta.token_ids)
        begins = self._body.return_token_ids and first
        if not (text or has_logprobs or delta.finish_reason or has_extras or begins):
            return
        logprobs = self._logprobs(choice, delta.token_ids, delta.logprobs)
        made = self._choice(choice, text, logprobs, delta)
        if begins:
            made["prompt_token_ids"] = self._generation.prompts[prompt].ids.tolist()
        yield self._chunk([made | {"rounds": rounds(delta)} if self._body.return_rounds else made])

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """As in `Writer`."""
        choices = []
        for choice, completion in enumerate(completions):
            text = self._echo(choice // self._generation.params.n) + (completion.text or "")
            logprobs = self._logprobs(choice, completion.token_ids, completion.logprobs)
            if self._body.scores_prompt:
                of_prompt = self._scored_prompt(choice // self._generation.params.n, completion)
                of_output = logprobs or {}
                logprobs = {name: values + of_output.get(name, []) for name, values in of_prompt.items()}
            made = self._choice(choice, text, logprobs, completion)
            if self._body.prompt_logprobs is not None:
                made["prompt_logprobs"] = prompt_logprobs(completion)
            if self._body.return_token_ids:
                made["prompt_token_ids"] = completion.prompt_token_ids
            choices.append(made)
        return self._chunk(choices) | usage_fields(completions, self._service)

    def _choice(
        self, choice: int, text: str, logprobs: dict[str, Any] | None, source: Delta | Completion
    ) -> dict[str, Any]:
        made = {"index": choice, "text": text, "logprobs": logprobs, **ending(source.finish_reason, source)}
        return made | {"token_ids": list(source.token_ids)} if self._body.return_token_ids else made

    def _echo(self, prompt: int) -> str:
        if not self._body.echo:
            return ""
        encoded = self._generation.prompts[prompt]
        if encoded.text is not None:
            return encoded.text
        if self._detokenizer is None:
            return ""
        return self._detokenizer.decode(encoded.ids.tolist(), continued=not self._body.prompt_only)

    def _logprobs(
        self, choice: int, tokens: Sequence[int], rows: list[dict[int, Logprob]] | None
    ) -> dict[str, Any] | None:
        if rows is None:
            return None
        if choice not in self._offsets:
            params = self._generation.params
            prompt = choice // params.n
            stream = self._detokenizer and self._detokenizer.stream(
                skip_special_tokens=params.skip_special_tokens,
                prompt=self._generation.prompts[prompt].ids.tolist(),
                keep_space=params.structured_outputs is not None,
            )
            self._offsets[choice] = _Offsets(stream, len(self._echo(prompt)))
        return self._logprob_fields(tokens, rows, self._offsets[choice])

    def _scored_prompt(self, prompt: int, completion: Completion) -> dict[str, Any]:
        """The log-probabilities of a prompt's tokens, in OpenAI's form."""
        text, tokens = self._echo(prompt), completion.prompt_token_ids
        detokenizer = self._detokenizer
        offsets = _Offsets(None if detokenizer is None else detokenizer.stream())
        fields = self._logprob_fields(tokens, completion.prompt_logprobs or [], offsets)
        # Offsets refer to the echoed text, without tokens that the tokenizer added before it.
        added = 0 if detokenizer is None else max(0, detokenizer.decode(tokens).find(text))
        return fields | {"text_offset": [max(0, offset - added) for offset in fields["text_offset"]]}

    def _logprob_fields(
        self, tokens: Sequence[int], rows: Sequence[dict[int, Logprob] | None], offsets: "_Offsets"
    ) -> dict[str, list[Any]]:
        """Log-probabilities of tokens, in OpenAI's form; None for the first token of a prompt."""
        pairs = [*zip(tokens, rows, strict=True)]
        return {
            "tokens": [self._name(token, None if row is None else row[token]) for token, row in pairs],
            "token_logprobs": [None if row is None else value_of(row[token]) for token, row in pairs],
            "top_logprobs": [None if row is None else self._by_name(row) for row in rows],
            "text_offset": [offsets.next(token) for token in tokens],
        }

    def _by_name(self, row: dict[int, Logprob]) -> dict[str, float]:
        """The log-probabilities of a row by name; if tokens share a name, only the first gets it."""
        values: dict[str, float] = {}
        for token, entry in row.items():
            name = self._name(token, entry)
            values[_id_name(token) if name in values else name] = value_of(entry)
        return values

    def _name(self, token: int, entry: Logprob | None) -> str:
        """A token's text, its bytes if they are not valid UTF-8, or its id if it has no text.

        Only the first token of a prompt has no ``entry``.
        """
        if self._detokenizer is None:
            return _id_name(token)
        data = self._detokenizer.token_bytes(token)
        if whole_text(data) is None:
            return f"bytes:{data.decode('ascii', 'backslashreplace')}"
        text = self._detokenizer.token_text(token, begins=True) if entry is None else entry.decoded_token
        return text or _id_name(token)


def _id_name(token: int) -> str:
    return f"token_id:{token}"


class _Offsets:
    """Character offsets of consecutive tokens in a text; the first token is at ``begin``."""

    def __init__(self, stream: TextStream | None, begin: int = 0):
        self._stream, self._settled = stream, begin

    def next(self, token: int) -> int:
        """The offset of the next token."""
        if self._stream is None:
            return self._settled
        place = self._settled + len(self._stream.held)
        self._settled += len(self._stream.feed(token))
        return place
