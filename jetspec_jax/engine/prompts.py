"""Prompts as callers bring them, in any of their forms, read and checked: T prompt tokens."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jaxtyping import ArrayLike, Int32

from jetspec_jax.arguments import check_text, check_type, is_integer, shown
from jetspec_jax.checkpoint.chat_template import (
    ANOTHER_TEMPLATE,
    ANSWERED,
    Chat,
    Ending,
    TemplateFailed,
    check_writes_tools,
    render_chat,
)
from jetspec_jax.checkpoint.loading import Target

#: A prompt as token ids: a list of them, or an array.
TokenIds = ArrayLike | Sequence[int]
#: One prompt: a text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
Prompt = str | TokenIds | Mapping[str, Any]

_TEXT, _IDS = "prompt", "prompt_token_ids"
_FORMS = f'a text, a list of token ids, {{"{_TEXT}": a text}} or {{"{_IDS}": token ids}}'


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt that has been read.

    Attributes:
        ids: Its tokens, at least one, all of them in the vocabulary.
        text: What they were made of; None if it was token ids.
    """

    ids: Int32[np.ndarray, "T"]
    text: str | None = None


def read_prompts(target: Target, prompts: Any) -> list[EncodedPrompt]:
    """Prompts as tokens; one alone counts as a list of one, and so does one list of token ids.

    Raises:
        TypeError: Something is no prompt.
        ValueError: One cannot be encoded, is empty, has a token outside the vocabulary or an unknown key.
    """
    if _is_array(prompts):
        prompts = np.asarray(prompts)
        each: Any = [prompts] if prompts.ndim == 1 else list(prompts) if prompts.ndim else None
    elif isinstance(prompts, str | bytes | Mapping | EncodedPrompt):
        each = [prompts]
    elif isinstance(prompts, Iterable) and not isinstance(prompts, Set):
        each = list(prompts)
        if any(isinstance(one, int | float | np.number) for one in each):
            each = [each]
    else:
        each = None
    if each is None:
        raise TypeError(f"prompts must be {_FORMS}, or a list of these, not {shown(prompts)}")
    read = []
    for number, prompt in enumerate(each):
        with naming(f"prompts[{number}]" if len(each) > 1 else ""):
            read.append(read_prompt(target, prompt))
    return read


def read_prompt(target: Target, prompt: Any) -> EncodedPrompt:
    """One prompt as tokens; what was read already is left as it is.

    Raises:
        TypeError: It is no prompt.
        ValueError: As `read_prompts`.
    """
    if isinstance(prompt, EncodedPrompt):
        return prompt
    if isinstance(prompt, Mapping):
        prompt = _of_mapping(prompt)
    if isinstance(prompt, str):
        return encode_text(target, prompt)
    if isinstance(prompt, bytes | Mapping) or not (isinstance(prompt, Sequence) or _is_array(prompt)):
        raise TypeError(f"a prompt must be {_FORMS}, not {shown(prompt)}")
    ids = check_ids(prompt, "prompt", target.config.vocab_size)
    if not ids.size:
        raise ValueError("the prompt is empty; it needs at least one token")
    return EncodedPrompt(ids)


def encode_text(target: Target, text: str, **settings: Any) -> EncodedPrompt:
    """A text as its tokenizer's tokens; ``settings`` are those of the tokenizer's ``encode``.

    Raises:
        ValueError: There is no tokenizer, the text is no valid Unicode, or it has no tokens.
    """
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer; pass token ids to generate")
    check_text("the prompt", text)
    ids = check_ids(target.tokenizer.encode(text, **settings), "prompt", target.config.vocab_size)
    if not ids.size:
        raise ValueError("the prompt is empty; it needs at least one token")
    return EncodedPrompt(ids, text)


def encode_chat(
    target: Target, chat: Chat, arguments: Mapping[str, Any], ending: Ending = ANSWERED
) -> EncodedPrompt:
    """A conversation as the tokens of its chat template.

    Args:
        target: The target.
        chat: One of `read_chats`.
        arguments: Passed to the template; see `check_template_arguments`.
        ending: How the prompt ends.

    Raises:
        ValueError: There is no tokenizer or no template, the template refuses the conversation, fails, or
            does not write the tools that it is given, or the conversation cannot end so.
    """
    tokenizer = templated(target)
    continues = ending.continues(chat)
    if arguments.get("tools"):
        check_writes_tools(tokenizer)
    try:
        text = render_chat(
            tokenizer,
            chat,
            arguments,
            tokenize=False,
            add_generation_prompt=ending.add_generation_prompt,
            continue_final_message=continues,
        )
    except TemplateFailed as error:
        raise ValueError(f"{error}; {ANOTHER_TEMPLATE}") from error
    # The template has written the special tokens.
    return encode_text(target, text, add_special_tokens=False)


def templated(target: Target) -> Any:
    """The target's tokenizer, which has a chat template.

    Raises:
        ValueError: There is no tokenizer, or it has none.
    """
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer; pass token ids to generate")
    if not getattr(target.tokenizer, "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template: give one by --chat-template FILE or "
            "chat_template=…, or use generate"
        )
    return target.tokenizer


def check_ids(ids: Any, name: str, vocab_size: int) -> Int32[np.ndarray, "T"]:
    """One sequence of token ids as an array.

    Raises:
        TypeError: They are no integers in one row.
        ValueError: One lies outside the vocabulary.
    """
    if isinstance(ids, str | bytes) or not (isinstance(ids, Sequence) or _is_array(ids)):
        raise TypeError(f"{name} must be a list of token ids, not {shown(ids)}")
    # As objects, list items stay what they are: NumPy would make integers of booleans.
    array = np.asarray(ids) if _is_array(ids) else np.fromiter(ids, object, len(ids))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuO"):
        raise TypeError(f"{name} must be a list of token ids, not {array.dtype} of shape {list(array.shape)}")
    if array.dtype.kind == "O":
        wrong = next((place for place, token in enumerate(array) if not is_integer(token)), None)
        if wrong is not None:
            raise TypeError(
                f"{name} must be a list of token ids: at position {wrong} it has {shown(array[wrong])}, "
                "no integer"
            )
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"token id {shown(outside.tolist()[0])} in {name} lies outside the vocabulary 0..{vocab_size - 1}"
        )
    return array.astype(np.int32)


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Errors about what callers gave say where it stands; nothing is added without a place."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not where:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}: {error}") from error


def _is_array(value: object) -> bool:
    """Whether it is an array: NumPy's, JAX's, or anything that becomes one."""
    return hasattr(value, "__array__")


def _of_mapping(prompt: Mapping[Any, Any]) -> Any:
    """The text or the token ids of a prompt that is a mapping."""
    given = list(prompt)
    unknown = [key for key in given if key not in (_TEXT, _IDS)]
    if unknown:
        raise ValueError(f'a prompt has either "{_TEXT}" or "{_IDS}"; unknown: {shown(unknown)}')
    if len(given) != 1:
        raise ValueError(f'a prompt has either "{_TEXT}" or "{_IDS}", not {"both" if given else "neither"}')
    [(key, value)] = prompt.items()
    if key == _TEXT:
        check_type(f'"{_TEXT}" of a prompt', value, str, "a text")
    elif isinstance(value, str | bytes | Mapping):
        raise TypeError(f'"{_IDS}" of a prompt must be a list of token ids, not {shown(value)}')
    return cast("str | TokenIds", value)
