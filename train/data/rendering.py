"""Encodes entries with a target's tokenizer and chat template. Shapes: T tokens."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from jetspec_jax.checkpoint.chat_template import check_template_arguments, check_writes_tools, render_chat
from train.data.messages import REASONING, WEIGHT
from train.data.prompts import MESSAGES, PROMPT, Entry
from train.data.records import Document

# Tags that some templates put around the assistant's text.
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Most turns of a conversation times its characters: each turn is rendered and encoded with its history.
MOST_HISTORY = 2**25


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
        """Raises ValueError if there is no tokenizer, or the template does not have an argument."""
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer, so it cannot read prompts")
        check_template_arguments(self.template_arguments)

    def prompt(self, entry: Entry) -> Int32[np.ndarray, "T"]:
        """The tokens that the target continues.

        If a conversation ends with an assistant message, that message is dropped. A text or prompt is kept.

        Raises:
            ValueError: No message remains to answer, or the chat template refuses the conversation.
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

    def prompts(self, entry: Entry, *, every: bool = False) -> list[Int32[np.ndarray, "T"]]:
        """The prompts of an entry: that of `prompt`, or one for every assistant turn.

        Turns that are excluded from learning are not asked for.

        Args:
            every: Whether a conversation gives a prompt for each assistant turn, and one for its end, each
                with the history before it.

        Raises:
            ValueError: As for `prompt`; no turn is left; or the turns exceed `MOST_HISTORY`.
        """
        if entry.kind != MESSAGES:
            return [self.prompt(entry)]
        messages = entry.value
        ends = [number + 1 for number in _learnt_turns(messages)]
        if messages[-1]["role"] != "assistant":
            ends.append(len(messages))
        if not every:
            ends = [end for end in ends if end == len(messages)]
        if not ends:
            raise ValueError(f"{entry.where}: what the target would answer is excluded from learning")
        self._check_histories(entry, ends)
        return [self.prompt(replace(entry, value=messages[:end])) for end in ends]

    def root(self, entry: Entry) -> bytes:
        """A key shared by all entries of a conversation: its text up to the first assistant turn.

        Raises:
            ValueError: The chat template refuses the conversation, or the text has no tokens.
        """
        if entry.kind != MESSAGES:
            return self._text(entry).tobytes()
        turns = (number for number, message in enumerate(entry.value) if message["role"] == "assistant")
        first = next(turns, len(entry.value)) or len(entry.value)
        return self._ids(self._render(entry, entry.value[:first], add_generation_prompt=True)).tobytes()

    def documents(self, entry: Entry) -> list[Document]:
        """Documents that teach every assistant turn after the history that the target saw.

        The tokens to learn are marked: in a conversation the answers and their end-of-turn tokens, in a text
        all tokens but the first. Turns share a document as long as the chat template renders them the same in
        the longer conversation. A template that drops earlier reasoning gives several documents. Turns that
        are excluded from learning are only history.

        Raises:
            ValueError: No token would be marked; the answers' tokens cannot be found in the chat template's
                output; the template omits a part of an answer: reasoning, calls or content; or the turns
                exceed `MOST_HISTORY`.
        """
        if entry.kind == PROMPT and entry.answer is None:
            raise ValueError(
                f'{entry.where}: a "prompt" has no continuation to learn from; name the key "text" if it is '
                "whole, or let the target continue it (--mode regenerate)"
            )
        if entry.kind != MESSAGES:
            documents = [self._text_document(entry)]
        else:
            turns = _learnt_turns(entry.value)
            if not turns and any(message["role"] == "assistant" for message in entry.value):
                raise ValueError(f"{entry.where}: all messages of the assistant are excluded from learning")
            if not turns:
                raise ValueError(
                    f"{entry.where}: a document without assistant tokens: no message is the assistant's; let "
                    "the target answer it (--mode regenerate)"
                )
            self._check_histories(entry, [number + 1 for number in turns])
            documents = []
            for number in turns:
                turn = self._turn(entry, number)
                if documents:
                    before = documents[-1]
                    end = max(np.flatnonzero(before.learn) + 1, default=0)
                    if np.array_equal(turn.tokens[:end], before.tokens[:end]):
                        turn.learn[:end] = before.learn[:end]
                        documents.pop()
                documents.append(turn)
        documents = [document for document in documents if document.learn.any()]
        if not documents:
            raise ValueError(f"{entry.where}: a document without assistant tokens; it needs at least one")
        return documents

    def _check_histories(self, entry: Entry, ends: Sequence[int]) -> None:
        """Checks the work of rendering all messages before each of the ends of turns, before rendering."""
        try:
            characters = sum(len(str(message)) for message in entry.value[: ends[-1]])
        except RecursionError as error:
            raise ValueError(f"{entry.where}: the conversation is nested too deeply") from error
        if len(ends) * characters > MOST_HISTORY:
            raise ValueError(
                f"{entry.where}: {len(ends):,} turns in {characters:,} characters; each turn is rendered "
                f"with its history, so turns times characters may be at most {MOST_HISTORY:,}: split the "
                "conversation"
            )

    def _text_document(self, entry: Entry) -> Document:
        tokens = self._text(entry)
        if entry.answer is None:
            return Document(tokens, np.arange(len(tokens)) > 0)
        answer = self._ids(entry.answer)
        whole = np.concatenate([tokens, answer])
        return Document(whole, np.arange(len(whole)) >= len(tokens))

    def _text(self, entry: Entry) -> Int32[np.ndarray, "T"]:
        tokens = np.asarray(self.tokenizer.encode(entry.value), np.int32)
        if not len(tokens):
            raise ValueError(f"{entry.where}: the tokenizer makes no tokens of the text")
        return tokens

    def _turn(self, entry: Entry, number: int) -> Document:
        """The conversation up to an assistant message, with the tokens of that message marked."""
        marks = GENERATION_MARK.search(self._template(entry))
        if number == 0 and not marks:
            raise ValueError(
                f"{entry.where}: the conversation begins with the assistant, so it is unknown what "
                "the chat template puts before its words; begin with the user or the system"
            )
        messages = entry.value[: number + 1]
        before = self._render(entry, messages[:number], add_generation_prompt=True) if number else ""
        after = self._render(entry, messages)
        if not after.startswith(before):
            raise ValueError(
                f"{entry.where}: the chat template begins message {number} differently from a prompt for "
                "an answer, so the assistant's text cannot be located. Change the template's arguments, or "
                "let the target write the answers (--mode regenerate)"
            )
        self._check_written(entry, number, after[len(before) :])
        prefix = self._ids(before)
        if marks:
            marked = self._render(entry, messages, tokenize=True, return_assistant_tokens_mask=True)
            tokens = np.asarray(marked["input_ids"], np.int32)
            learn = np.asarray(marked["assistant_masks"], bool)
            learn[: len(prefix)] = False
        else:
            tokens, begin = self._ids(after), len(prefix)
            if not np.array_equal(prefix, tokens[:begin]):
                raise ValueError(
                    f"{entry.where}: where message {number} begins, a token spans both sides, so the "
                    "assistant's tokens cannot be located; the text may begin with white space"
                )
            learn = np.zeros(len(tokens), bool)
            learn[begin : self._turn_end(tokens, begin)] = True
        if entry.cut and number == len(entry.value) - 1 and learn.any():
            # The end-of-turn token is the template's; the target's answer was cut off before it.
            end = int(np.flatnonzero(learn)[-1])
            end += int(tokens[end]) not in self._ends()
            tokens, learn = tokens[:end], learn[:end]
        return Document(tokens, learn)

    def _check_written(self, entry: Entry, number: int, written: str) -> None:
        """Checks that the chat template wrote all of an answer: its thoughts, its content and its calls."""
        message = entry.value[number]
        content = message.get("content") or ""
        texts = [part["text"] for part in content] if isinstance(content, list) else [content]
        calls = message.get("tool_calls") or []
        expected = {
            "thoughts": [message.get(REASONING[0], "")],
            # Templates separate thoughts inside a content from it.
            "content": [text.rpartition("</think>")[2] for text in texts],
            "calls": [call["function"]["name"] for call in calls],
        }
        for what, pieces in expected.items():
            if not all(piece.strip() in written for piece in pieces):
                raise ValueError(
                    f"{entry.where}: the chat template does not write the {what} of message {number}, so a "
                    "head would learn an answer that the target did not give; use a template that writes them"
                )

    def _ends(self) -> set[int]:
        """Ids of tokens that may end a turn."""
        added = self.tokenizer.added_tokens_decoder
        return {*self.end_ids, *(token for token, entry in added.items() if entry.special)}

    def _turn_end(self, tokens: Int32[np.ndarray, "T"], begin: int) -> int:
        """Where an answer ends: after its end-of-turn token, if only white space follows that."""
        special = self._ends()
        last = next((i for i in range(len(tokens) - 1, begin - 1, -1) if int(tokens[i]) in special), None)
        if last is None or self.tokenizer.decode(tokens[last + 1 :].tolist()).strip():
            return len(tokens)
        return last + 1

    def _template(self, entry: Entry) -> str:
        try:
            return self.tokenizer.get_chat_template(tools=entry.tools)
        except ValueError as error:
            raise ValueError(
                f'{entry.where}: the target\'s tokenizer has no chat template, so it cannot read "messages"'
            ) from error

    def _render(self, entry: Entry, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Any:
        template = self._template(entry)
        arguments = {**self.template_arguments, **entry.template_arguments}
        try:
            check_template_arguments(entry.template_arguments)
            if entry.tools:
                check_writes_tools(self.tokenizer)
                arguments["tools"] = entry.tools
        except ValueError as error:
            raise ValueError(f"{entry.where}: {error}") from error
        read = (name for name in REASONING if re.search(rf"[.'\"]{name}\b", template))
        name = next(read, REASONING[0])
        chat = [
            {name if key == REASONING[0] else key: value for key, value in message.items() if key != WEIGHT}
            for message in messages
        ]
        settings = {"tokenize": False, **settings}
        try:
            return render_chat(self.tokenizer, chat, arguments, where=entry.where, **settings)
        except ValueError as error:
            reason = str(error).removeprefix(f"{entry.where}: ")
            if _repeats(reason.partition("conversation: ")[2], messages):
                reason = "the chat template refuses the conversation, for a reason that repeats text of it"
                raise ValueError(f"{entry.where}: {reason}") from None
            raise

    def _ids(self, text: str) -> Int32[np.ndarray, "T"]:
        """Token ids of a rendered text, which already contains its special tokens."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)


def _learnt_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of the assistant's messages that are not excluded from learning."""
    return [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and message.get(WEIGHT) != 0
    ]


def _repeats(message: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an error's message contains a word of the conversation of at least six characters."""
    try:
        text = json.dumps([{**message, "role": ""} for message in messages], ensure_ascii=False, default=str)
    except RecursionError:
        return True
    return any(len(word) > 5 and word in text for word in re.findall(r"\w+", message))
