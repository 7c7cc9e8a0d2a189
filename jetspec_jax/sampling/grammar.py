"""Grammars, matched by llguidance: which tokens may follow at every node of a tree. Runs on the host.

A grammar speaks of the output alone. Its tokens are bytes to it, so that any split of a text into tokens is
the same text. Tokens that end a request are no text: they are allowed where the grammar may end.

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

#: Grammars that are kept compiled for each target.
MOST_KEPT = 64
#: Processor seconds that the masks of one tree may take; usual are some thousandths.
MOST_SECONDS = 10.0
_ALL = np.uint32(0xFFFFFFFF)


class Vocabulary:
    """A target's tokens as grammars see them: made once, for all requests; safe in several threads.

    Attributes:
        serialized: The tokens as `jetspec_jax.sampling.compiling` reads them in another process.
        vocab_size: V, of the target.
        text_bits: The packed set of the tokens that are text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]):
        """Compiles the tokens, which takes a moment.

        Args:
            tokenizer: A transformers tokenizer in its fast form, or None.
            vocab_size: V, of the target: logits that have no token in the tokenizer are never allowed.
            eos_token_ids: Tokens that end a sequence, which are no text.

        Raises:
            ImportError: llguidance is not installed.
            ValueError: There is no tokenizer, or llguidance cannot take it.
        """
        if tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and the target has none")
        # Of tokens that the target lacks the bits are cut off.
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
        # llguidance allows its own ends where a grammar may end: here a request says which these are.
        self.text_bits = ~packed(self._tokens.eos_tokens, size)
        self._kept: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, wanted: StructuredOutputsParams, stop_ids: Collection[int]) -> "Matcher":
        """What follows one request through its grammar.

        Args:
            wanted: The grammar.
            stop_ids: Tokens that end the request.

        Raises:
            ValueError: The grammar does not compile or admits nothing, in llguidance's words; or no token
                could ever end the request.
        """
        if not stop_ids:
            raise ValueError(
                "structured_outputs needs a token that ends the text, and the target has none; give "
                "stop_token_ids"
            )
        with self._lock:
            start = self._kept.pop(wanted, None)
            start = self._kept[wanted] = self._compiled(wanted) if start is None else start
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return Matcher(start.deep_copy(), self, stop_ids)

    def _compiled(self, wanted: StructuredOutputsParams) -> Any:
        kind, text = wanted.source
        start, bits = compiled(self._tokens, kind, text, flexible=not wanted.disable_any_whitespace)
        first = np.frombuffer(bits, np.uint32)
        self._check_ways_back(kind, start.deep_copy(), first[: len(self.text_bits)] & self.text_bits)
        return start

    def _check_ways_back(self, kind: str, walk: Any, first: UInt32[np.ndarray, "words"]) -> None:
        """Refuses grammars that count tokens: llguidance cannot go back in them, as trees ask for."""
        begins = np.flatnonzero(first)
        if not begins.size:
            return  # it admits the empty text alone
        word = int(begins[0])
        walk.consume_token(32 * word + (int(first[word]) & -int(first[word])).bit_length() - 1)
        if not walk.rollback(1):
            raise ValueError(
                f"structured_outputs: {kind} is none that a tree can follow: {words(walk.get_error())}"
            )


class Matcher:
    """A request's way through its grammar: what it has committed, and what may follow.

    Attributes:
        count: Tokens that it has committed.
        problem: Why the grammar has no way on, in llguidance's words; None while it has. Then only tokens
            that end the request are allowed.
        seconds: Processor time that the masks of a tree have taken at most. Above `MOST_SECONDS` the
            scheduler ends the request. The masks do not depend on times: several processes make the same.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary, stop_ids: Collection[int]):
        """At the start of the grammar.

        Args:
            matcher: llguidance's, which nobody else uses.
            vocabulary: The tokens.
            stop_ids: Tokens that end the request.
        """
        self.count = 0
        self.problem: str | None = None
        self.seconds = 0.0
        self._matcher, self._stop_ids = matcher, frozenset(stop_ids)
        self._text_bits = vocabulary.text_bits
        self._stop_bits = packed(stop_ids, 32 * len(self._text_bits))
        self._words = -(-vocabulary.vocab_size // 32)

    def copy(self) -> "Matcher":
        """Another one that is as far."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def advance(self, tokens: Sequence[int]) -> None:
        """Commits tokens of the output, in order; those after a token that ends the request do not count."""
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
            self._matcher.compute_bitmask()  # meets the dead end, if there is one
            why = words(self._matcher.get_error())
            self.problem = f"the text ends where the grammar goes on{f': {why}' if why else ''}"

    def masks_of_tree(
        self, tokens: Int[np.ndarray, "N"], parents: Int[np.ndarray, "N"], num_nodes: int
    ) -> UInt32[np.ndarray, "N words"]:
        """The tokens that may follow at each node of a tree.

        The root is the last token before the tree, which is committed. The time is proportional to the nodes
        on the grammar.

        Args:
            tokens: Of the nodes.
            parents: Their parents, each before its children.
            num_nodes: Nodes that are no padding.

        Returns:
            Packed sets, see `jetspec_jax.sampling.token_sets`. Nodes that can never be accepted, as the
            grammar forbids them, a token before them ends the request, or they are padding, have all.
        """
        began = time.thread_time()
        masks = np.full((len(tokens), self._words), _ALL, np.uint32)
        children: list[list[int]] = [[] for _ in range(num_nodes)]
        for node, parent in enumerate(parents[1:num_nodes].tolist(), start=1):
            children[parent].append(node)
        walk = _Walk(self._matcher, len(self._text_bits))
        # Depth first: from one node to the next in line leads a way up, and one step down.
        line = [(0, 0)]
        while line:
            depth, node = line.pop()
            if depth and not self._steps_to(walk, depth, int(tokens[node]), masks[parents[node]]):
                continue
            masks[node] = self._allowed(walk)
            line.extend((depth + 1, child) for child in reversed(children[node]))
        self.seconds = max(self.seconds, time.thread_time() - began)
        return masks

    def _steps_to(self, walk: "_Walk", depth: int, token: int, allowed: UInt32[np.ndarray, "words"]) -> bool:
        """Goes to a node if it may be accepted, and something may come after it."""
        if token in self._stop_ids or not allowed[token // 32] >> np.uint32(token % 32) & 1:
            return False
        walk.step(depth, token)
        return True

    def _allowed(self, walk: "_Walk") -> UInt32[np.ndarray, "words"]:
        """What may follow where a walk is: only an end where nothing can, or where the grammar ends."""
        bits, ends = walk.look()
        bits &= self._text_bits
        if ends:
            bits |= self._stop_bits
        return bits[: self._words]


class _Walk:
    """A way through a tree from the committed state, which stays as it is."""

    def __init__(self, start: Any, words: int):
        self._start, self._at = start, start.deep_copy()
        self._path: list[int] = []
        self._row = np.zeros(words, np.uint32)

    def step(self, depth: int, token: int) -> None:
        """Goes up to depth - 1, and from there to a token that is allowed."""
        up = len(self._path) - (depth - 1)
        del self._path[depth - 1 :]
        if self._at.is_error():
            # llguidance never leaves an error: behind a dead end the way is gone anew.
            self._at = self._start.deep_copy()
            self._at.consume_tokens(self._path)
        else:
            self._at.rollback(up)
        self._path.append(token)
        self._at.consume_token(token)

    def look(self) -> tuple[UInt32[np.ndarray, "words"], bool]:
        """What llguidance allows here, until the next look, and whether an end is: also at a dead end."""
        self._at.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        if self._at.is_error():
            self._row[:] = 0
            return self._row, True
        return self._row, self._at.is_accepting()
