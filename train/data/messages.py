"""Checks messages of a conversation and normalises their form. Errors never contain a message's text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jetspec_jax.arguments import shown
from jetspec_jax.checkpoint.chat_template import read_arguments, read_chats

ROLES = ("system", "developer", "user", "assistant", "tool")
#: The keys under which servers and templates keep an assistant's reasoning; the first is the normal form.
REASONING = ("reasoning_content", "reasoning", "thinking")
#: The key of OpenAI, Mistral, Together and Fireworks: a message of weight 0 is not learnt. The normal form.
WEIGHT = "weight"
#: Keys of other trainers whose 0 or false excludes, and whose 1 or true includes: Axolotl's ``train``,
#: ``training`` and ``train_on_turn``, ms-swift's ``loss``, and ``loss_mask``.
INCLUDING = ("train", "training", "train_on_turn", "loss", "loss_mask")
#: Keys whose 1 or true excludes, as torchtune's ``masked``.
EXCLUDING = ("masked", "exclude")
# Strings that are structure and may be shown.
_STRUCTURE = ("role", "type")
_LONGEST_SHOWN = 24
# Levels of lists and objects: a content's parts are at the third.
_DEEPEST_SHOWN = 8


def read_messages(where: str, messages: Any) -> list[dict[str, Any]]:
    """A conversation in the form that chat templates read.

    Contents stay strings, lists of text parts, or null beside calls. Arguments of calls become mappings.
    Reasoning is kept under the first key of `REASONING`. Messages of the assistant that are excluded from
    learning have a `WEIGHT` of 0, and no other message has one. Null keys are dropped, except "content".

    Args:
        where: File and line, for error messages.
        messages: The list of messages.

    Raises:
        ValueError: The value is not a list of messages; a role is unknown; a content is not text, but for
            example an image; or a message of another role than the assistant is to be learnt.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f'{where}: "messages" must be a list that is not empty, not {masked(messages)}')
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f'{where}: message {number} must have "role" and "content": {masked(message)}')
    messages = [_with_calls(where, number, message) for number, message in enumerate(messages)]
    try:
        [chat] = read_chats(messages)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {_what_is_wrong(messages)}") from None
    for number, message in enumerate(chat):
        if message["role"] not in ROLES:
            role, known = masked(message["role"], "role"), ", ".join(ROLES)
            raise ValueError(f"{where}: message {number} has the role {role}, not one of {known}")
    # A data set gives every message the keys of all messages. Null is meaningful only for "content".
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in (
            _with_weight(where, number, _with_thoughts(where, number, message))
            for number, message in enumerate(chat)
        )
    ]


def is_excluded(where: str, name: str, value: Mapping[str, Any]) -> bool:
    """Whether the keys of a row or of a message exclude it from learning.

    Args:
        where: File and line, for error messages.
        name: The row or the message, for error messages.
        value: The row or the message.

    Raises:
        ValueError: A key has another value than 0, 1, false and true, or two keys contradict each other.
    """
    keys = (WEIGHT, *INCLUDING, *EXCLUDING)
    found = {key: value[key] for key in keys if value.get(key) is not None}
    for key, given in found.items():
        if not isinstance(given, int | float) or given not in (0, 1):
            raise ValueError(
                f'{where}: "{key}" of {name} must be 0 or 1, or false or true, not {masked(given)}'
            )
    excluded = {bool(given) == (key in EXCLUDING) for key, given in found.items()}
    if len(excluded) > 1:
        raise ValueError(f"{where}: {' and '.join(found)} of {name} contradict each other; keep one of them")
    return True in excluded


def read_tools(where: str, tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a conversation, given as a list or as its JSON text; None without tools.

    Raises:
        ValueError: The value is not a list of objects.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise ValueError(f'{where}: "tools" is a text that is not JSON') from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f'{where}: "tools" must be a list of objects, not {masked(tools)}')
    return [dict(tool) for tool in tools]


def masked(value: Any, key: str = "") -> str:
    """A value's structure for an error message, with an ellipsis for every text."""
    return shown(_masked(value, key))


def _masked(value: Any, key: str = "", depth: int = 0) -> Any:
    if depth > _DEEPEST_SHOWN:
        return "…"
    if isinstance(value, Mapping):
        return {name: _masked(nested, name, depth + 1) for name, nested in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(nested, key, depth + 1) for nested in value]
    if isinstance(value, str) and not (key in _STRUCTURE and len(value) <= _LONGEST_SHOWN):
        return "…"
    return value


def _what_is_wrong(messages: Sequence[Mapping[str, Any]]) -> str:
    """The error of `read_chats` for refused messages, without their texts."""
    try:
        read_chats([_masked(message) for message in messages])
    except (TypeError, ValueError) as error:
        return str(error)
    return "a text of the messages holds half a surrogate pair, which is no character"


def _with_calls(where: str, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with ``tool_calls`` (also for a ``function_call``) whose arguments are mappings."""
    read = dict(message)
    if (old := read.pop("function_call", None)) is not None and not read.get("tool_calls"):
        read["tool_calls"] = [{"type": "function", "function": old}]
    calls = read.get("tool_calls")
    if calls is None:
        return read
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
        raise ValueError(
            f'{where}: "tool_calls" of message {number} must be a list of {{"function": {{"name": …}}}}, not '
            f"{masked(calls)}"
        )
    read["tool_calls"] = [_call(where, number, call) for call in calls]
    return read


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _call(where: str, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = read_arguments(arguments)
        except ValueError:
            raise ValueError(
                f"{where}: arguments of a call in message {number} must be a JSON object"
            ) from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _with_weight(where: str, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the keys about learning; an excluded message of the assistant has a weight of 0."""
    excluded = is_excluded(where, f"message {number}", message)
    read = {k: value for k, value in message.items() if k not in (WEIGHT, *INCLUDING, *EXCLUDING)}
    if message["role"] == "assistant":
        return {**read, WEIGHT: 0} if excluded else read
    # A weight of 1 is the default of every message.
    if includes := [key for key in INCLUDING if message.get(key)]:
        raise ValueError(
            f'{where}: "{includes[0]}" of message {number}, a message of the {message["role"]}, includes it, '
            "and only messages of the assistant can be learnt"
        )
    return read


def _with_thoughts(where: str, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under one key."""
    found = {name: message[name] for name in REASONING if message.get(name)}
    if wrong := [name for name, value in found.items() if not isinstance(value, str)]:
        raise ValueError(f'{where}: "{wrong[0]}" of message {number} must be a text')
    if len(set(found.values())) > 1:
        raise ValueError(f"{where}: {' and '.join(found)} of message {number} differ; keep one of them")
    read = {key: value for key, value in message.items() if key not in REASONING}
    if found:
        read[REASONING[0]] = next(iter(found.values()))
    return read
