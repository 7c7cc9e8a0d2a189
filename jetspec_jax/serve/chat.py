"""``/v1/chat/completions``: answers to conversations."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jetspec_jax.async_llm import Delta
from jetspec_jax.checkpoint.chat_template import Ending
from jetspec_jax.engine.detokenizer import Detokenizer, whole_text
from jetspec_jax.engine.output import Completion, Logprob
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.serve.answers import Writer, answer, ending, prompt_logprobs, rounds, usage_fields, value_of
from jetspec_jax.serve.bodies import Listed, read_body
from jetspec_jax.serve.choice import ChoiceText
from jetspec_jax.serve.errors import ApiError, refused, wrong
from jetspec_jax.serve.messages import Message, TemplateFields, check_template, encode_messages
from jetspec_jax.serve.parsers import REASONING, TOOL_CALLS, Markers, special_tokens
from jetspec_jax.serve.sampling import SamplingFields, check_grammar_size, sampling_params
from jetspec_jax.serve.service import GenerationRequest, Service
from jetspec_jax.serve.settings import ServeSettings
from jetspec_jax.serve.tools import Chosen, Function, Tool, arguments_form, calls_form


class ChatRequest(SamplingFields, TemplateFields):
    """The body of a request."""

    messages: Listed[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: bool = True

    hints: ClassVar[dict[str, str]] = {
        **SamplingFields.hints,
        **TemplateFields.hints,
        "prompt": "it belongs to /v1/completions; give messages",
        "functions": "give them as tools",
        "function_call": "use tool_choice",
        "echo": "it belongs to /v1/completions",
        "best_of": "ask for several completions by n",
    }

    @property
    def renamed(self) -> dict[str, str]:
        """As in `SamplingFields`."""
        names = super().renamed | {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if _forced(self) is not None:
            names["structured_outputs"] = "tools"
        return names


def chat_routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()
    tokenizer, settings = service.llm.llm.target.tokenizer, service.settings
    reasoning = None if settings.reasoning_parser is None else REASONING[settings.reasoning_parser]
    kept_of_reasoning = special_tokens(tokenizer, () if reasoning is None else reasoning.tags)
    kept_of_calls = special_tokens(tokenizer, TOOL_CALLS.get(settings.tool_call_parser or "", ()))

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest, settings)
        model = service.check_model(body.model)
        _check(body, service)
        forced = _forced(body)
        called = [tool.function for tool in body.tools or [] if forced in ("", tool.function.name)]
        params = await asyncio.to_thread(_params, body, settings, called)
        # A grammar applies from the first token on, so there is no reasoning.
        markers = reasoning if params.structured_outputs is None else None
        parser = settings.tool_call_parser if _shown_tools(body) and forced is None else None
        kept = frozenset() if markers is None else kept_of_reasoning
        kept |= frozenset() if parser is None else kept_of_calls
        prompt = await asyncio.to_thread(encode_messages, service, body.messages, body, _shown_tools(body))
        generation = GenerationRequest(
            [replace(prompt, kept_special_tokens=kept)],
            params,
            ChatRequest.model_fields,
            "messages",
            body.renamed,
            body.priority,
            body.cache_salt,
            body.budget,
            parts={f"the parameters of {function.name}": arguments_form(function) for function in called},
        )
        begun = markers is not None and _reasons(body, prompt.text or "", markers)

        def choice_text() -> ChoiceText:
            return ChoiceText(
                markers,
                begun=begun,
                parser=parser,
                tools=body.tools or [],
                forced=forced,
                several=body.parallel_tool_calls,
            )

        writer = ChatWriter(choice_text, request.state.record["request_id"], model, body, generation, service)
        return await answer(service, request, generation, writer, body)

    return router


def _choice(body: ChatRequest) -> str | Chosen:
    """The tool choice, whose default is "auto" if there are tools."""
    if body.tool_choice is not None:
        return body.tool_choice
    return "auto" if body.tools else "none"


def _shown_tools(body: ChatRequest) -> Sequence[Tool]:
    """The tools that are passed to the chat template."""
    return [] if _choice(body) == "none" else body.tools or []


def _forced(body: ChatRequest) -> str | None:
    """The function that must be called, "" for any function, or None if no call is required."""
    choice = _choice(body)
    if isinstance(choice, Chosen):
        return choice.function.name
    return "" if choice == "required" else None


def _reasons(body: ChatRequest, prompt: str, markers: Markers) -> bool:
    """Whether the template or the continued message ends inside reasoning, which the answer continues."""
    start, end = markers.start.rstrip(), markers.end.strip()
    prompt_ending = Ending.of(body.add_generation_prompt, body.continue_final_message)
    if not prompt_ending.continues([body.messages[-1].rendered()]):
        return prompt.rstrip().endswith(start)
    content = body.messages[-1].content
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    text = "\n".join(texts)
    return text.rfind(start) > text.rfind(end)


def _params(body: ChatRequest, settings: ServeSettings, called: Sequence[Function]) -> SamplingParams:
    """The sampling parameters of a request; if there are ``called`` functions, it must call one of them."""
    form = None
    if called:
        check_grammar_size("tools", "schema", [function.parameters for function in called], settings)
        try:
            if isinstance(body.tool_choice, Chosen):
                form = arguments_form(called[0])
            else:
                form = calls_form(called, several=body.parallel_tool_calls)
        except (TypeError, ValueError) as error:
            raise refused(error, (), "tools", body.renamed) from error
    return sampling_params(
        body,
        settings,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        form=form,
    )


def _check(body: ChatRequest, service: Service) -> None:
    check_template(service, _shown_tools(body))
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs", "top_logprobs needs logprobs=true")
    if None not in (body.max_tokens, body.max_completion_tokens):
        names = "max_tokens and max_completion_tokens"
        raise wrong("max_tokens", f"{names} are two names of one setting: give max_completion_tokens")
    choice, tools = _choice(body), body.tools or []
    if choice == "none":
        return
    if not tools:
        raise wrong("tool_choice", "tool_choice needs tools to choose from")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise wrong("tools", "tools has two functions of one name")
    if isinstance(choice, Chosen) and choice.function.name not in names:
        message = f"tool_choice names {choice.function.name!r}, and tools has {', '.join(names)}"
        raise wrong("tool_choice", message)
    if choice == "auto" and service.settings.tool_call_parser is None:
        raise ApiError(
            400,
            "tools that the model may choose to call need a server with --tool-call-parser "
            f'({", ".join(TOOL_CALLS)}); without it use tool_choice="required" or choose a function',
            param="tools",
            code="unsupported",
        )
    if _forced(body) is not None and (body.response_format or body.structured_outputs):
        message = "determines the form of the text: leave response_format and structured_outputs out"
        raise wrong("tool_choice", f"tool_choice {message}")


class ChatWriter(Writer):
    """Formats responses in OpenAI's form for chats; has a factory of the choices' texts."""

    KIND, CHUNK = "chatcmpl", "chat.completion.chunk"

    def __init__(self, choice_text: Callable[[], ChoiceText], *request: Any):
        super().__init__(*request)
        self._logprob_form = self._generation.params.logprobs, self._detokenizer
        self._texts = [choice_text() for _ in range(self._generation.params.n)]

    def begin(self) -> Iterable[dict[str, Any]]:
        """A chunk with the role for each choice, with the prompt's tokens if requested."""
        prompt = {"prompt_token_ids": self._generation.prompts[0].ids.tolist()}
        for choice in range(len(self._texts)):
            chunk = self._chunk([self._piece(choice, {"role": "assistant", "content": ""})])
            yield chunk | prompt if self._body.return_token_ids else chunk

    def feed(self, choice: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """As in `Writer`."""
        text, last = self._texts[choice], delta.finish_reason is not None
        parts = text.feed(delta.text, last=last, cut=delta.finish_reason == "length")
        parts = {name: value for name, value in parts.items() if value}
        if "tool_calls" in parts:
            start = text.calls - len(parts["tool_calls"])
            parts["tool_calls"] = [
                {"index": start + place, **call} for place, call in enumerate(parts["tool_calls"])
            ]
        logprobs = _logprobs(delta.token_ids, delta.logprobs, *self._logprob_form)
        ids, by_round = (
            requested and bool(delta.token_ids)
            for requested in (self._body.return_token_ids, self._body.return_rounds)
        )
        if not (parts or last or ids or by_round or (logprobs is not None and delta.token_ids)):
            return
        made = self._piece(choice, parts, logprobs) | ending(text.reason(delta.finish_reason), delta)
        if by_round:
            made["rounds"] = rounds(delta)
        yield self._chunk([made | {"token_ids": list(delta.token_ids)} if ids else made])

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """As in `Writer`."""
        choices = []
        for choice, completion in enumerate(completions):
            text = self._texts[choice]
            parts = text.feed(completion.text or "", last=True, cut=completion.finish_reason == "length")
            message: dict[str, Any] = {"role": "assistant", "content": parts["content"], "refusal": None}
            if parts["reasoning_content"]:
                message["reasoning_content"] = parts["reasoning_content"]
            if parts["tool_calls"]:
                message |= {"tool_calls": parts["tool_calls"], "content": parts["content"] or None}
            made = {
                "index": choice,
                "message": message,
                "logprobs": _logprobs(completion.token_ids, completion.logprobs, *self._logprob_form),
                **ending(text.reason(completion.finish_reason), completion),
            }
            if self._body.return_token_ids:
                made["token_ids"] = completion.token_ids
            choices.append(made)
        made = self._head | {"object": "chat.completion", "choices": choices}
        made |= usage_fields(completions, self._service)
        if completions[0].prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(completions[0])
        if self._body.return_token_ids:
            made["prompt_token_ids"] = completions[0].prompt_token_ids
        return made

    @staticmethod
    def _piece(choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _logprobs(
    tokens: Sequence[int],
    rows: list[dict[int, Logprob]] | None,
    most: int | None,
    detokenizer: Detokenizer | None,
) -> dict[str, Any] | None:
    if rows is None or most is None:
        return None

    def entry_json(token: int, entry: Logprob) -> dict[str, Any]:
        text = entry.decoded_token or ""
        data = None if detokenizer is None else detokenizer.token_bytes(token)
        if data is not None and whole_text(data) is not None:
            data = text.encode()  # without the space of a token that begins the answer
        return {"token": text, "logprob": value_of(entry), "bytes": None if data is None else list(data)}

    content = []
    for token, row in zip(tokens, rows, strict=True):
        # A row also has the generated token, which may not be among the most likely ones.
        best = sorted((pair for pair in row.items() if pair[1].rank <= most), key=lambda pair: pair[1].rank)
        content.append(entry_json(token, row[token]) | {"top_logprobs": [entry_json(*pair) for pair in best]})
    return {"content": content, "refusal": None}
