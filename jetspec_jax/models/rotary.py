"""Cosines and sines of rotary embeddings, with the scalings for long contexts."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int

from jetspec_jax.config.geometry import Linear, Llama3, Rope, Yarn


def rotary(
    positions: Int[Array, "B N"], rope: Rope
) -> tuple[Float32[Array, "B N half"], Float32[Array, "B N half"]]:
    """Cosines and sines of each pair's angle: the position times the pair's frequency."""
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, Yarn) else 1.0
    angles = positions[:, :, None].astype(jnp.float32) * frequencies(rope).astype(np.float32)[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def frequencies(rope: Rope) -> Float64[np.ndarray, "half"]:
    """Radians per position of each pair: ``theta^(-2i / size)`` before any scaling."""
    half = rope.size // 2
    base = rope.theta ** (-np.arange(half) / half)
    match rope.scaling:
        case None:
            pass
        case Linear(factor):
            base = base / factor
        case Llama3():
            base = _llama3(base, rope.scaling)
        case Yarn():
            base = _yarn(base, rope.scaling, rope)
    if rope.turning is not None:
        base = np.where(np.arange(half) < rope.turning, base, 0.0)
    return base


def _llama3(base: Float64[np.ndarray, "half"], scaling: Llama3) -> Float64[np.ndarray, "half"]:
    """Long waves are stretched, short ones are not, with a smooth transition between.

    Source: the Llama 3.1 release.
    """
    # Rotations of a pair in the original context.
    turns = scaling.original_context * base / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * base + (1 - kept) * base / scaling.factor


def _yarn(base: Float64[np.ndarray, "half"], scaling: Yarn, rope: Rope) -> Float64[np.ndarray, "half"]:
    """The stretch is a ramp between two pairs, given by their rotations in the original context.

    Source: YaRN (arXiv 2309.00071), section 3.2.
    """

    def pair(turns: float) -> float:
        stretched = scaling.original_context / (turns * 2 * math.pi)
        return rope.size * math.log(stretched) / (2 * math.log(rope.theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.size - 1)
    # A ramp of no length would divide by zero.
    ramp = np.clip((np.arange(len(base)) - first) / max(last - first, 1e-3), 0, 1)
    return ramp * base / scaling.factor + (1 - ramp) * base
