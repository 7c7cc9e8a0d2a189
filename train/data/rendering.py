"""Encodes entries with a target's tokenizer and chat template. Shapes: T tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from jetspec_jax.checkpoint.chat_template import check_template_arguments, render_chat
from train.data.prompts import MESSAGES, PROMPT, TEXT, Entry
from train.data.records import Document

# Marks that some templates put around the assistant's text.
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoder:
    """Turns entries into token ids with a target's tokenizer and chat template.

    Attributes:
        tokenizer: The target's transformers tokenizer.
        end_ids: Tokens that end a sequence, besides the tokenizer's special ones.
        template_arguments: Arguments of the chat template, for instance ``enable_thinking``.
    """

    tokenizer: Any
    end_ids: Sequence[int] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError if there is no tokenizer, or an argument is not one of the template."""
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer, so it cannot read prompts")
        check_template_arguments(self.template_arguments)

    def prompt(self, entry: Entry) -> Int32[np.ndarray, "T"]:
        """The tokens that the target continues.

        A conversation loses its last message if that is the assistant's. A text or prompt is kept as it is.

        Raises:
            ValueError: No message is left to answer, or the chat template refuses the conversation.
        """
        if entry.kind != MESSAGES:
            return self._text(entry)
        messages = entry.value
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            last = f"a message of the {messages[-1]['role']}" if messages else "no message"
            raise ValueError(
                f"{entry.where}: {last} stands before the answer that is to be written; it must be the "
                "user's or a tool's"
            )
        ids = self._render(entry, messages, tokenize=True, return_dict=False, add_generation_prompt=True)
        return np.asarray(ids, np.int32)

    def document(self, entry: Entry) -> Document:
        """The whole text, with the tokens to learn marked.

        In a conversation those are the answers and the tokens that end their turns; in a text, all tokens but
        the first.

        Raises:
            ValueError: No token would be marked, or the chat template does not show which ones to mark.
        """
        if entry.kind == PROMPT:
            raise ValueError(
                f'{entry.where}: a "prompt" has no continuation to learn from; name the key "text" if it is '
                "whole, or let the target continue it (--mode regenerate)"
            )
        if entry.kind == TEXT:
            tokens = self._text(entry)
            learn = np.arange(len(tokens)) > 0
        else:
            if not any(message["role"] == "assistant" for message in entry.value):
                raise ValueError(
                    f"{entry.where}: a document without assistant tokens: no message is the assistant's; let "
                    "the target answer it (--mode regenerate)"
                )
            tokens, learn = self._conversation(entry)
        if not learn.any():
            raise ValueError(f"{entry.where}: a document without assistant tokens; it needs at least one")
        return Document(tokens, learn)

    def _text(self, entry: Entry) -> Int32[np.ndarray, "T"]:
        tokens = np.asarray(self.tokenizer.encode(entry.value), np.int32)
        if not len(tokens):
            raise ValueError(f"{entry.where}: the tokenizer makes no tokens of the text")
        return tokens

    def _conversation(self, entry: Entry) -> tuple[Int32[np.ndarray, "T"], Bool[np.ndarray, "T"]]:
        messages = entry.value
        if GENERATION_MARK.search(self._template(entry)):
            marked = self._render(entry, messages, tokenize=True, return_assistant_tokens_mask=True)
            return np.asarray(marked["input_ids"], np.int32), np.asarray(marked["assistant_masks"], bool)
        whole = self._render(entry, messages)
        tokens = self._ids(whole)
        learn = np.zeros(len(tokens), bool)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                if number == 0:
                    raise ValueError(
                        f"{entry.where}: the conversation begins with the assistant, so nobody can tell what "
                        "the chat template puts before its words; begin with the user or the system"
                    )
                before = self._render(entry, messages[:number], add_generation_prompt=True)
                after = self._render(entry, messages[: number + 1])
                begin = self._prefix(entry, number, before, whole, tokens)
                end = self._prefix(entry, number, after, whole, tokens)
                learn[begin : self._turn_end(tokens, begin, end)] = True
        return tokens, learn

    def _prefix(
        self, entry: Entry, number: int, part: str, whole: str, tokens: Int32[np.ndarray, "T"]
    ) -> int:
        """How many of the conversation's tokens its rendered beginning ``part`` has."""
        if not whole.startswith(part):
            raise ValueError(
                f"{entry.where}: the chat template writes message {number} otherwise once others follow, or "
                "begins it otherwise than it asks for an answer, so what the assistant wrote cannot be told; "
                "some templates drop the thoughts of earlier turns. Split the conversation, change the "
                "template's arguments, or let the target write the answers (--mode regenerate)"
            )
        ids = self._ids(part)
        if not np.array_equal(ids, tokens[: len(ids)]):
            raise ValueError(
                f"{entry.where}: where message {number} begins or ends, a token spans both sides, so what "
                "the assistant wrote cannot be told token by token; it may begin or end with white space"
            )
        return len(ids)

    def _turn_end(self, tokens: Int32[np.ndarray, "T"], begin: int, end: int) -> int:
        """Where an answer ends: after its end-of-turn token, if only white space follows that."""
        added = self.tokenizer.added_tokens_decoder
        special = {*self.end_ids, *(token for token, entry in added.items() if entry.special)}
        last = next((i for i in range(end - 1, begin - 1, -1) if int(tokens[i]) in special), None)
        if last is None or self.tokenizer.decode(tokens[last + 1 : end].tolist()).strip():
            return end
        return last + 1

    def _template(self, entry: Entry) -> str:
        try:
            return self.tokenizer.get_chat_template()
        except ValueError as error:
            raise ValueError(
                f'{entry.where}: the target\'s tokenizer has no chat template, so it cannot read "messages"'
            ) from error

    def _render(self, entry: Entry, messages: list[dict[str, Any]], **arguments: Any) -> Any:
        self._template(entry)
        settings = {"tokenize": False, **arguments}
        return render_chat(self.tokenizer, messages, self.template_arguments, where=entry.where, **settings)

    def _ids(self, text: str) -> Int32[np.ndarray, "T"]:
        """Token ids of a rendered text, which already has its special tokens."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)
