"""Rows of request logs and of ShareGPT as conversations.

A request and its response are paired in one of these ways:

* one row has both: ``{"request": {…}, "response": {…}}``;
* two rows share a ``custom_id``, as in files of OpenAI's batch API: ``{"custom_id": …, "body": {…}}`` and
  ``{"custom_id": …, "response": {"body": {…}}}``;
* the response follows its request: a row with a request's body, then a row with its response's body, or
  several rows with the chunks of a stream.

A response may be the list of its chunks, or the text of its event stream. A request without a response is a
prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetspec_jax.config.fields import is_int
from train.data.messages import REASONING, masked, read_messages, read_tools

CHAT, CHUNK, COMPLETION = "chat.completion", "chat.completion.chunk", "text_completion"
#: Limit on the choices of a response and on the calls of a message.
MOST_PIECES = 1024
#: ShareGPT's roles to OpenAI's.
SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Answer:
    """An answer of a response.

    Attributes:
        message: The assistant's message; for a completion ``{"content": text}``.
        cut: Whether the answer ended by its token limit, and so has no end-of-turn token.
    """

    message: dict[str, Any]
    cut: bool = False


@dataclass
class Exchange:
    """A request and, once it is read, its response.

    Attributes:
        where: File and line of the request.
        body: The request's body; or a row that is not an object, which is refused later.
        response: The response's body, or its chunks; None until it is read.
    """

    where: str
    body: Any
    response: Any = None


@dataclass
class Pairing:
    """Pairs requests with responses, row by row.

    Attributes:
        last: The request that the next row may answer, or whose stream may continue.
        named: Requests by their ``custom_id`` that have no response yet.
        early: Responses by their ``custom_id`` that have no request yet, each with its file and line.
        several: Whether the request before the last one has no response either, so a response is ambiguous.
        owed: Whether one of two such requests may still get a response.
        streams: Keys of the streams that have begun. Their later chunks never answer a newer request.
    """

    last: Exchange | None = None
    several: bool = False
    owed: bool = False
    streams: set[Any] = field(default_factory=set)
    named: dict[str, Exchange] = field(default_factory=dict)
    early: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def add(self, where: str, row: Mapping[str, Any]) -> list[Exchange]:
        """Adds a row of a log; returns the exchanges that are now complete.

        Raises:
            ValueError: The row is a response without its request, or has none of the forms.
        """
        if is_response(row):
            self._answer(where, row)
            return []
        before, complete = self.last, self.flush()
        if "request" in row:
            _check_answered(where, row)
            response = row.get("response", row.get("chunks"))
            complete.append(Exchange(where, _body(where, row["request"]), response))
        elif "custom_id" in row:
            complete += self._named(where, row)
        else:
            self.last = Exchange(where, row)
            self.several = before is not None and before.response is None and _awaits(before.body)
        return complete

    def flush(self) -> list[Exchange]:
        """Returns and clears the request that waits for the next row, if any."""
        last, self.last = self.last, None
        return [] if last is None else [last]

    def rest(self) -> list[Exchange]:
        """All requests without a response, at the end of the log."""
        return [*self.flush(), *self.named.values()]

    def orphans(self) -> list[str]:
        """Errors about responses whose ``custom_id`` no request has."""
        return [
            f"{where}: no row has the request of this response's custom_id"
            for where, _ in self.early.values()
        ]

    def _answer(self, where: str, row: Mapping[str, Any]) -> None:
        """Assigns a bare response, or its next chunk, to the request before it."""
        last, owed = self.last, self.owed
        self.owed = False
        chunk = row["object"] == CHUNK or _is_chunk(row)
        began = row.get("id") is not None and _stream(row) in self.streams
        if chunk:
            self.streams.add(_stream(row))
        if last is None or not _awaits(last.body):
            raise ValueError(f"{where}: a response without its request in the row before it")
        if last.response is None and (self.several or owed):
            self.owed = not owed
            raise ValueError(
                f"{where}: two requests waited for a response, and the response could be to either; put "
                "request and response into one row, or give both a custom_id"
            )
        if last.response is None and began:
            raise ValueError(
                f"{where}: a chunk of a stream that began before the request in the row before it"
            )
        if last.response is None:
            last.response = [row] if chunk else row
        elif isinstance(last.response, list) and _stream(last.response[0]) == _stream(row):
            last.response.append(row)
        else:
            raise ValueError(f"{where}: a second response to one request; each must follow its own request")

    def _named(self, where: str, row: Mapping[str, Any]) -> list[Exchange]:
        name = row["custom_id"]
        if not isinstance(name, str):
            raise ValueError(f'{where}: "custom_id" must be a text, not {masked(name)}')
        if row.get("error"):
            self.named.pop(name, None)
        _check_answered(where, row)
        if "response" in row:
            if name in self.named:
                exchange = self.named.pop(name)
                exchange.response = row["response"]
                return [exchange]
            if name in self.early:
                raise ValueError(f"{where}: another response has the same custom_id")
            self.early[name] = (where, row["response"])
            return []
        exchange = Exchange(where, _body(where, row.get("body")))
        if name in self.early:
            exchange.response = self.early.pop(name)[1]
            return [exchange]
        if name in self.named:
            raise ValueError(f"{where}: another request has the same custom_id")
        self.named[name] = exchange
        return []


def is_response(row: Mapping[str, Any]) -> bool:
    """Whether a row is the body of a response, or a chunk of it."""
    return row.get("object") in (CHAT, CHUNK, COMPLETION)


def is_log(row: Mapping[str, Any]) -> bool:
    """Whether a row is from a request log, and not a plain conversation or text."""
    if is_response(row):
        return True
    return ("request" in row or "custom_id" in row) and not {"messages", "text", "prompt"} & row.keys()


def answers_of(where: str, response: Any) -> list[Answer]:
    """The answers of a response: one for each of its choices.

    Args:
        where: File and line, for error messages.
        response: The body of a chat completion or completion, possibly under ``body``; its chunks; or the
            text of either, as JSON or as an event stream.

    Raises:
        ValueError: The value is none of these, the response failed, or it has no answer.
    """
    if isinstance(response, Mapping) and "body" in response:
        if response.get("status_code", 200) != 200:
            raise ValueError(f"{where}: the request failed, so there is no answer to learn")
        response = response["body"]
    if isinstance(response, str):
        response = _parsed(where, response)
    if isinstance(response, Sequence) and not isinstance(response, str):
        response = join_chunks(where, response)
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, Mapping) for choice in choices)
    ):
        raise ValueError(f'{where}: the response has no "choices"')
    return [_answer(where, choice) for choice in choices]


def join_chunks(where: str, chunks: Sequence[Any]) -> dict[str, Any]:
    """The response body assembled from the chunks of a stream.

    Raises:
        ValueError: An item is not a chunk, or the stream ended early.
    """
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        pieces = chunk.get("choices") if isinstance(chunk, Mapping) else None
        if not isinstance(pieces, list) or not all(isinstance(piece, Mapping) for piece in pieces):
            raise ValueError(f'{where}: a chunk of the stream has no "choices"')
        for piece in pieces:
            choice = choices.setdefault(_index(where, piece), {})
            if piece.get("finish_reason") is not None:
                choice["finish_reason"] = piece["finish_reason"]
            if isinstance(text := piece.get("text"), str):
                choice["text"] = choice.get("text", "") + text
            if isinstance(delta := piece.get("delta"), Mapping):
                message = choice.setdefault("message", {"role": "assistant", "content": None})
                _extend(where, message, delta)
    if not choices or any("finish_reason" not in choice for choice in choices.values()):
        raise ValueError(f"{where}: the stream ends before its last chunk, which has a finish_reason")
    return {"choices": [choices[index] for index in sorted(choices)]}


def sharegpt(where: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a ShareGPT row, with all other keys of its turns; only ShareGPT's keys are checked.

    Raises:
        ValueError: The row has no turns, or a turn has an unknown role or no text.
    """
    turns = row["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError(f'{where}: "conversations" must be a list that is not empty, not {masked(turns)}')
    messages: list[dict[str, Any]] = []
    if row.get("system"):
        messages.append({"role": "system", "content": row["system"]})
    for number, turn in enumerate(turns):
        speaker = turn.get("from", turn.get("role")) if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or not isinstance(turn, Mapping):
            raise ValueError(f'{where}: turn {number} must have "from" and "value": {masked(turn)}')
        text = turn.get("value", turn.get("content"))
        more = {key: value for key, value in turn.items() if key not in ("from", "role", "value", "content")}
        if speaker == "function_call":
            calls = _calls(where, number, text)
            messages.append({**more, "role": "assistant", "content": None, "tool_calls": calls})
            continue
        if speaker not in SHAREGPT_ROLES:
            known = ", ".join((*SHAREGPT_ROLES, "function_call"))
            raise ValueError(
                f"{where}: turn {number} has the role {masked(speaker, 'role')}, not one of {known}"
            )
        messages.append({**more, "role": SHAREGPT_ROLES[speaker], "content": text})
    return messages


def conversation(where: str, body: Mapping[str, Any], answer: Answer) -> list[dict[str, Any]]:
    """The messages of a request, and the answer after them.

    Raises:
        ValueError: As for `read_messages`.
    """
    messages = body.get("messages")
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        if messages and _is_answer(messages[-1]):
            raise ValueError(
                f"{where}: the response continues the request's last message, which is an assistant's"
            )
        messages = [*messages, answer.message]
    return read_messages(where, messages)


def check_body(where: str, body: Mapping[str, Any]) -> None:
    """Refuses a request whose answer is not a plain continuation of its prompt.

    Raises:
        ValueError: The request has such a setting.
    """
    for key in ("continue_final_message", "echo", "suffix"):
        if body.get(key):
            raise ValueError(f'{where}: a request with "{key}" is not supported')
    if body.get("add_generation_prompt") is False:
        raise ValueError(f'{where}: a request without "add_generation_prompt" is not supported')


def template_settings(
    where: str, body: Mapping[str, Any]
) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """The tools of a request, and its chat template arguments.

    Raises:
        ValueError: Either has a wrong type.
    """
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f'{where}: "chat_template_kwargs" must be an object, not {masked(arguments)}')
    arguments = dict(arguments)
    for name in ("reasoning_effort", "verbosity"):
        if body.get(name) is not None:
            arguments.setdefault(name, body[name])
    return read_tools(where, body.get("tools")), arguments


def _body(where: str, request: Any) -> Mapping[str, Any]:
    if isinstance(request, Mapping) and isinstance(request.get("body"), Mapping):
        request = request["body"]
    if not isinstance(request, Mapping):
        raise ValueError(f"{where}: the request must be an object, not {masked(request)}")
    return request


def _check_answered(where: str, row: Mapping[str, Any]) -> None:
    if row.get("error"):
        raise ValueError(f"{where}: the request failed, so there is no answer to learn")


def _awaits(body: Mapping[str, Any]) -> bool:
    """Whether a body is a request, and not a conversation with its answer."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return "prompt" in body or (isinstance(last, Mapping) and not _is_answer(last))


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _is_chunk(row: Mapping[str, Any]) -> bool:
    """Whether a completion's body is a chunk: the finish reason of all chunks but the last is null."""
    choices = row.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, Mapping) and first.get("finish_reason") is None


def _stream(chunk: Mapping[str, Any]) -> tuple[Any, str]:
    """A key shared by the chunks of a stream."""
    return chunk["object"], str(chunk.get("id"))


def _parsed(where: str, text: str) -> Any:
    """The body in a JSON text, or the chunks in an event stream: the text after ``data:`` of each line."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    if not lines:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(
                f"{where}: the response is a text that is neither JSON nor an event stream"
            ) from None
    try:
        return [json.loads(line) for line in lines if line != "[DONE]"]
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: an event of the stream is not JSON") from None


def _index(where: str, piece: Mapping[str, Any], default: int = 0) -> int:
    index = piece.get("index", default)
    if not is_int(index) or not 0 <= index < MOST_PIECES:
        raise ValueError(f"{where}: a chunk of the stream has the index {masked(index)}")
    return index


def _extend(where: str, message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name in ("content", *REASONING):
        if isinstance(text := delta.get(name), str):
            message[name] = (message.get(name) or "") + text
    for piece in delta.get("tool_calls") or []:
        if not isinstance(piece, Mapping):
            continue
        calls = message.setdefault("tool_calls", [])
        index = _index(where, piece, max(len(calls) - 1, 0))
        while len(calls) <= index:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[index], piece.get("function")
        if piece.get("id"):
            call["id"] = piece["id"]
        for name in ("name", "arguments"):
            if isinstance(function, Mapping) and isinstance(function.get(name), str):
                call["function"][name] += function[name]


def _answer(where: str, choice: Mapping[str, Any]) -> Answer:
    reason, message = choice.get("finish_reason"), choice.get("message")
    if reason is None:
        raise ValueError(f"{where}: a choice of the response has no finish_reason, so it may not be complete")
    if reason in ("content_filter", "error", "abort", "cancelled"):
        raise ValueError(f"{where}: the answer ended by {reason}, so it is not what the target would write")
    cut = reason == "length"
    if isinstance(choice.get("text"), str):
        return Answer({"content": choice["text"]}, cut)
    if not isinstance(message, Mapping):
        raise ValueError(f'{where}: a choice of the response has no "message"')
    return Answer({**message, "role": message.get("role", "assistant")}, cut)


def _calls(where: str, number: int, text: Any) -> list[dict[str, Any]]:
    """The calls of ShareGPT's ``function_call``, the JSON text of one call or of several."""
    try:
        calls = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    found = [call for call in calls if isinstance(call, Mapping) and isinstance(call.get("name"), str)]
    if len(found) < len(calls):
        raise ValueError(f'{where}: turn {number} must be the JSON of a call, {{"name": …, "arguments": …}}')
    return [{"type": "function", "function": dict(call)} for call in found]
