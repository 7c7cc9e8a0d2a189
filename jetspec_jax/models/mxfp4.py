"""MXFP4 in files: what widens it on the host, as `pallas_kernels.mxfp4` does where it is kept packed."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from pallas_kernels.mxfp4 import BLOCK, BLOCK_BYTES, LARGEST_SCALE

_FLOAT32, _BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# One look-up per byte: both of its float32 values as one 64-bit word, in the order of the memory.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1).view(np.uint64)[:, 0]

_SCALES = np.array([math.ldexp(1, s - 127) for s in range(LARGEST_SCALE + 1)], np.float32)


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the blocks and of the scales that hold values of ``shape``.

    Raises:
        ValueError: The last axis does not consist of whole blocks.
    """
    *rows, size = shape
    if size % BLOCK:
        raise ValueError(f"rows of {size} values are no whole blocks of {BLOCK}")
    return (*rows, size // BLOCK, BLOCK_BYTES), (*rows, size // BLOCK)


def check_scales(scales: np.ndarray) -> None:
    """Raises a ValueError if a scale is no number, or so large that values would not be finite."""
    if scales.size and (largest := scales.max()) > LARGEST_SCALE:
        raise ValueError(f"a scale is the byte {largest}; the largest of finite values is {LARGEST_SCALE}")


def widen(
    blocks: UInt8[np.ndarray, "*rows G 16"], scales: UInt8[np.ndarray, "*rows G"], dtype: np.dtype = _FLOAT32
) -> Float[np.ndarray, "*rows K"]:
    """The values of G blocks per row, K = 32 G of them.

    They are computed in float32, so a caller with many takes some rows at a time.

    Raises:
        ValueError: A scale is no number, or so large that values would not be finite.
    """
    check_scales(scales)
    values = _PAIRS[blocks].view(np.float32)
    values *= _SCALES[scales][..., None]
    values = values.reshape(*scales.shape[:-1], -1)
    if dtype != _BFLOAT16:
        return values.astype(dtype, copy=False)
    # A float32's lower half, which comes first, is 0 here: leaving it out is faster than a conversion.
    return values.view(np.uint16)[..., 1::2].view(dtype)


def without_mxfp4(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` for a checkpoint that is written: values are widened there, so it must not say MXFP4.

    Other readers would look for blocks and scales.
    """
    quantization = raw_config.get("quantization_config")
    packed = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
    return {key: value for key, value in raw_config.items() if not (packed and key == "quantization_config")}
