"""A request on its way through an engine: a prompt, what was asked for, and the tokens so far."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jetspec_jax.engine.pages import pages_for
from jetspec_jax.sampling.grammar import Matcher
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree.routing import Routing


@dataclass(eq=False)
class Request:
    """A prompt on its way through an engine.

    Attributes:
        prompt: Its tokens.
        params: How it is sampled and when it stops; with a seed and a number of tokens.
        stop_ids: All tokens that end it.
        budget: Most nodes of its trees, root included.
        depth: Largest depth of its trees.
        routing: What is known of it, for algorithms that look at that; None is nothing.
        text: What its prompt was made of; None if it was token ids.
        index: Which of its prompt's completions it is.
        matcher: Its way through the grammar that its output follows; None without one.
        tokens: What it has got; a token that ended it is the last.
        accept_lengths: Tokens that each of its rounds committed, before any cut.
        tree_sizes: Nodes of each round's tree.
        finish_reason: "stop" (a token of ``stop_ids``) or "length"; None while it goes on.
        abandoned: It was cancelled, or its engine was lost.
        reader: Who reads its tokens; once that is gone, nobody waits for it. None waits for ever.
        shared: Whether several processes serve it together: then it is over for all at the same step, once
            the first of them wants it no longer.
        closed: Whether that has come.
        slot: Where it decodes; -1 while it waits.
        pages: What it holds while it decodes.
    """

    prompt: np.ndarray
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    budget: int = 1
    depth: int = 0
    routing: Routing | None = None
    text: str | None = None
    index: int = 0
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    tree_sizes: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    abandoned: bool = False
    reader: "weakref.ref[Any] | None" = None
    shared: bool = False
    closed: bool = False
    slot: int = -1
    pages: Sequence[int] = ()

    @property
    def open(self) -> bool:
        """Whether somebody waits for more of it. If not, its slot and pages are free."""
        if self.shared:
            return self.finish_reason is None and not self.closed
        return not self.unwanted

    @property
    def unwanted(self) -> bool:
        """Whether it has ended, or this process waits for no more of it."""
        unread = self.reader is not None and self.reader() is None
        return self.finish_reason is not None or self.abandoned or unread

    @property
    def dropped(self) -> bool:
        """Whether it takes no token any more, though its slot may still decode."""
        return self.closed if self.shared else self.abandoned

    @property
    def max_tokens(self) -> int:
        """Most tokens that it gets."""
        assert self.params.max_tokens is not None, "whoever makes a request says where the context ends"
        return self.params.max_tokens

    @property
    def num_pages(self) -> int:
        """Pages for its prompt and output. A last round may overshoot them: a commit drops such rows."""
        return pages_for(len(self.prompt) + self.max_tokens)

    @property
    def committed(self) -> int:
        """Its tokens in the stores, once it decodes: all but the last, the anchor."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.max_tokens - len(self.tokens)

    def take(self, tokens: Sequence[int]) -> None:
        """Takes tokens up to its end. A stop on the last allowed token is a stop."""
        for token in tokens:
            if self.finish_reason is not None:
                return
            self.tokens.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.max_tokens:
                self.finish_reason = "length"

    def take_round(self, tokens: Sequence[int], tree_size: int) -> None:
        """Takes what one round committed; nothing once the request has ended."""
        if self.finish_reason is None:
            self.accept_lengths.append(len(tokens))
            self.tree_sizes.append(tree_size)
            self.take(tokens)

    def follow(self) -> None:
        """Takes its tokens through its grammar, if it has one.

        Raises:
            ValueError: The grammar has no way on.
        """
        if self.matcher is not None:
            self.matcher.advance(self.tokens[self.matcher.count :])
            if self.matcher.problem is not None:
                raise ValueError(f"structured_outputs: {self.matcher.problem}")
