"""Tests an algorithm's contract on trees of many kinds of drafts, built in the checked mode."""

import numpy as np

from jetspec_jax.tree.algorithms import Algorithm, algorithm_of
from jetspec_jax.tree.building import build_tree
from jetspec_jax.tree.routing import Hints

#: The sequences of a trial, by the kind of their draft rows: random; one token nearly certain; all tokens
#: equal; many ties; only one token possible, as after a filter; and all of these in turn.
DRAFTS = ("random", "sure", "flat", "ties", "filtered", "mixed")
_HINTS: tuple[Hints | None, ...] = (
    None, {"task": "math"}, {"task": "balanced"}, {"task": "chat"}, {"mode": "cot"}, {"text": "First, …"}
)  # fmt: skip
# Budgets of the same bucket, so that they share a program.
_LARGE, _SMALL = 64, 33


def check_algorithm_contract(
    algorithm: str | Algorithm, *, depth: int = 15, width: int = 7, seed: int = 0
) -> None:
    """Tests an algorithm on drafts of many kinds; meant for tests of custom algorithms.

    Trees are built with ``build_tree(checked=True)`` for a batch with one sequence for each of `DRAFTS`, once
    without routing hints and once with a hint for each sequence.

    Args:
        algorithm: A name, or an algorithm with its options.
        depth: D, rows of a draft.
        width: W, most children of a node.
        seed: Seed of the random rows.

    Raises:
        ValueError: The algorithm breaks its contract, see `build_tree`. A note lists the kinds of sequences.
    """
    chosen = algorithm_of(algorithm)
    logits = sample_logits(depth, width, seed)
    roots = np.arange(len(DRAFTS))
    try:
        for routing in (None, list(_HINTS)):
            for budget, limit in ((_LARGE, depth), (_SMALL, (depth + 1) // 2)):
                build_tree(
                    logits,
                    roots,
                    width=width,
                    budget=budget,
                    algorithm=chosen,
                    depth=limit,
                    routing=routing,
                    checked=True,
                )
    except ValueError as error:
        error.add_note("sequences of the trial: " + ", ".join(f"{b} {kind}" for b, kind in enumerate(DRAFTS)))
        raise


def sample_logits(depth: int, width: int, seed: int) -> np.ndarray:
    """Draft logits [B, D, V] of the sequences of a trial, in the order of `DRAFTS`."""
    rng = np.random.default_rng(seed)
    shape = (depth, max(64, 2 * width))
    index = np.arange(depth)
    only = rng.integers(0, shape[1], depth)
    sure, filtered = np.zeros(shape), np.full(shape, -np.inf)
    sure[index, only], filtered[index, only] = 40.0, 0.0
    kinds = [rng.normal(0, 3, shape), sure, np.zeros(shape), rng.integers(0, 3, shape), filtered]
    mixed = np.stack([kinds[d % len(kinds)][d] for d in range(depth)])
    return np.stack([*kinds, mixed]).astype(np.float32)
