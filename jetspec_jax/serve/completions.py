"""``/v1/completions``: texts that go on."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jetspec_jax.async_llm import Delta
from jetspec_jax.engine.detokenizer import Detokenizer, detokenizer_of, whole_text
from jetspec_jax.engine.logprobs import Logprob
from jetspec_jax.engine.output import Completion
from jetspec_jax.engine.prompts import EncodedPrompt, naming, read_prompt
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.serve.answers import answer, ending, figures, prompt_logprobs, rounds, usage, value_of
from jetspec_jax.serve.bodies import read_body
from jetspec_jax.serve.errors import ApiError, refused
from jetspec_jax.serve.sampling import SamplingFields, sampling_params
from jetspec_jax.serve.service import Asked, Service
from jetspec_jax.serve.settings import ServeSettings

#: OpenAI's, where a request says none.
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
        "suffix": "the model goes on after a prompt, and does not fill in before a text",
        "messages": "they belong to /v1/chat/completions; give a prompt",
        "max_completion_tokens": "it belongs to /v1/chat/completions; say max_tokens",
        "tools": "they belong to /v1/chat/completions",
    }

    @property
    def scores_prompt(self) -> bool:
        """Whether ``logprobs`` of a choice begins with the prompt's tokens."""
        return self.echo and self.logprobs is not None

    @property
    def prompt_only(self) -> bool:
        """Whether the answer's text is the prompt alone."""
        return self.echo and self.max_tokens == 0

    @property
    def renamed(self) -> dict[str, str]:
        """As `SamplingFields` has it."""
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
        own = (body.priority, body.cache_salt, body.budget, body.prompt_only)
        asked = Asked(prompts, params, names, "prompt", body.renamed, *own)
        writer = CompletionWriter(request.state.record["request_id"], model, body, asked, service)
        return await answer(service, request, asked, writer, stream=body.stream)

    return router


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of={body.best_of} is not supported: leave it out, or make it n={body.n or 1}"
        raise ApiError(400, message, param="best_of", code="unsupported")
    if not body.scores_prompt:
        return
    if body.stream:
        message = "a stream has no log-probabilities of its prompt: leave out stream, echo or logprobs"
        raise ApiError(400, message, param="echo", code="unsupported")
    if body.prompt_logprobs not in (None, body.logprobs):
        message = f"echo gives the prompt's tokens logprobs={body.logprobs} too: leave prompt_logprobs out"
        raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")


def _params(body: CompletionRequest, settings: ServeSettings) -> SamplingParams:
    """How a request is sampled. For the prompt alone the engine still generates a token, which is dropped."""
    scores: dict[str, Any] = {"prompt_logprobs": body.logprobs} if body.scores_prompt else {}
    most, logprobs = (1, None) if body.prompt_only else (body.max_tokens, body.logprobs)
    return sampling_params(body, settings, max_tokens=most, logprobs=logprobs, **scores)


def _prompts(service: Service, body: CompletionRequest) -> list[EncodedPrompt]:
    """A text, token ids, or a list of either."""
    given, target = body.prompt, service.llm.llm.target
    several = isinstance(given, list) and bool(given) and all(isinstance(one, str | list) for one in given)
    each = given if several else [given]
    if len(each) > service.settings.max_completions:
        message = f"prompt holds {len(each)} prompts; at most {service.settings.max_completions}"
        raise ApiError(400, message, param="prompt", code="invalid_value")
    prompts = []
    for number, one in enumerate(each):
        try:
            if not isinstance(one, str | list):
                raise TypeError(f"prompt must be a text, token ids, or a list of either, not {one!r:.80}")
            with naming(f"prompt[{number}]" if several else ""):
                prompts.append(read_prompt(target, one))
        except (TypeError, ValueError) as error:
            raise refused(error, ("prompt",), "prompt") from error
    return prompts


class CompletionWriter:
    """Responses in OpenAI's form for completions."""

    def __init__(self, request_id: str, model: str, body: CompletionRequest, asked: Asked, service: Service):
        """Takes what all chunks have, and what was asked for."""
        self._head = {"id": f"cmpl-{request_id}", "created": int(time.time()), "model": model}
        self._body, self._asked = body, asked
        self._tokenizer = service.llm.llm.target.tokenizer
        self._detokenizer = detokenizer_of(self._tokenizer)
        self._offsets: dict[int, _Offsets] = {}
        self._begun: set[int] = set()

    def begin(self) -> Iterable[dict[str, Any]]:
        """Nothing."""
        return ()

    def take(self, choice: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """A chunk, unless there is nothing to tell yet."""
        text, first = delta.text, choice not in self._begun
        prompt = choice // self._asked.params.n
        if first:
            self._begun.add(choice)
            text = self._echo(prompt) + text
        told = delta.logprobs is not None and bool(delta.token_ids)
        wanted = (self._body.return_token_ids or self._body.return_rounds) and bool(delta.token_ids)
        begins = self._body.return_token_ids and first
        if not (text or told or delta.finish_reason or wanted or begins):
            return
        logprobs = self._logprobs(choice, delta.token_ids, delta.logprobs)
        made = self._choice(choice, text, logprobs, delta)
        if begins:
            made["prompt_token_ids"] = self._asked.prompts[prompt].ids.tolist()
        yield self._chunk([made | {"rounds": rounds(delta)} if self._body.return_rounds else made])

    def end(self, completions: dict[int, Completion]) -> Iterable[dict[str, Any]]:
        """The usage, where it is asked for."""
        if self._body.includes_usage:
            all_of_them = list(completions.values())
            own = {"usage": usage(all_of_them, self._asked.params.n), "metrics": figures(all_of_them)}
            yield self._chunk([]) | own

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """All choices, and the usage."""
        choices = []
        for choice, own in enumerate(completions):
            text = self._echo(choice // self._asked.params.n) + (own.text or "")
            logprobs = self._logprobs(choice, own.token_ids, own.logprobs)
            if self._body.scores_prompt:
                of_prompt, of_output = (
                    self._scored_prompt(choice // self._asked.params.n, own),
                    logprobs or {},
                )
                logprobs = {name: values + of_output.get(name, []) for name, values in of_prompt.items()}
            made = self._choice(choice, text, logprobs, own)
            if self._body.prompt_logprobs is not None:
                made["prompt_logprobs"] = prompt_logprobs(own)
            if self._body.return_token_ids:
                made["prompt_token_ids"] = own.prompt_token_ids
            choices.append(made)
        told = {"usage": usage(completions, self._asked.params.n), "metrics": figures(completions)}
        return self._chunk(choices) | told

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": "text_completion", "choices": choices}

    def _choice(
        self, choice: int, text: str, logprobs: dict[str, Any] | None, own: Delta | Completion
    ) -> dict[str, Any]:
        made = {"index": choice, "text": text, "logprobs": logprobs, **ending(own.finish_reason, own)}
        return made | {"token_ids": list(own.token_ids)} if self._body.return_token_ids else made

    def _echo(self, prompt: int) -> str:
        if not self._body.echo:
            return ""
        own = self._asked.prompts[prompt]
        if own.text is not None:
            return own.text
        return "" if self._tokenizer is None else self._tokenizer.decode(own.ids.tolist())

    def _logprobs(
        self, choice: int, tokens: Sequence[int], rows: list[dict[int, Logprob]] | None
    ) -> dict[str, Any] | None:
        if rows is None:
            return None
        if choice not in self._offsets:
            params = self._asked.params
            begin = len(self._echo(choice // params.n))
            self._offsets[choice] = _Offsets(
                self._detokenizer, skip_special_tokens=params.skip_special_tokens, begin=begin
            )
        return self._told(tokens, rows, self._offsets[choice])

    def _scored_prompt(self, prompt: int, own: Completion) -> dict[str, Any]:
        """The log-probabilities of a prompt's tokens, in OpenAI's form."""
        text, tokens = self._echo(prompt), own.prompt_token_ids
        offsets = _Offsets(self._detokenizer, skip_special_tokens=False)
        told = self._told(tokens, own.prompt_logprobs or [], offsets)
        # Offsets count characters of the echoed text, which lacks tokens that the tokenizer put before it.
        added = 0 if self._tokenizer is None else max(0, self._tokenizer.decode(tokens).find(text))
        return told | {"text_offset": [max(0, offset - added) for offset in told["text_offset"]]}

    def _told(
        self, tokens: Sequence[int], rows: Sequence[dict[int, Logprob] | None], offsets: "_Offsets"
    ) -> dict[str, list[Any]]:
        """Log-probabilities of tokens, in OpenAI's form; None for the first token of a prompt."""
        pairs = [*zip(tokens, rows, strict=True)]
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [None if row is None else value_of(row[token]) for token, row in pairs],
            "top_logprobs": [None if row is None else self._by_name(row) for row in rows],
            "text_offset": [offsets.take(token) for token in tokens],
        }

    def _by_name(self, row: dict[int, Logprob]) -> dict[str, float]:
        """The log-probabilities of a row by name; of several tokens with one name, only the first has it."""
        values: dict[str, float] = {}
        for token, own in row.items():
            name = self._name(token)
            values[_id_name(token) if name in values else name] = value_of(own)
        return values

    def _name(self, token: int) -> str:
        """A token's text, or its bytes where they are no valid UTF-8, or its id where it has none."""
        data = b"" if self._detokenizer is None else self._detokenizer.token_bytes(token)
        if not data:
            return _id_name(token)
        text = whole_text(data)
        return f"bytes:{data.decode('ascii', 'backslashreplace')}" if text is None else text


def _id_name(token: int) -> str:
    return f"token_id:{token}"


class _Offsets:
    """Where tokens begin in a text, the first of them at ``begin``: a number of whole characters."""

    def __init__(self, detokenizer: Detokenizer | None, *, skip_special_tokens: bool, begin: int = 0):
        self._settled = begin
        stream = None if detokenizer is None else detokenizer.stream(skip_special_tokens=skip_special_tokens)
        self._stream = stream

    def take(self, token: int) -> int:
        """Takes the next token; where it begins."""
        if self._stream is None:
            return self._settled
        place = self._settled + len(self._stream.held)
        self._settled += len(self._stream.feed(token))
        return place
