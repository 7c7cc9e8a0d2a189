"""Conversations in the form of a tokenizer's chat template."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Settings of a rendering that its caller makes, so that nobody can pass them on to the template.
RESERVED = frozenset({"tokenize", "add_generation_prompt", "return_dict", "return_assistant_tokens_mask"})


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

    try:
        return tokenizer.apply_chat_template(list(messages), **settings, **template_arguments)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        prefix = f"{where}: " if where else ""
        raise ValueError(f"{prefix}the chat template refuses the conversation: {error}") from error
