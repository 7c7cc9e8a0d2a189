"""A request on its way through an engine: a prompt, what was asked for, and the tokens so far."""

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int32

from jetspec_jax.engine.logprobs import TokenLogprobs, rows_of
from jetspec_jax.engine.pages import pages_for
from jetspec_jax.engine.records import Adjusting
from jetspec_jax.sampling.grammar import MOST_SECONDS, Matcher
from jetspec_jax.sampling.params import SamplingParams

_log = logging.getLogger("jetspec_jax")


class DeadlinePassed(TimeoutError):
    """A request was not served by the time that it had."""


class EngineFailed(RuntimeError):
    """The engine of a request has failed, whatever was asked for: ``__cause__`` is why."""


class State(enum.Enum):
    """How far a request is."""

    WAITING = "waits for a slot"
    PREFILLING = "has a slot, and tokens before its anchor to commit"
    DECODING = "decodes"
    FINISHED = "has all its tokens"
    FAILED = "has an error"
    CANCELLED = "nobody waits for it"


@dataclass(eq=False)
class Request:
    """A prompt on its way through an engine.

    Attributes:
        prompt: Its tokens.
        params: How it is sampled and when it stops; with a seed and a number of tokens.
        stop_ids: All tokens that end it.
        budget: Most nodes of its trees, root included.
        depth: Largest depth of its trees.
        routing: What the caller said of it, for algorithms that look at that: names and values.
        text: What its prompt was made of; None if it was token ids.
        index: Which of its prompt's completions it is.
        bad_words: Tokens of the words that its output may not have.
        endings: Tokens that are forbidden before its smallest number of tokens.
        priority: Lower numbers are served first.
        deadline: When it is given up, by `time.monotonic`; None is never.
        cache_salt: Pages are shared only among requests with the same salt.
        request_id: What callers call it; completions of one prompt share it.
        matcher: Its way through the grammar that its output follows; None without one.
        shared: Whether several processes serve it: then it is cancelled for all at the same step, once the
            first of them wants it no longer.
        told: Called when it has got tokens, or failed; by whoever runs its engine, so it must be quick. What
            it raises ends the request, and it is called no more.
        dropped: Nobody in this process waits for it. Any thread may set it, by `cancel`.
        cancelled: Nobody waits for it at all, and it takes no more tokens.
        readable: How many of its tokens other threads may read, and its finish reason if these are all.
        error: Why it failed.
        tokens: What it has got; a token that ended it is the last.
        accept_lengths: Tokens that each of its rounds committed, before any cut.
        tree_sizes: Nodes of each round's tree.
        logprobs: What was told of each token; nothing unless its parameters ask for it.
        prompt_logprobs: Likewise of each token of the prompt but the first.
        finish_reason: "stop" (a token of ``stop_ids``), "length", or "error"; None while it goes on.
        arrival: When it came, by `time.monotonic`, as are the next three.
        started: When it first got a slot.
        first_token: When it got its first token.
        ended: When it ended.
        prefix_tokens: Tokens of its prompt that were in the stores when it came.
        preemptions: How often it lost its slot.
        number: Its place in the order of arrival.
        overtaken: How often one that came later was served before it.
        slot: Where it decodes, or did; -1 while it waits.
        pages: What it holds.
        committed: Its tokens in the stores.
        keys: Names of its first full pages: see `page_keys`.
        named: How many of its pages the pool knows by name.
        cuts: Its first so many pages are to end a forward, for a snapshot; in rising order.
    """

    # Set by whoever queues it, before that.
    prompt: Int32[np.ndarray, "T"]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    budget: int = 1
    depth: int = 0
    routing: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    index: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    endings: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    request_id: str = ""
    matcher: Matcher | None = None
    shared: bool = False
    told: Callable[[], None] | None = None
    # All that several threads read and write: its callers', and the engine's.
    dropped: bool = False
    cancelled: bool = False
    # Replaced whole, so that other threads read both of one moment. Lists that it counts only grow.
    readable: tuple[int, str | None] = (0, None)
    error: Exception | None = None
    # What follows is the engine's; but who queues a request before that sets its arrival.
    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    tree_sizes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    arrival: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    prefix_tokens: int = 0
    preemptions: int = 0
    number: int = -1
    overtaken: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    committed: int = 0
    keys: list[bytes] = field(default_factory=list)
    named: int = 0
    cuts: list[int] = field(default_factory=list)

    @property
    def state(self) -> State:
        """How far it is."""
        if self.error is not None:
            return State.FAILED
        if self.finish_reason is not None:
            return State.FINISHED
        if not self.open:
            return State.CANCELLED
        if self.slot < 0:
            return State.WAITING
        return State.PREFILLING if self.to_prefill else State.DECODING

    @property
    def open(self) -> bool:
        """Whether it waits or runs. If not, its slot and pages are free."""
        return self.finish_reason is None and not self.cancelled

    @property
    def unwanted(self) -> bool:
        """Whether it has ended, or nobody in this process waits for more of it."""
        return self.finish_reason is not None or self.dropped

    def cancel(self) -> None:
        """Ends it, from any thread, for whoever waits here: the next batch frees its slot and pages."""
        self.dropped = True
        self.cancelled = self.cancelled or not self.shared

    @property
    def max_tokens(self) -> int:
        """Most tokens that it gets."""
        assert self.params.max_tokens is not None, "whoever makes a request says where the context ends"
        return self.params.max_tokens

    @property
    def length(self) -> int:
        """Tokens of its prompt and of what it has got; the last of them is its anchor."""
        return len(self.prompt) + len(self.tokens)

    @property
    def to_prefill(self) -> int:
        """Tokens before its anchor that are not in the stores."""
        return self.length - 1 - self.committed

    @property
    def left(self) -> int:
        """Tokens that rounds may still give it."""
        return self.max_tokens - len(self.tokens)

    @property
    def adjusting(self) -> Adjusting | None:
        """What it wants of the logits from here on; None is nothing."""
        if not self.params.adjusts:
            return None
        return Adjusting(self.prompt, tuple(self.tokens), tuple(sorted(self.endings)), self.bad_words)

    @property
    def scored(self) -> np.ndarray | None:
        """Its prompt, while log-probabilities of that are wanted."""
        wanted = self.params.prompt_logprobs is not None and len(self.prompt) > 1
        return self.prompt if wanted and not self.prompt_logprobs else None

    @property
    def num_pages(self) -> int:
        """Most pages that it can use. A last round may overshoot them: a commit drops such rows."""
        return pages_for(len(self.prompt) + self.max_tokens)

    def pages_ahead(self, tokens: int) -> int:
        """Pages for all before its anchor and so many tokens more, or all that it can use."""
        return min(pages_for(self.length - 1 + tokens), self.num_pages)

    def span(self, start: int, stop: int) -> Int32[np.ndarray, "S"]:
        """Tokens of its prompt and of what it has got: from one place to before another."""
        size = len(self.prompt)
        if stop <= size:
            return self.prompt[start:stop]
        more = np.asarray(self.tokens[max(start - size, 0) : stop - size], np.int32)
        return np.concatenate([self.prompt[start:], more]) if start < size else more

    def take(self, tokens: Sequence[int]) -> None:
        """Takes tokens up to its end. A stop on the last allowed token is a stop."""
        if self.finish_reason is not None:
            return
        left = self.left
        own = list(tokens[:left])
        if not self.stop_ids.isdisjoint(own):
            own = own[: 1 + next(place for place, token in enumerate(own) if token in self.stop_ids)]
            self.finish_reason = "stop"
        elif len(own) == left:
            self.finish_reason = "length"
        self.tokens += own
        # As many anchors are in the stores now.
        self.committed += len(own)

    def take_round(self, tokens: Sequence[int], tree_size: int, logprobs: Any = None) -> None:
        """Takes what one round committed; nothing once the request has ended.

        Args:
            tokens: Its tokens.
            tree_size: Nodes of its tree.
            logprobs: What is told of the tokens, as `rows_of` takes it; None where nobody asks.
        """
        if self.finish_reason is None:
            self.accept_lengths.append(len(tokens))
            self.tree_sizes.append(tree_size)
            self.take(tokens)
            if self.params.logprobs is not None:
                self.logprobs += rows_of(logprobs)[: len(self.tokens) - len(self.logprobs)]

    def take_scores(self, told: Any) -> None:
        """Takes what is told of its prompt's tokens; those after the last have no meaning."""
        self.prompt_logprobs = rows_of(told)[: len(self.prompt) - 1]

    def preempt(self) -> None:
        """It has lost its slot and its pages, and waits again: all that it has is its prompt now."""
        self.slot, self.committed, self.named, self.cuts = -1, 0, 0, []
        self.preemptions += 1
        self.overtaken += 1

    def publish(self) -> None:
        """Lets readers, who may be in other threads, have all that it has got by now."""
        self.readable = len(self.tokens), self.finish_reason

    def fail(self, error: Exception) -> None:
        """Ends it with an error, unless it has ended."""
        if self.finish_reason is None:
            self.error, self.finish_reason = error, "error"
            self.publish()
            self.tell()

    def too_late(self, now: float) -> DeadlinePassed:
        """What it fails with once its time is over, by `time.monotonic`."""
        assert self.deadline is not None
        return DeadlinePassed(
            f"the request had {self.deadline - self.arrival:.3f} s; after {now - self.arrival:.3f} s it "
            f"{'still waits for a slot' if self.slot < 0 else f'has {len(self.tokens)} tokens'}"
        )

    def tell(self) -> None:
        """Tells whoever wants to know that there is news of it."""
        told = self.told
        try:
            if told is not None:
                told()
        except Exception as error:
            _log.exception("a function that is told of a request has failed")
            self.told = None
            self.fail(error)

    def follow(self) -> None:
        """Takes its tokens through its grammar; it fails where that is slow or has no way on."""
        if self.matcher is None:
            return
        self.matcher.advance(self.tokens[self.matcher.count :])
        problem = self.matcher.problem
        if problem is None and self.matcher.seconds > MOST_SECONDS:
            problem = (
                f"the grammar took {self.matcher.seconds:.1f} s for one tree, of at most {MOST_SECONDS:g}"
            )
        if problem is not None:
            self.finish_reason = None  # what it has got is of no use
            self.fail(ValueError(f"structured_outputs: {problem}"))
