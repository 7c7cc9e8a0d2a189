"""Grammars, matched by llguidance on the host: the tokens that may follow at every node of a tree.

A grammar describes the output as bytes, so the split of a text into tokens does not matter. Tokens that end a
request are not text: they are allowed where the grammar may end.

Shapes: N nodes, V vocabulary.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from jetspec_jax.sampling.compiling import compiled, load_tokens, serialized, words
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.sampling.token_sets import packed

#: Compiled grammars that are cached for each target.
MOST_KEPT = 64
#: Limit of processor seconds for the masks of one tree, which usually take a few milliseconds.
MOST_SECONDS = 10.0
_ALL = np.uint32(0xFFFFFFFF)


class Vocabulary:
    """A target's vocabulary for grammars; created once for all requests, thread-safe.

    ``serialized`` is for the trial process of `jetspec_jax.sampling.compiling`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]):
        """Prepares the vocabulary for llguidance, which takes a moment.

        Tokens that a fast tokenizer lacks are never allowed; EOS tokens are not text.
        """
        if tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and the target has none")
        # Bits of tokens that the target lacks are cut off later.
        size = max(vocab_size, len(tokenizer))
        try:
            self.serialized = serialized(tokenizer, size, sorted(eos_token_ids))
            self._tokens = load_tokens(self.serialized)
        except ImportError as error:
            raise ImportError(
                'structured_outputs needs llguidance: pip install "jetspec-jax[structured]"'
            ) from error
        except ValueError as error:
            raise ValueError(f"llguidance cannot take the target's tokenizer: {words(error)}") from error
        self.vocab_size = vocab_size
        # Where a grammar may end, llguidance allows EOS tokens; the request's stop ids replace them.
        self.text_bits = ~packed(self._tokens.eos_tokens, size)
        self._kept: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, outputs: StructuredOutputsParams, stop_ids: Collection[int]) -> "Matcher":
        """A matcher for one request; raises ValueError if the grammar allows no text, or nothing ends it."""
        if not stop_ids:
            raise ValueError(
                "structured_outputs needs a token that ends the text, and the target has none; give "
                "stop_token_ids"
            )
        with self._lock:
            start = self._kept.pop(outputs, None)
            start = self._kept[outputs] = self._compiled(outputs) if start is None else start
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return Matcher(start.deep_copy(), self, stop_ids)

    def _compiled(self, outputs: StructuredOutputsParams) -> Any:
        kind, text = outputs.source
        start, bits = compiled(self._tokens, kind, text, flexible=not outputs.disable_any_whitespace)
        first = np.frombuffer(bits, np.uint32)
        self._check_rollback(kind, start.deep_copy(), first[: len(self.text_bits)] & self.text_bits)
        return start

    def _check_rollback(self, kind: str, walk: Any, first: UInt32[np.ndarray, "words"]) -> None:
        """Refuses grammars that count tokens: their matcher cannot roll back, and tree branches need it."""
        begins = np.flatnonzero(first)
        if not begins.size:
            return  # only the empty text is allowed
        word = int(begins[0])
        walk.consume_token(32 * word + (int(first[word]) & -int(first[word])).bit_length() - 1)
        if not walk.rollback(1):
            raise ValueError(
                f"structured_outputs: {kind} cannot be used with trees: {words(walk.get_error())}"
            )


class Matcher:
    """The state of a request in its grammar.

    Attributes:
        count: Number of committed tokens.
        problem: llguidance's reason why the grammar has reached a dead end, after which only tokens that end
            the request are allowed; None before.
        seconds: The largest processor time of a tree's masks. If it exceeds `MOST_SECONDS`, the scheduler
            ends the request. Masks do not depend on time, so all processes compute the same.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary, stop_ids: Collection[int]):
        """Starts at the beginning of the grammar, and owns the ``matcher``."""
        self.count = 0
        self.problem: str | None = None
        self.seconds = 0.0
        self._matcher, self._stop_ids = matcher, frozenset(stop_ids)
        self._text_bits = vocabulary.text_bits
        self._stop_bits = packed(stop_ids, 32 * len(self._text_bits))
        self._words = -(-vocabulary.vocab_size // 32)

    def copy(self) -> "Matcher":
        """An independent copy in the same state."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def advance(self, tokens: Sequence[int]) -> None:
        """Commits output tokens in order; tokens after one that ends the request are ignored."""
        for token in tokens:
            self.count += 1
            if token in self._stop_ids:
                self._end_with(token)
                return
            if self.problem is None and not self._matcher.consume_token(token):
                self.problem = words(self._matcher.get_error())

    def _end_with(self, token: int) -> None:
        if self.problem is None and not (
            self._matcher.is_accepting() or self._matcher.validate_tokens([token])
        ):
            self._matcher.compute_bitmask()  # sets the error of a dead end, if there is one
            why = words(self._matcher.get_error())
            self.problem = f"the text ends where the grammar goes on{f': {why}' if why else ''}"

    def masks_of_tree(
        self, tokens: Int[np.ndarray, "N"], parents: Int[np.ndarray, "N"], num_nodes: int
    ) -> UInt32[np.ndarray, "N words"]:
        """The tokens that may follow at each node of a tree.

        The root is the last committed token. The time is proportional to the number of nodes that the grammar
        allows.

        Parents come before their children. Nodes that cannot be accepted allow all tokens: those that the
        grammar forbids, that follow a token that ends the request, or that are padding.
        """
        began = time.thread_time()
        masks = np.full((len(tokens), self._words), _ALL, np.uint32)
        children: list[list[int]] = [[] for _ in range(num_nodes)]
        for node, parent in enumerate(parents[1:num_nodes].tolist(), start=1):
            children[parent].append(node)
        walk = _Walk(self._matcher, len(self._text_bits))
        # Depth first, so that the next node needs a rollback and one step.
        stack = [(0, 0)]
        while stack:
            depth, node = stack.pop()
            if depth and not self._step_to(walk, depth, int(tokens[node]), masks[parents[node]]):
                continue
            masks[node] = self._allowed(walk)
            stack.extend((depth + 1, child) for child in reversed(children[node]))
        self.seconds = max(self.seconds, time.thread_time() - began)
        return masks

    def _step_to(self, walk: "_Walk", depth: int, token: int, allowed: UInt32[np.ndarray, "words"]) -> bool:
        """Steps to a node and returns True, unless the node cannot be accepted or ends the request."""
        if token in self._stop_ids or not allowed[token // 32] >> np.uint32(token % 32) & 1:
            return False
        walk.step(depth, token)
        return True

    def _allowed(self, walk: "_Walk") -> UInt32[np.ndarray, "words"]:
        """The tokens that may follow at a walk's node; stop ids where the grammar may end or cannot go on."""
        bits, ends = walk.look()
        bits &= self._text_bits
        if ends:
            bits |= self._stop_bits
        return bits[: self._words]


class _Walk:
    """A walk through a tree from the committed state, which is not changed."""

    def __init__(self, start: Any, words: int):
        self._start, self._at = start, start.deep_copy()
        self._path: list[int] = []
        self._row = np.zeros(words, np.uint32)

    def step(self, depth: int, token: int) -> None:
        """Rolls back to depth - 1, and consumes an allowed token."""
        up = len(self._path) - (depth - 1)
        del self._path[depth - 1 :]
        if self._at.is_error():
            # An error in llguidance is permanent, so after a dead end the path is replayed.
            self._at = self._start.deep_copy()
            self._at.consume_tokens(self._path)
        else:
            self._at.rollback(up)
        self._path.append(token)
        self._at.consume_token(token)

    def look(self) -> tuple[UInt32[np.ndarray, "words"], bool]:
        """The allowed tokens, valid until the next call, and whether the text may end or is a dead end."""
        self._at.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        if self._at.is_error():
            self._row[:] = 0
            return self._row, True
        return self._row, self._at.is_accepting()
