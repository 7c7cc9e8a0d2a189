"""Grammars: matchers of requests, and rounds in which the host makes token masks while the target verifies.

Shapes: L live slots, N nodes, D draft depth.
"""

from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int, Int32, UInt32

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord
from jetspec_jax.decode.three_programs import propose, settle, verify
from jetspec_jax.device.processes import spans
from jetspec_jax.sampling.grammar import Matcher
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import TokenTree


def matcher_for(target: Target, params: SamplingParams, stop_ids: Collection[int]) -> Matcher | None:
    """A request's grammar matcher; None without a grammar.

    Raises ImportError without llguidance, and ValueError for a grammar that does not work with this target
    (see `Vocabulary.matcher`), or if several processes share the target: each would need the matchers.
    """
    wanted = params.structured_outputs
    if wanted is None:
        return None
    if spans(target.mesh):
        raise ValueError("structured_outputs need a model that one process has; several share this one")
    return target.vocabulary.matcher(wanted, stop_ids)


def run_constrained(
    decoder: TreeDecoder,
    matchers: Mapping[int, Matcher],
    weights: DecodeWeights,
    state: DecodeState,
    rounds: np.int32,
    *live: Int32[np.ndarray, "L"],
) -> tuple[DecodeState, RoundRecord]:
    """Runs up to ``rounds`` rounds, at least one, as `TreeDecoder.decode`; returns to the host in each.

    This waits for all rounds but the last, and the ``matchers``, by slot, advance over these; tokens of slots
    without one are not masked. ``state`` is donated.
    """
    slots = live[0].tolist() if live else range(len(state.active))
    live_matchers = [matchers.get(slot) for slot in slots]
    decodes, still_active, records = np.ones(len(live_matchers), bool), None, []
    while True:
        tree = propose(decoder, weights, state, *live)
        if records:
            # Waits for the last round only: the device already proposes the next round's trees.
            committed, decodes = jax.device_get((records[-1].tokens, still_active))
            _advance(live_matchers, committed[0])
            if not decodes.any():
                break
        verified = verify(decoder, weights, state, tree, *live)
        allowed = _masks(live_matchers, tree, decodes, decoder.target.vocab_size)
        state, (record, still_active) = settle(decoder, weights, state, tree, verified, allowed, *live)
        records.append(record)
        if len(records) == rounds:
            break
    if len(records) == 1:
        return state, records[0]
    return state, jax.tree.map(lambda *each: np.concatenate(each), *jax.device_get(records))


def _masks(
    matchers: Sequence[Matcher | None], tree: TokenTree, decodes: Bool[np.ndarray, "L"], vocab_size: int
) -> UInt32[np.ndarray, "L N words"]:
    """The allowed tokens at each node, all without a grammar. Waits for the trees."""
    tokens, parents, sizes = jax.device_get((tree.tokens, tree.parents, tree.num_nodes))
    masks = np.full((*tokens.shape, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    for place, matcher in enumerate(matchers):
        if matcher is not None and decodes[place]:
            masks[place] = matcher.masks_of_tree(tokens[place], parents[place], int(sizes[place]))
    return masks


def _advance(matchers: Sequence[Matcher | None], tokens: Int[np.ndarray, "L D1"]) -> None:
    for matcher, committed in zip(matchers, tokens, strict=True):
        if matcher is not None:
            matcher.advance(committed[committed >= 0].tolist())
