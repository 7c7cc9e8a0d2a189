"""Checks conversations and renders them with a tokenizer's chat template."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.arguments import check_flag, check_text, check_type, decode_utf8, shortened, shown
from jetspec_jax.checkpoint.content import check_small, content_of
from jetspec_jax.config.fields import TEMPLATE

#: A conversation: messages with "role", "content" and other keys that a template may read.
Chat = Sequence[Mapping[str, Any]]
_MESSAGES = '[{"role": "user", "content": "…"}]'

#: Parameters of a tokenizer's ``apply_chat_template``, and of the functions that it calls, which the template
#: does not get. Callers may not set them as template arguments: they would replace the template, change the
#: rendering, or be given twice.
RESERVED = frozenset(
    (
        *("self", "conversations", "compiled_template"),
        *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
_NAMED = Path(__file__).parent / "templates"
#: The templates of this package, by name.
TEMPLATES = sorted(path.stem for path in _NAMED.glob("*.jinja"))
# The most characters of a template's error that are quoted.
_MOST_SAID = 500
#: Advice in errors about a template.
ANOTHER_TEMPLATE = "give another template by --chat-template FILE or chat_template=…"


class Ending(NamedTuple):
    """The end of a conversation's prompt, with the options of transformers and vLLM.

    If both are false, the prompt ends after the last message. Most templates write an end-of-message token
    there, such as ``<|im_end|>``, after which the model may begin a message of any role.

    Attributes:
        add_generation_prompt: End with the beginning of an assistant's message.
        continue_final_message: End inside the last message, an assistant's, without an end-of-message token,
            so that the model continues it. None: continue it if possible.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool | None = False

    @classmethod
    def of(cls, add_generation_prompt: Any = None, continue_final_message: Any = None) -> "Ending":
        """An ending from a caller's arguments; None means the opposite of the other, or the default."""
        begins, continues = (
            value if value is None else check_flag(name, value)
            for name, value in (
                ("add_generation_prompt", add_generation_prompt),
                ("continue_final_message", continue_final_message),
            )
        )
        if begins and continues:
            raise ValueError(
                "continue_final_message and add_generation_prompt cannot both be true: the prompt ends in "
                "the last message or with the beginning of a new one"
            )
        if begins is None:
            return cls(not continues, bool(continues))
        return cls(begins, False if begins else continues)

    def continues(self, chat: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the prompt of a conversation ends inside its last message; raises if it must and cannot."""
        if self.continue_final_message is False:
            return False
        last, needs = chat[-1], "continue_final_message needs a last message"
        wrong = None
        if (role := last["role"]) != "assistant":
            wrong = f'{needs} of the role "assistant", not {shown(role)}'
        elif last.get("tool_calls") or last.get("content") is None:
            wrong = f"{needs} that has content and calls no tools"
        if wrong is not None and self.continue_final_message:
            raise ValueError(wrong)
        return wrong is None


#: The default ending: the beginning of an assistant's message.
ANSWERED = Ending()


def read_chat_template(file_or_text: str | Path) -> str:
    """Reads and checks a chat template.

    Args:
        file_or_text: A file, one of `TEMPLATES` if there is no file of that name, or a Jinja text; a string
            with braces or several lines is a Jinja text.
    """
    import jinja2

    from jetspec_jax.checkpoint.template_content import TemplateTooDeep, variables_of

    check_type("chat_template", file_or_text, str | Path, "a file or a Jinja text")
    text, where = str(file_or_text), "chat_template"
    if isinstance(file_or_text, Path) or not any(sign in text for sign in "{}\n"):
        path, where = Path(file_or_text), f"the chat template {file_or_text}"
        if not os.path.exists(file_or_text):  # false also for invalid paths
            if text not in TEMPLATES:
                raise FileNotFoundError(
                    f"chat_template is {shown(text)}, which is no file and none of {', '.join(TEMPLATES)}; a "
                    "Jinja text has braces"
                )
            path = _NAMED / f"{text}.jinja"
        check_small(path, TEMPLATE)
        with content_of(path):
            text = decode_utf8(path.read_bytes(), str(path))
    try:
        names = variables_of(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{where} is no Jinja template: line {error.lineno}: {error.message}") from error
    except TemplateTooDeep as error:
        raise ValueError(f"{where} cannot be compiled: {error}") from error
    if "messages" not in names:
        raise ValueError(f"{where} does not read `messages`, so that no conversation would be in its prompts")
    return text


class TemplateFailed(ValueError):
    """A chat template fails with an error other than ``raise_exception``."""


def check_writes_tools(tokenizer: Any) -> None:
    """Refuses a tokenizer whose chat template does not use tools; `render_chat` raises syntax errors."""
    import jinja2

    from jetspec_jax.checkpoint.template_content import variables_of

    try:
        writes = "tools" in variables_of(tokenizer.get_chat_template(tools=[{}]))
    except (ValueError, jinja2.TemplateError):
        return
    if not writes:
        raise ValueError(
            f"the chat template does not write tools: {ANOTHER_TEMPLATE}, such as chatml-tools, or describe "
            "the tools in a message"
        )


def read_chats(messages: Any) -> list[list[dict[str, Any]]]:
    """Checks one conversation or a list of them, and returns a list.

    Contents remain strings or lists of parts, which `render_chat` adapts to the template. Tool-call arguments
    given as JSON strings become mappings, as templates expect.

    Raises:
        TypeError: A message, a role or a content has the wrong type.
        ValueError: A conversation is empty, a content is not text, or arguments are not a JSON object.
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
        chats.append([_message(message, f"{where}[{place}]") for place, message in enumerate(chat)])
    return chats


def _message(message: Any, where: str) -> dict[str, Any]:
    """Checks a message and its content, a string or a list of text parts."""
    check_type(where, message, Mapping, 'a mapping with "role" and "content"')
    read = dict(message)
    check_type(f'"role" of {where}', read.get("role"), str, "a string")
    content = read.get("content")
    # A message that only calls tools needs no content.
    if content is None and not read.get("tool_calls"):
        raise ValueError(f'{where} has no "content"')
    if isinstance(content, list | tuple):
        read["content"] = [_part(part, f"content[{place}] of {where}") for place, part in enumerate(content)]
    elif content is not None:
        check_type(f'"content" of {where}', content, str, "a string, or a list of text parts")
        check_text(f'"content" of {where}', content)
    if isinstance(calls := read.get("tool_calls"), list | tuple):
        read["tool_calls"] = [_call(call, where) for call in calls]
    return read


def _part(part: Any, where: str) -> dict[str, str]:
    """Checks a content part, which must be text; keys with null count as absent."""
    check_type(where, part, Mapping, '{"type": "text", "text": "…"}')
    if part.get("type") != "text":
        raise ValueError(f'{where} is of type {shown(part.get("type"))}; "text" alone is supported')
    if unknown := [key for key, value in part.items() if key not in ("type", "text") and value is not None]:
        raise ValueError(f"{where} has unknown keys: {shown(unknown)}")
    check_type(f'"text" of {where}', part.get("text"), str, "a string")
    check_text(f'"text" of {where}', part["text"])
    return {"type": "text", "text": part["text"]}


def _call(call: Any, where: str) -> Any:
    """A tool call with its arguments as a mapping if they were a JSON string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": read_arguments(text, where)}}


def read_arguments(text: str, where: str = "messages") -> dict[str, Any]:
    """The arguments of a tool call from JSON; an empty string means no arguments."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"arguments of a call in {where} must be a JSON object, not {shown(text)}")
    return value


def check_template_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuses template arguments in `RESERVED`, and arguments that transformers could not read."""
    for name in arguments:
        check_type("the name of a template argument", name, str, "a string")
    if reserved := sorted(RESERVED & set(arguments)):
        raise ValueError(f"{', '.join(reserved)} cannot be template arguments: they are set already")
    for name in ("tools", "documents"):
        check_type(name, arguments.get(name), list | tuple | None, "a list")


def unread(tokenizer: Any, template_arguments: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The names that the chat template does not use; the template may depend on whether there are tools."""
    from jetspec_jax.checkpoint.template_content import variables_of

    read = variables_of(tokenizer.get_chat_template(tools=template_arguments.get("tools")))
    return [name for name in names if name not in read]


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any],
    *,
    where: str = "",
    **settings: Any,
) -> Any:
    """Renders a conversation with its tokenizer's chat template.

    A template that loops over content parts gets the list of parts. Other templates get one string with a
    line per part. For a template that does not know the role "developer", the role becomes "system".

    Raises:
        ValueError: The template refuses the conversation with ``raise_exception``, for example because roles
            must alternate; its message is included.
        TemplateFailed: The template fails with another error.
    """
    import jinja2

    from jetspec_jax.checkpoint.template_content import TemplateTooDeep, walks_parts

    prefix = f"{where}: " if where else ""
    try:
        template = tokenizer.get_chat_template(tools=template_arguments.get("tools"))
        chat = [_adapted(message, template, walks_parts(template)) for message in messages]
        return tokenizer.apply_chat_template(chat, **settings, **template_arguments)
    except TemplateTooDeep as error:
        raise TemplateFailed(f"{prefix}the chat template cannot be compiled: {error}") from error
    except RecursionError as error:
        raise ValueError(
            f"{prefix}the chat template recurses too deeply: it calls itself without end, or the "
            "conversation is nested too deeply for it"
        ) from error
    except Exception as error:  # a template is a program and may raise any error
        if type(error) is jinja2.TemplateError:  # from the template's `raise_exception`
            raise ValueError(f"{prefix}the chat template refuses the conversation: {error}") from error
        # transformers appends the whole conversation after the first line of its message.
        line = shortened(str(error).partition("\n")[0], _MOST_SAID)
        text = f"{prefix}the chat template fails on the conversation: {line or type(error).__name__}"
        raise TemplateFailed(text) from error


def _adapted(message: Mapping[str, Any], template: str, walks: bool) -> dict[str, Any]:
    """A message adapted to a template's roles and form of content."""
    adapted = dict(message)
    if adapted.get("role") == "developer" and "developer" not in template:
        adapted["role"] = "system"
    if not walks and isinstance(content := adapted.get("content"), list | tuple):
        adapted["content"] = "\n".join(part["text"] for part in content)
    return adapted
