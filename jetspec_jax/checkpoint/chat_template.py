"""Conversations in the form of a tokenizer's chat template."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.arguments import check_flag, check_text, check_type, shortened, shown
from jetspec_jax.checkpoint.content import check_small, content_of

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
# Characters of a template's error that are repeated.
_MOST_SAID = 500
#: What errors about a template advise.
ANOTHER_TEMPLATE = "give another template by --chat-template FILE or chat_template=…"


class Ending(NamedTuple):
    """How the prompt of a conversation ends, under the names of transformers and vLLM.

    With neither, the prompt ends where the template ends the last message. Most templates write an end mark
    there, the demo's ``<|im_end|>`` too, so that the model begins a message of any role.

    Attributes:
        add_generation_prompt: With what begins an answer.
        continue_final_message: With the content of the last message, which is an assistant's. No end mark
            follows, so that the model continues that message. None continues it where it can be continued.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool | None = False

    @classmethod
    def of(cls, add_generation_prompt: Any = None, continue_final_message: Any = None) -> "Ending":
        """What a caller asks for. None is the opposite of the other setting; two None ask for an answer.

        Raises:
            TypeError: One is no boolean.
            ValueError: Both are true.
        """
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
                "the last message, or with what begins an answer"
            )
        if begins is None:
            return cls(not continues, bool(continues))
        return cls(begins, False if begins else continues)

    def continues(self, chat: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the prompt of a conversation of `read_chats` ends in its last message.

        Raises:
            ValueError: That message is to be continued, and is not an assistant's, has no content, or calls
                tools after it.
        """
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


#: The usual ending, which asks for an answer.
ANSWERED = Ending()


def read_chat_template(file_or_text: str | Path) -> str:
    """The text of a chat template, checked.

    Args:
        file_or_text: A file, or a Jinja text: what has braces or several lines is one.

    Raises:
        TypeError: It is neither.
        FileNotFoundError: There is no such file.
        ValueError: The file is not readable, or the text is no Jinja template or reads no messages.
    """
    import jinja2

    from jetspec_jax.checkpoint.template_content import variables_of

    check_type("chat_template", file_or_text, str | Path, "a file or a Jinja text")
    text, where = str(file_or_text), "chat_template"
    if isinstance(file_or_text, Path) or not any(sign in text for sign in "{}\n"):
        path, where = Path(file_or_text), f"the chat template {file_or_text}"
        if not os.path.exists(file_or_text):  # false also for what no path can be
            raise FileNotFoundError(
                f"chat_template is {shown(text)}, which is no file; a Jinja text has braces"
            )
        check_small(path)
        with content_of(path):
            text = path.read_text(encoding="utf-8")
    try:
        names = variables_of(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{where} is no Jinja template: line {error.lineno}: {error.message}") from error
    if "messages" not in names:
        raise ValueError(f"{where} does not read `messages`, so that no conversation would be in its prompts")
    return text


class TemplateFailed(ValueError):
    """A chat template fails, by an error that it does not raise itself."""


def check_writes_tools(tokenizer: Any) -> None:
    """Checks that a tokenizer's chat template reads tools.

    Raises:
        ValueError: It does not. One that cannot be parsed is left to `render_chat`.
    """
    import jinja2

    from jetspec_jax.checkpoint.template_content import variables_of

    try:
        writes = "tools" in variables_of(tokenizer.get_chat_template(tools=[{}]))
    except (ValueError, jinja2.TemplateError):
        return
    if not writes:
        raise ValueError(
            f"the chat template does not write tools: {ANOTHER_TEMPLATE}, or say the tools in a message"
        )


def read_chats(messages: Any) -> list[list[dict[str, Any]]]:
    """Conversations, each of which says something; one alone counts as a list of one.

    Contents stay texts or lists of parts; `render_chat` writes parts as the template reads them. Arguments of
    calls that are JSON texts become mappings, which templates read.

    Raises:
        TypeError: Something is no message, or a role or a content of a wrong type.
        ValueError: There are no messages, a content is no text, or arguments are no JSON object.
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
    """A message whose content is a text or a list of text parts."""
    check_type(where, message, Mapping, 'a mapping with "role" and "content"')
    read = dict(message)
    check_type(f'"role" of {where}', read.get("role"), str, "a string")
    content = read.get("content")
    # What only calls tools says nothing.
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
    """A part of a content, which is a text; null stands for a key left out."""
    check_type(where, part, Mapping, '{"type": "text", "text": "…"}')
    if part.get("type") != "text":
        raise ValueError(f'{where} is of type {shown(part.get("type"))}; "text" alone is supported')
    if unknown := [key for key, value in part.items() if key not in ("type", "text") and value is not None]:
        raise ValueError(f"{where} has unknown keys: {shown(unknown)}")
    check_type(f'"text" of {where}', part.get("text"), str, "a string")
    check_text(f'"text" of {where}', part["text"])
    return {"type": "text", "text": part["text"]}


def _call(call: Any, where: str) -> Any:
    """A call of a tool, whose arguments are a mapping where they were a JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": read_arguments(text, where)}}


def read_arguments(text: str, where: str = "messages") -> dict[str, Any]:
    """The arguments of a call, which clients send as JSON; an empty text is a call without arguments.

    Raises:
        ValueError: The text is no JSON object.
    """
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"arguments of a call in {where} must be a JSON object, not {shown(text)}")
    return value


def check_template_arguments(names: Iterable[str]) -> None:
    """Checks that arguments are the template's.

    Raises:
        ValueError: Some are not.
    """
    if taken := sorted(RESERVED & set(names)):
        raise ValueError(f"{', '.join(taken)} cannot be template arguments: they are set already")


def unread(tokenizer: Any, template_arguments: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Which of the names the chat template does not read; with tools it may be another template."""
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
    """A conversation as its tokenizer's template writes it.

    A template that loops over the parts of a content gets the list of parts. Any other template gets one
    text, a line for each part. A template that does not know the role "developer" gets "system" instead.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        messages: The conversation.
        template_arguments: Passed to the template; see `check_template_arguments`.
        where: What error messages call the conversation, if there are several.
        **settings: Of the tokenizer's ``apply_chat_template``, which gives what they ask for.

    Raises:
        ValueError: The template refuses the conversation, which is also how a template says that roles must
            alternate; the message holds what it says. Where it fails, a `TemplateFailed`.
    """
    import jinja2

    from jetspec_jax.checkpoint.template_content import walks_parts

    prefix = f"{where}: " if where else ""
    try:
        template = tokenizer.get_chat_template(tools=template_arguments.get("tools"))
        chat = [_adapted(message, template, walks_parts(template)) for message in messages]
        return tokenizer.apply_chat_template(chat, **settings, **template_arguments)
    except RecursionError as error:
        raise ValueError(f"{prefix}the conversation is nested too deeply for its chat template") from error
    except Exception as error:  # a template is a program, which may divide by zero too
        if type(error) is jinja2.TemplateError:  # of the template's `raise_exception`
            raise ValueError(f"{prefix}the chat template refuses the conversation: {error}") from error
        # transformers repeats the whole conversation after the first line of what it says.
        line = shortened(str(error).partition("\n")[0], _MOST_SAID)
        said = f"{prefix}the chat template fails on the conversation: {line or type(error).__name__}"
        raise TemplateFailed(said) from error


def _adapted(message: Mapping[str, Any], template: str, walks: bool) -> dict[str, Any]:
    """A message in the form that a template reads."""
    adapted = dict(message)
    if adapted.get("role") == "developer" and "developer" not in template:
        adapted["role"] = "system"
    if not walks and isinstance(content := adapted.get("content"), list | tuple):
        adapted["content"] = "\n".join(part["text"] for part in content)
    return adapted
