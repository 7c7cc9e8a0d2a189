"""Conversations in the form of a tokenizer's chat template."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jetspec_jax.arguments import check_text, check_type, shown

#: A conversation: messages with "role" and "content", and whatever else a template reads.
Chat = Sequence[Mapping[str, Any]]
_MESSAGES = '[{"role": "user", "content": "…"}]'

#: Arguments of a tokenizer's ``apply_chat_template`` that change what it does. Those of a template are data:
#: they replace neither the template nor how the prompt is made of it.
RESERVED = frozenset(
    (
        *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


def read_chats(messages: Any) -> list[list[dict[str, Any]]]:
    """Conversations, each of which says something; one alone counts as a list of one.

    Contents that are lists of parts become one text, a line for each part.

    Raises:
        TypeError: Something is no message, or a role or a content of a wrong type.
        ValueError: There are no messages, or a content is no text.
    """
    if not isinstance(messages, list | tuple):
        raise TypeError(f"messages must be a list such as {_MESSAGES}, or several, not {shown(messages)}")
    several = bool(messages) and not isinstance(messages[0], Mapping)
    chats = []
    for number, chat in enumerate(messages if several else [messages]):
        where = f"messages[{number}]" if several else "messages"
        if not isinstance(chat, list | tuple):
            raise TypeError(f"{where} must be a list such as {_MESSAGES}, not {shown(chat)}")
        if not chat:
            raise ValueError("there are no messages to answer")
        chats.append([_message(own, f"{where}[{place}]") for place, own in enumerate(chat)])
    return chats


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message whose content is a text."""
    check_type(where, message, Mapping, 'a mapping with "role" and "content"')
    read = dict(message)
    check_type(f'"role" of {where}', read.get("role"), str, "a string")
    content = read.get("content")
    # What only calls tools says nothing.
    if content is None and not read.get("tool_calls"):
        raise ValueError(f'{where} has no "content"')
    if isinstance(content, list | tuple):
        content = read["content"] = "\n".join(
            _part(part, f"content[{place}] of {where}") for place, part in enumerate(content)
        )
    if content is not None:
        check_type(f'"content" of {where}', content, str, "a string, or a list of text parts")
        check_text(f'"content" of {where}', content)
    return read


def _part(part: Any, where: str) -> str:
    """The text of a part of a content."""
    check_type(where, part, Mapping, '{"type": "text", "text": "…"}')
    if part.get("type") != "text":
        raise ValueError(f'{where} is of type {shown(part.get("type"))}; "text" alone is supported')
    if unknown := [key for key in part if key not in ("type", "text")]:
        raise ValueError(f"{where} has unknown keys: {shown(unknown)}")
    check_type(f'"text" of {where}', part.get("text"), str, "a string")
    return part["text"]


def check_template_arguments(names: Iterable[str]) -> None:
    """Checks that arguments are the template's.

    Raises:
        ValueError: Some are not.
    """
    if taken := sorted(RESERVED & set(names)):
        raise ValueError(f"{', '.join(taken)} cannot be template arguments: they are set already")


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any],
    *,
    where: str = "",
    **settings: Any,
) -> Any:
    """A conversation as its tokenizer's template writes it.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        messages: The conversation.
        template_arguments: Passed to the template; see `check_template_arguments`.
        where: What error messages call the conversation, if there are several.
        **settings: Of the tokenizer's ``apply_chat_template``, which gives what they ask for.

    Raises:
        ValueError: The template refuses the conversation, which is also how a template says that roles must
            alternate, or cannot be run with it; the message holds what it says.
    """
    import jinja2

    prefix = f"{where}: " if where else ""
    try:
        return tokenizer.apply_chat_template(list(messages), **settings, **template_arguments)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ValueError(f"{prefix}the chat template refuses the conversation: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{prefix}the conversation is nested too deeply for its chat template") from error
