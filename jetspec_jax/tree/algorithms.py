"""Tree algorithms: all grow best-first, each with its own caps on the children of a node.

An algorithm is a function from the candidates to caps `[B, D]`: a node at depth d gets at most
`caps[b, d]` children, the best of draft row d. Caps lie in 0..W. It runs inside the compiled
round, so it must be traceable.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jetspec_jax.tree.candidates import Candidates

Algorithm = Callable[[Candidates], Int32[Array, "B D"]]


def accum_logp(candidates: Candidates) -> Int32[Array, "B D"]:
    """Every expanded node gets the full width (JetSpec's default, arXiv 2606.18394)."""
    batch, depth, width = candidates.tokens.shape
    return jnp.full((batch, depth), width, jnp.int32)


_ALGORITHMS: dict[str, Algorithm] = {"accum_logp": accum_logp}


def algorithm_names() -> tuple[str, ...]:
    """The names that `build_tree` knows, the default first."""
    return tuple(_ALGORITHMS)


def check_algorithm(name: str) -> None:
    """Raises ValueError, listing the known names, unless `name` is one of them."""
    if name not in _ALGORITHMS:
        known = ", ".join(algorithm_names())
        raise ValueError(f"unknown tree algorithm {name!r}; known algorithms: {known}")


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`; ValueError as in `check_algorithm`."""
    check_algorithm(name)
    return _ALGORITHMS[name]
