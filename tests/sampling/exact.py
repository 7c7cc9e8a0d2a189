"""What a sample must be, in float64 and by sorting."""

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.sampling.choice import choose_tokens, perturb
from jetspec_jax.sampling.slots import Sampling

FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"top_p": 1e-300},  # 0 in float32
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7},
    {"top_p": 0.8, "min_p": 0.3},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
]

jitted_choose = jax.jit(choose_tokens, static_argnames="max_depth")
jitted_perturb = jax.jit(perturb, static_argnames="max_depth")


def batch_of(params):
    return jax.tree.map(lambda *own: jnp.asarray(np.stack(own)), *map(Sampling.of, params))


def keep(scaled, top_k, top_p, min_p):
    """Which tokens top-k, then top-p of what is left, then min-p of what is left keep."""
    order = np.argsort(-scaled, kind="stable")
    kept = order[: top_k or len(scaled)]
    probability = np.exp(scaled[kept] - scaled[kept[0]])
    probability /= probability.sum()
    if top_p is not None:
        enough = int(np.searchsorted(np.cumsum(probability), top_p)) + 1
        kept, probability = kept[:enough], probability[:enough]
    if min_p is not None:
        kept = kept[probability >= min_p * probability[0]]
    mask = np.zeros(len(scaled), bool)
    mask[kept] = True
    return mask


def distribution(row, params):
    """Exact probabilities of the next token, in float64."""
    scaled = np.asarray(row, np.float64) / params.temperature
    scaled = np.where(keep(scaled, params.top_k, params.top_p, params.min_p), scaled, -np.inf)
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()
