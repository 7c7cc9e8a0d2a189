"""A request in an engine: a prompt, its parameters, and its tokens so far."""

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jetspec_jax.cache.pages import pages_for
from jetspec_jax.engine.batch import Adjusting
from jetspec_jax.sampling.grammar import MOST_SECONDS, Matcher
from jetspec_jax.sampling.params import SamplingParams

_log = logging.getLogger("jetspec_jax")


class DeadlinePassed(TimeoutError):
    """A request's deadline passed before its end."""


class EngineFailed(RuntimeError):
    """The engine of a request failed, for any request; ``__cause__`` is the reason."""


class State(enum.Enum):
    """A request's state."""

    WAITING = "waits for a slot"
    PREFILLING = "has a slot, and tokens before its anchor to commit"
    DECODING = "decodes"
    FINISHED = "has all its tokens"
    FAILED = "has an error"
    CANCELLED = "was cancelled"


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, from the device: of the chosen token, and of the likeliest."""

    chosen: float
    rank: int  # of the chosen token
    tokens: list[int]  # the likeliest, best first
    likeliest: list[float]


def rows_of(logprobs: Any) -> list[TokenLogprobs]:
    """Rows of a `jetspec_jax.decode.logprobs.Logprobs` with one axis of tokens, on the host."""
    columns = (np.asarray(column).tolist() for column in logprobs)
    return [TokenLogprobs(*row) for row in zip(*columns, strict=True)]


@dataclass(eq=False)
class Request:
    """A prompt in an engine, and its output. Times are by `time.monotonic`."""

    # Set by the caller, before the request is queued.
    prompt: Int32[np.ndarray, "T"]
    params: SamplingParams  # with a seed and ``max_tokens``
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    budget: int = 1  # most nodes of its trees, root included
    depth: int = 0  # largest depth of its trees
    routing: tuple[tuple[str, str], ...] = ()  # names and values of routing hints
    traced: int = 0  # nodes of its trees if its rounds are traced, each in a turn of its own; else 0
    text: str | None = None  # the prompt's; None if it was given as token ids
    continues: bool = True  # whether its output continues the prompt's text: see `EncodedPrompt`
    index: int = 0  # its number among the prompt's completions
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens of each bad word
    endings: frozenset[int] = frozenset()  # tokens that are forbidden before ``min_tokens``
    priority: int = 0  # lower numbers are served first
    deadline: float | None = None  # when it fails if it still runs; None is never
    cache_salt: str | None = None  # pages are shared only among requests with the same salt
    request_id: str = ""  # the caller's; completions of one prompt share it
    matcher: Matcher | None = None  # of its grammar
    kept_special_tokens: frozenset[int] = frozenset()  # see `EncodedPrompt`
    # Called in the engine's thread after new tokens or an error, so it must be quick. If it raises, the
    # request fails and the function is not called again.
    on_update: Callable[[], None] | None = None
    # Read and written by several threads: the callers', and the engine's.
    cancelled: bool = False  # set by `cancel`: it gets no more tokens
    # Number of its tokens that other threads may read, and its finish reason if these are all. Replaced as a
    # whole, so that the pair is consistent. The counted lists only grow.
    readable: tuple[int, str | None] = (0, None)
    error: Exception | None = None
    lost: bool = False  # whether its error is the engine's, and so the error of all its requests
    # Set by the engine's thread alone, but for the arrival.
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)  # its output; a token that ended it is the last
    accept_lengths: list[int] = field(default_factory=list)  # tokens of each round, before any cut
    tree_sizes: list[int] = field(default_factory=list)  # nodes of each round's tree
    tree_depths: list[int] = field(default_factory=list)  # of the deepest node of each round's tree
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first
    finish_reason: str | None = None  # "stop", "length" or "error"; None while it runs
    arrival: float = 0.0
    started: float | None = None  # when it first got a slot
    first_token: float | None = None
    ended: float | None = None
    prefix_tokens: int = 0  # tokens of its prompt that were in the prefix cache
    preemptions: int = 0
    number: int = -1  # its place in the order of arrival
    overtaken: int = 0  # how often a later request was admitted before it, or took its pages
    slot: int = -1  # also after its end; -1 while it waits
    pages: list[int] = field(default_factory=list)
    committed: int = 0  # its tokens in the stores, except those of rounds in flight
    in_flight_tokens: int = 0  # most tokens that rounds in flight commit to it; 0 if it takes part in none
    keys: list[bytes] = field(default_factory=list)  # of its first full pages: see `page_keys`
    cached_pages: int = 0  # number of its pages in the prefix cache
    cuts: list[int] = field(default_factory=list)  # page counts at which a prefill forward must end, rising

    @property
    def open(self) -> bool:
        """Whether it waits or runs. If not, its slot and pages are freed with its last batch, or the next."""
        return self.finish_reason is None and not self.cancelled

    def cancel(self) -> None:
        """Cancels it, from any thread: its batch in flight, or the next one, frees its slot and pages."""
        self.cancelled = True

    @property
    def max_tokens(self) -> int:
        """Most tokens of its output."""
        assert self.params.max_tokens is not None, "requests are made with max_tokens set"
        return self.params.max_tokens

    @property
    def length(self) -> int:
        """Tokens of its prompt and its output; the last one is its anchor."""
        return len(self.prompt) + len(self.tokens)

    @property
    def to_prefill(self) -> int:
        """Tokens before its anchor that are not in the stores."""
        return self.length - 1 - self.committed

    @property
    def remaining(self) -> int:
        """Tokens that it may still get."""
        return self.max_tokens - len(self.tokens)

    @property
    def adjusting(self) -> Adjusting | None:
        """Inputs of its logit adjustments from here on; None without adjustments."""
        if not self.params.adjusts:
            return None
        return Adjusting(self.prompt, tuple(self.tokens), tuple(sorted(self.endings)), self.bad_words)

    @property
    def scored(self) -> np.ndarray | None:
        """Its prompt, if log-probabilities of the prompt are wanted and not known yet."""
        wanted = self.params.prompt_logprobs is not None and len(self.prompt) > 1
        return self.prompt if wanted and not self.prompt_logprobs else None

    @property
    def most_tokens(self) -> int:
        """Most tokens of its prompt and output together."""
        return len(self.prompt) + self.max_tokens

    @property
    def num_pages(self) -> int:
        """Most pages that it can use. Its last round may overshoot them: a commit drops such rows."""
        return pages_for(self.most_tokens)

    @property
    def ends_in_flight(self) -> bool:
        """Whether a round in flight ends it for certain, as it commits a token or more."""
        return self.remaining <= 1 and self.in_flight_tokens > 0

    def pages_ahead(self, tokens: int) -> int:
        """Pages for ``tokens`` more tokens after its rounds in flight, at most `num_pages`."""
        return min(pages_for(self.length - 1 + self.in_flight_tokens + tokens), self.num_pages)

    def span(self, start: int, stop: int) -> Int32[np.ndarray, "S"]:
        """Tokens ``start`` to ``stop`` (exclusive) of prompt and output together."""
        size = len(self.prompt)
        if stop <= size:
            return self.prompt[start:stop]
        more = np.asarray(self.tokens[max(start - size, 0) : stop - size], np.int32)
        return np.concatenate([self.prompt[start:], more]) if start < size else more

    def append_round(
        self, tokens: Sequence[int], tree_size: int, logprobs: Any = None, tree_depth: int = 0
    ) -> None:
        """Appends a round's committed tokens up to its end, with log-probabilities as for `rows_of`.

        A stop token on the last allowed position is a stop. Ignored once the request has ended.
        """
        if self.finish_reason is not None:
            return
        self.accept_lengths.append(len(tokens))
        self.tree_sizes.append(tree_size)
        self.tree_depths.append(tree_depth)
        remaining = self.remaining
        new = list(tokens[:remaining])
        if not self.stop_ids.isdisjoint(new):
            new = new[: 1 + next(place for place, token in enumerate(new) if token in self.stop_ids)]
            self.finish_reason = "stop"
        elif len(new) == remaining:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.state = State.FINISHED
        self.tokens += new
        # Each new token makes the anchor before it a stored token.
        self.committed += len(new)
        if self.params.logprobs is not None:
            self.logprobs += rows_of(logprobs)[: len(new)]

    def set_prompt_logprobs(self, logprobs: Any) -> None:
        """Sets log-probabilities of its prompt; entries after the prompt's last token have no meaning."""
        self.prompt_logprobs = rows_of(logprobs)[: len(self.prompt) - 1]

    def preempt(self) -> None:
        """Makes it wait again, without slot and pages: its tokens so far become part of its prompt."""
        self.slot, self.committed, self.cached_pages, self.cuts = -1, 0, 0, []
        self.state = State.WAITING
        self.preemptions += 1
        self.overtaken += 1

    def publish(self) -> None:
        """Lets other threads read all its tokens so far."""
        self.readable = len(self.tokens), self.finish_reason

    def fail(self, error: Exception) -> None:
        """Ends it with an error, unless it has ended."""
        if self.finish_reason is None:
            self.error, self.finish_reason, self.state = error, "error", State.FAILED
            self.publish()
            self.notify()

    def deadline_error(self, now: float) -> DeadlinePassed:
        """The error of a request whose deadline has passed, by `time.monotonic`."""
        assert self.deadline is not None
        return DeadlinePassed(
            f"the timeout of {self.deadline - self.arrival:.3f} s passed: after {now - self.arrival:.3f} s "
            f"the request {'still waits for a slot' if self.slot < 0 else f'has {len(self.tokens)} tokens'}"
        )

    def notify(self) -> None:
        """Calls ``on_update``, and fails the request if that raises."""
        on_update = self.on_update
        try:
            if on_update is not None:
                on_update()
        except Exception as error:
            _log.exception("a request's on_update function failed")
            self.on_update = None
            self.fail(error)

    def advance_grammar(self) -> None:
        """Advances its matcher over its new tokens; fails if the grammar is too slow or at a dead end."""
        if self.matcher is None:
            return
        self.matcher.advance(self.tokens[self.matcher.count :])
        problem = self.matcher.problem
        if problem is None and self.matcher.seconds > MOST_SECONDS:
            problem = (
                f"the grammar took {self.matcher.seconds:.1f} s for one tree, of at most {MOST_SECONDS:g}"
            )
        if problem is not None:
            self.finish_reason = None  # its output is invalid, so it must fail
            self.fail(ValueError(f"structured_outputs: {problem}"))
