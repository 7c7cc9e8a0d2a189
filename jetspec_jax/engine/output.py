"""Completions, and the one place that decides where a request's output ends."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream

from jetspec_jax.sampling.params import SamplingParams


@dataclass(frozen=True)
class Completion:
    """What a request got.

    Attributes:
        text: The generated text without special tokens and without a stop string; None without a tokenizer.
        token_ids: The generated tokens; an end-of-sequence or stop token that ended them is the last one.
        finish_reason: "stop" (end of sequence, stop token or stop string) or "length" (``max_tokens``).
        rounds: Rounds of speculation, or plain steps; the first token comes from the prompt's forward.
        accept_lengths: Tokens that each round committed: accepted drafted tokens plus one, before any cut.
        tree_sizes: Nodes of each round's tree, root included.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    accept_lengths: list[int] = field(repr=False)
    tree_sizes: list[int] = field(repr=False)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.accept_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Acceptance length tau: mean tokens committed per round; NaN when no round was needed."""
        return sum(self.accept_lengths) / self.rounds if self.rounds else float("nan")


class Output:
    """A request's output while it grows: tokens in, text and the end out.

    Tokens that a round committed behind the end are dropped. Stop conditions are looked at before the length,
    so that a stop on the last allowed token is a stop.
    """

    def __init__(self, params: SamplingParams, stop_ids: Collection[int], tokenizer: Any):
        """Starts an empty output.

        Args:
            params: The request's settings.
            stop_ids: All tokens that end it.
            tokenizer: A transformers tokenizer, or None.
        """
        self.token_ids: list[int] = []
        self.accept_lengths: list[int] = []
        self.tree_sizes: list[int] = []
        self.finish_reason: str | None = None
        self.text = ""
        self._max_tokens, self._stop, self.stop_ids = params.max_tokens, tuple(params.stop or ()), stop_ids
        # The library's own tokenizer decodes token by token, holding back incomplete characters.
        self._tokenizer = None if tokenizer is None else tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add_round(self, tokens: list[int], tree_size: int) -> None:
        """Takes the tokens that one round committed; nothing once the output has ended."""
        if self.finish_reason is None:
            self.accept_lengths.append(len(tokens))
            self.tree_sizes.append(tree_size)
            self.add_tokens(tokens)

    def add_tokens(self, tokens: list[int]) -> None:
        """Takes tokens up to the output's end."""
        for token in tokens:
            if self.finish_reason is not None:
                return
            self.token_ids.append(token)
            is_stop = token in self.stop_ids
            if is_stop or self._decode(token):
                self.finish_reason = "stop"
            elif len(self.token_ids) == self._max_tokens:
                self.finish_reason = "length"
            if self.finish_reason == "length" or is_stop:
                self._flush(self.token_ids[:-1] if is_stop else self.token_ids)

    @property
    def settled_text(self) -> str:
        """The text that nothing to come can take back: without a tail that may begin a stop string."""
        if self.finish_reason is not None:
            return self.text
        held = max(
            (size for stop in self._stop for size in range(1, len(stop)) if self.text.endswith(stop[:size])),
            default=0,
        )
        return self.text[: len(self.text) - held]

    def completion(self) -> Completion:
        """The finished completion."""
        assert self.finish_reason is not None, "the request still runs"
        text = None if self._tokenizer is None else self.text
        return Completion(text, self.token_ids, self.finish_reason, self.accept_lengths, self.tree_sizes)

    def _decode(self, token: int) -> bool:
        """Adds a token's text; True if a stop string ends it there."""
        if self._tokenizer is None:
            return False
        piece = self._stream.step(self._tokenizer, token)
        return piece is not None and self._extend(piece)

    def _flush(self, tokens: list[int]) -> None:
        """Adds what the decoder held back of a character that will not be completed."""
        if self._tokenizer is not None:
            whole = self._tokenizer.decode(tokens, skip_special_tokens=True)
            if whole.startswith(self.text):
                self.text = whole

    def _extend(self, piece: str) -> bool:
        self.text += piece
        starts = [self.text.find(stop) for stop in self._stop]
        found = [start for start in starts if start >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
