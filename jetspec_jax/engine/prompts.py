"""Reads and checks prompts in any of their forms: T prompt tokens."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
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
_TEXT, _IDS = "prompt", "prompt_token_ids"
_FORMS = f'a text, a list of token ids, {{"{_TEXT}": a text}} or {{"{_IDS}": token ids}}'


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as tokens."""

    ids: Int32[np.ndarray, "T"]  # at least one, all in the vocabulary
    text: str | None = None  # None if it was given as token ids
    # Whether an output continues its text. If not, as in the answer to a conversation, an output begins a
    # text of its own, at whose start some tokenizers' decoders remove a space.
    continues: bool = True
    # Special tokens that the text of an output keeps even if others are skipped, because a parser reads them.
    kept_special_tokens: frozenset[int] = frozenset()


#: One prompt: a text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or an encoded prompt.
Prompt = str | TokenIds | Mapping[str, Any] | EncodedPrompt


def read_prompts(target: Target, prompts: Any) -> list[EncodedPrompt]:
    """Encodes prompts; a single prompt, or one list of token ids, counts as a list of one.

    Raises TypeError for what is no prompt, and ValueError for a prompt that cannot be encoded, is empty, or
    has an unknown token or key.
    """
    if _is_array(prompts):
        prompts = np.asarray(prompts)
        each: Any = [prompts] if prompts.ndim == 1 else list(prompts) if prompts.ndim else None
    elif isinstance(prompts, str | bytes | Mapping | EncodedPrompt):
        each = [prompts]
    elif isinstance(prompts, Iterable) and not isinstance(prompts, Set):
        each = list(prompts)
        if any(isinstance(prompt, int | float | np.number) for prompt in each):
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
    """Encodes a prompt; an encoded prompt is returned unchanged. Raises as `read_prompts`."""
    if isinstance(prompt, EncodedPrompt):
        return prompt
    if isinstance(prompt, Mapping):
        prompt = _of_mapping(prompt)
    if isinstance(prompt, str):
        return encode_text(target, prompt)
    if isinstance(prompt, bytes | Mapping) or not (isinstance(prompt, Sequence) or _is_array(prompt)):
        raise TypeError(f"a prompt must be {_FORMS}, not {shown(prompt)}")
    return _encoded(target, prompt)


def encode_text(target: Target, text: str, **settings: Any) -> EncodedPrompt:
    """Encodes a text; ``settings`` are arguments of the tokenizer's ``encode``. Raises as `read_prompts`."""
    tokenizer = _tokenizer(target)
    check_text("the prompt", text)
    return _encoded(target, tokenizer.encode(text, **settings), text)


def encode_chat(
    target: Target, chat: Chat, arguments: Mapping[str, Any], ending: Ending = ANSWERED
) -> EncodedPrompt:
    """Encodes a conversation from `read_chats` with the tokenizer's chat template.

    The template gets the ``arguments``; see `check_template_arguments`. Raises ValueError if there is no
    template, if it refuses the conversation, fails, or ignores the tools, or if the conversation cannot end
    as ``ending`` says.
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
    # The template adds the special tokens.
    return replace(encode_text(target, text, add_special_tokens=False), continues=continues)


def templated(target: Target) -> Any:
    """The target's tokenizer; ValueError without one, or without a chat template."""
    tokenizer = _tokenizer(target)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template: give one by --chat-template FILE or "
            "chat_template=…, or use generate"
        )
    return tokenizer


def _tokenizer(target: Target) -> Any:
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer; pass token ids to generate")
    return target.tokenizer


def _encoded(target: Target, ids: Any, text: str | None = None) -> EncodedPrompt:
    ids = check_ids(ids, "prompt", target.config.vocab_size)
    if not ids.size:
        raise ValueError("the prompt is empty; it needs at least one token")
    return EncodedPrompt(ids, text)


def check_ids(ids: Any, name: str, vocab_size: int) -> Int32[np.ndarray, "T"]:
    """Token ids as an array; TypeError unless they are integers in one row, ValueError for unknown ones."""
    if isinstance(ids, str | bytes) or not (isinstance(ids, Sequence) or _is_array(ids)):
        raise TypeError(f"{name} must be a list of token ids, not {shown(ids)}")
    # As objects, list items keep their type: NumPy would convert booleans to integers.
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
    """Prefixes TypeError and ValueError with the argument's name, unless ``where`` is empty."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not where:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}: {error}") from error


def _is_array(value: object) -> bool:
    """Whether it is an array of NumPy or JAX, or converts to one."""
    return hasattr(value, "__array__")


def _of_mapping(prompt: Mapping[Any, Any]) -> Any:
    """The text or the token ids of a mapping."""
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
