"""Rounds in which grammars say what may follow: the host makes masks while the target verifies.

Shapes: B slots, N nodes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32

from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord
from jetspec_jax.decode.three_programs import propose, settle, verify
from jetspec_jax.sampling.grammar import Matcher


class ConstrainedRounds:
    """Runs rounds as `TreeDecoder.decode` does, but comes back to the host in each.

    Slots without a grammar keep their tokens. It waits for all rounds but the last.
    """

    def __init__(self, decoder: TreeDecoder, matchers: Mapping[int, Matcher]):
        """Rounds of a decoder.

        Args:
            decoder: The decoder.
            matchers: By slot; what is committed before the last round, they commit too.
        """
        self.decoder, self.matchers = decoder, matchers

    def __call__(
        self, weights: DecodeWeights, state: DecodeState, rounds: np.int32
    ) -> tuple[DecodeState, RoundRecord]:
        """Up to ``rounds`` rounds, at least one. ``state`` is donated.

        Returns:
            The state, and the records of the rounds that ran, at least one.
        """
        decoder, records = self.decoder, []
        while True:
            tree = propose(decoder, weights, state)
            if records:
                # Waits for the last round alone: the trees of the next are made meanwhile.
                tokens, active = jax.device_get((records[-1].tokens[0], state.active))
                for slot, matcher in self.matchers.items():
                    matcher.advance(tokens[slot][tokens[slot] >= 0].tolist())
                if not active.any():
                    break
            verified = verify(decoder, weights, state, tree)
            allowed = self._masks(jax.device_get((tree.tokens, tree.parents, tree.num_nodes, state.active)))
            state, record = settle(decoder, weights, state, tree, verified, allowed)
            records.append(record)
            if len(records) == rounds:
                break
        if len(records) == 1:
            return state, records[0]
        return state, jax.tree.map(lambda *each: np.concatenate(each), *jax.device_get(records))

    def _masks(self, trees: tuple[Any, ...]) -> UInt32[np.ndarray, "B N words"]:
        """What may follow at each node; all, where no grammar says anything."""
        tokens, parents, sizes, active = trees
        words = -(-self.decoder.target.vocab_size // 32)
        masks = np.full((*tokens.shape, words), 0xFFFFFFFF, np.uint32)
        for slot, matcher in self.matchers.items():
            if active[slot]:
                masks[slot] = matcher.masks_of_tree(tokens[slot], parents[slot], int(sizes[slot]))
        return masks
