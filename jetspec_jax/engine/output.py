"""A request's output: tokens, text, log-probabilities in the form of vLLM's results, and metrics."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from jetspec_jax.arguments import shown
from jetspec_jax.engine.detokenizer import Detokenizer, detokenizer_of
from jetspec_jax.engine.request import Request, TokenLogprobs


class Round(NamedTuple):
    """A round's part of a completion."""

    text: str  # final text of the round; empty without a tokenizer
    tokens: int  # number of tokens


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at a position.

    Attributes:
        logprob: Log-probability under the target's own distribution.
        rank: 1 for the likeliest of all tokens.
        decoded_token: The token's text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Metrics of a request; times are in seconds, None if the event has not happened."""

    queue_time: float | None  # from its arrival to its first slot
    time_to_first_token: float | None  # from its arrival to its first tokens
    decode_time: float | None  # from its first tokens to its end
    rounds: int  # of speculation, or plain steps
    drafts: int  # verified trees with more than a root
    drafted_tokens: int  # nodes of its trees without their roots
    accepted_tokens: int  # drafted tokens that the target agreed with, before any cut
    accepted_by_depth: tuple[int, ...]  # rounds that accepted at least 1, 2, 3, … drafted tokens
    prefix_tokens: int  # tokens of its prompt that were in the prefix cache
    preemptions: int

    @classmethod
    def of(cls, request: Request, rounds: int | None = None) -> "RequestMetrics":
        """Metrics so far; ``rounds`` excludes rounds after the output's end."""
        lengths, sizes = request.accept_lengths[:rounds], request.tree_sizes[:rounds]
        return cls(
            queue_time=_between(request.arrival, request.started),
            time_to_first_token=_between(request.arrival, request.first_token),
            decode_time=_between(request.first_token, request.ended),
            rounds=len(lengths),
            drafts=sum(size > 1 for size in sizes),
            drafted_tokens=sum(sizes) - len(sizes),
            accepted_tokens=sum(lengths) - len(lengths),
            accepted_by_depth=_at_least(lengths),
            prefix_tokens=request.prefix_tokens,
            preemptions=request.preemptions,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _at_least(lengths: Sequence[int]) -> tuple[int, ...]:
    """Number of lengths that include 1, 2, 3, … drafted tokens; a round's last token is not drafted."""
    return tuple(sum(length > depth for length in lengths) for depth in range(1, max(lengths, default=1)))


@dataclass(frozen=True)
class Completion:
    """The output of a request.

    Attributes:
        text: The generated text, with special tokens or a stop string only if these were asked for; None
            without a tokenizer.
        token_ids: The generated tokens; an end-of-sequence or stop token that ended them is the last one.
        finish_reason: "stop" (end of sequence, stop token or stop string), "length" (``max_tokens``), or
            "abort" (`AsyncLLM.abort`).
        rounds: Rounds of speculation, or plain steps: every token comes from one, the first too.
        accept_lengths: Tokens that each round committed: accepted drafted tokens plus one, before any cut.
        tree_sizes: Nodes of each round's tree, root included.
        tree_depths: Drafted tokens on the longest path of each round's tree; 0 for a plain step.
        prompt_token_ids: The prompt's tokens.
        prompt: The prompt's text; None if it was given as tokens.
        index: Its number among the prompt's ``n`` completions, from 0 on.
        metrics: Where its time went, and drafted and accepted tokens; None if not measured.
        logprobs: For each generated token, log-probabilities of it and of the likeliest tokens at its
            position, by token; None unless asked for.
        prompt_logprobs: Likewise for each token of the prompt, None for the first, which has no context. Also
            None, as a whole, if the request was aborted before its prompt was scored.
        stop_reason: The stop string, or the token of ``stop_token_ids``, that ended it; None for any other
            end.
        request_id: The caller's id of the request, or else its number in this process. The ``n``
            completions of a prompt share it.
        finished: True: vLLM's name for a complete result.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    accept_lengths: list[int]
    tree_sizes: list[int]
    prompt_token_ids: list[int] = field(default_factory=list)
    # Completions with the same tokens are equal, whether the prompt was a text or tokens.
    prompt: str | None = field(default=None, compare=False)
    index: int = 0
    # Their times may differ.
    metrics: RequestMetrics | None = field(default=None, compare=False)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    stop_reason: int | str | None = None
    request_id: str = field(default="", compare=False)
    tree_depths: list[int] = field(default_factory=list)
    finished: ClassVar[bool] = True

    def __repr__(self) -> str:
        number = f"index={self.index}, " if self.index else ""
        return (
            f"Completion({number}text={shown(self.text)}, {len(self.token_ids)} tokens, "
            f"finish_reason={self.finish_reason!r}, {self.rounds} rounds, "
            f"{self.mean_acceptance_length:.2f} tokens a round)"
        )

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.accept_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Acceptance length tau: mean tokens committed per round; NaN without rounds."""
        return sum(self.accept_lengths) / self.rounds if self.rounds else math.nan

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of all generated tokens; None unless ``logprobs`` were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


def describe(
    tokens: Sequence[int],
    rows: Sequence[TokenLogprobs],
    count: int,
    detokenizer: Detokenizer | None,
    beginning: int = 0,
) -> list[dict[int, Logprob]]:
    """Log-probabilities of each token and of the ``count`` likeliest tokens at its position, by token.

    The token itself is always included, and first. ``rows`` come from the device. The first ``beginning``
    tokens are at the beginning of a text.
    """

    def text_of(token: int, place: int) -> str | None:
        return None if detokenizer is None else detokenizer.token_text(token, begins=place < beginning)

    described = []
    for place, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        entry = {token: Logprob(row.chosen, row.rank, text_of(token, place))}
        best = zip(row.tokens[:count], row.likeliest[:count], strict=True)
        for rank, (candidate, value) in enumerate(best, start=1):
            entry[candidate] = Logprob(value, rank, text_of(candidate, place))
        described.append(entry)
    return described


class Output:
    """A request's tokens as text while they arrive; finds stop strings, which engines do not know.

    Tokens after the end are dropped.
    """

    def __init__(self, request: Request, tokenizer: Any):
        """The output of a request, with a transformers tokenizer or None."""
        self.request = request
        self._params = request.params
        self._stop = tuple(request.params.stop or ())
        self._detokenizer = detokenizer_of(tokenizer)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text = ""
        self._rounds = self._reached = 0
        # No stop string ends within this many first characters of the text and the held text.
        self._searched = 0
        # For each stop string, the number of its first characters that end the text.
        self._begun = [0] * len(self._stop)
        # Number of first tokens that are decoded as the beginning of a text.
        self._beginning = 0
        prompt = request.prompt.tolist() if request.continues else ()
        self._stream = self._detokenizer and self._detokenizer.stream(
            skip_special_tokens=self._params.skip_special_tokens,
            kept=request.kept_special_tokens,
            prompt=prompt,
            # A grammar reads a text's first space, so the text keeps it.
            keep_space=self._params.structured_outputs is not None,
        )

    def __del__(self) -> None:
        """Cancels the request, as no caller waits for it."""
        self.request.cancel()

    def update_by_round(self, count: int) -> list[Round]:
        """As `update`, with each round's part."""
        added, lengths = [], self.request.accept_lengths
        while self.finish_reason is None and self._reached < count and self._rounds < len(lengths):
            text, known = len(self.settled_text), len(self.token_ids)
            self._reached += lengths[self._rounds]
            self._rounds += 1
            self.update(min(self._reached, count))
            added.append(Round(self.settled_text[text:], len(self.token_ids) - known))
        self.update(count)
        return added

    def update(self, count: int | None = None) -> None:
        """Reads the request's new tokens, or those among its first ``count``, as other threads may add more.

        Raises DeadlinePassed, or any other error of the request.
        """
        request = self.request
        available, reason = request.readable
        if request.error is not None:  # another thread may have failed it just now
            raise request.error
        end = available if count is None else min(count, available)
        for token in request.tokens[len(self.token_ids) : end]:
            if self.finish_reason is not None:
                return
            self.token_ids.append(token)
            if len(self.token_ids) == available:
                self.finish_reason = reason
                if reason == "stop" and token in (request.params.stop_token_ids or ()):
                    self.stop_reason = token
            hidden = token in request.stop_ids and not self._params.include_stop_str_in_output
            if not hidden and self._decode(token):
                self.finish_reason = "stop"
                if request.ended is None:  # engines do not know stop strings
                    request.ended = time.monotonic()
            elif self.finish_reason is not None:
                self._flush()

    @property
    def settled_text(self) -> str:
        """The final text: without a tail that may begin a stop string."""
        if self.finish_reason is not None:
            return self.text
        return self.text[: len(self.text) - max(self._begun, default=0)]

    def end(self, reason: str) -> None:
        """Ends the output before its request: no token follows, so no text is held back."""
        self.finish_reason = reason
        self._flush()

    def completion(self) -> Completion:
        """The finished completion."""
        assert self.finish_reason is not None, "the request still runs"
        text = None if self._stream is None else self.text
        request, rounds, reached = self.request, 0, 0
        # A stop string may end an output before the request's last rounds.
        while reached < len(self.token_ids):
            reached += request.accept_lengths[rounds]
            rounds += 1
        lengths, sizes = request.accept_lengths[:rounds], request.tree_sizes[:rounds]
        return Completion(
            text,
            self.token_ids,
            self.finish_reason,
            lengths,
            sizes,
            request.prompt.tolist(),
            request.text,
            request.index,
            RequestMetrics.of(request, rounds),
            self.logprobs(),
            self._prompt_logprobs(),
            self.stop_reason,
            request.request_id,
            request.tree_depths[:rounds],
        )

    def logprobs(self, start: int = 0) -> list[dict[int, Logprob]] | None:
        """Log-probabilities of the tokens from number ``start`` on; None unless asked for."""
        count, rows = self.request.params.logprobs, self.request.logprobs[start : len(self.token_ids)]
        if count is None:
            return None
        beginning = max(0, self._beginning - start)
        return describe(self.token_ids[start:], rows, count, self._detokenizer, beginning)

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        request, count = self.request, self.request.params.prompt_logprobs
        if count is None or len(request.prompt_logprobs) < len(request.prompt) - 1:
            return None
        return [
            None,
            *describe(request.prompt.tolist()[1:], request.prompt_logprobs, count, self._detokenizer),
        ]

    def _decode(self, token: int) -> bool:
        """Adds a token's text; True if a stop string ends it."""
        if self._stream is None:
            return False
        if self._stream.begins:
            self._beginning = len(self.token_ids)
        return self._extend(self._stream.feed(token), self._stream.held)

    def _flush(self) -> None:
        """Adds the text that the decoder has held back; no token may follow."""
        if self._stream is not None:
            self.text += self._stream.end()

    def _extend(self, piece: str, held: str) -> bool:
        """Adds final text; True if a stop string is in it, or in the text that is held back after it."""
        self.text += piece
        # A match can grow by the piece's length only; trying all prefixes of a long stop string takes long.
        self._begun = [
            self._matched_prefix(stop, begun + len(piece))
            for stop, begun in zip(self._stop, self._begun, strict=True)
        ]
        searched, settled = self._searched, len(self.text)
        self._searched = settled + len(held)
        if not self._stop or len(self.token_ids) <= self._params.min_tokens:
            return False
        begin = max(searched - max(map(len, self._stop)) + 1, 0)
        tail = self.text[begin:] + held[max(begin - settled, 0) :]
        starts = [tail.find(stop, max(searched - len(stop) + 1 - begin, 0)) for stop in self._stop]
        found = [(start, len(stop)) for start, stop in zip(starts, self._stop, strict=True) if start >= 0]
        if found:
            start, length = min(found)
            self.stop_reason = tail[start : start + length]
            kept = length if self._params.include_stop_str_in_output else 0
            self.text = (self.text + held)[: begin + start + kept]
        return bool(found)

    def _matched_prefix(self, stop: str, most: int) -> int:
        """How many first characters of a stop string end the text, at most ``most``."""
        sizes = range(min(most, len(stop) - 1), 0, -1)
        return next((size for size in sizes if self.text.endswith(stop[:size])), 0)
