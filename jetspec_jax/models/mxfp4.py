"""Unpacks MXFP4 on the host; `pallas_kernels.mxfp4` does it on the device for experts that stay packed."""

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
# One look-up per byte: its two float32 values as one 64-bit word, in memory order.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1).view(np.uint64)[:, 0]

_SCALES = np.array([math.ldexp(1, s - 127) for s in range(LARGEST_SCALE + 1)], np.float32)


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the blocks and the scales for values of ``shape``."""
    *rows, size = shape
    if size % BLOCK:
        raise ValueError(f"rows of {size} values are no whole blocks of {BLOCK}")
    return (*rows, size // BLOCK, BLOCK_BYTES), (*rows, size // BLOCK)


def check_scales(scales: np.ndarray) -> None:
    """Raises ValueError if a scale is not a number, or larger than kernels can multiply by."""
    if scales.size and (largest := scales.max()) > LARGEST_SCALE:
        raise ValueError(
            f"a scale is the byte {largest}; the largest supported is {LARGEST_SCALE}, for 2**33"
        )


def widen(
    blocks: UInt8[np.ndarray, "*rows G 16"], scales: UInt8[np.ndarray, "*rows G"], dtype: np.dtype = _FLOAT32
) -> Float[np.ndarray, "*rows K"]:
    """The K = 32 G values of G blocks per row.

    They are computed in float32, so pass large tensors in parts.
    """
    check_scales(scales)
    values = _PAIRS[blocks].view(np.float32)
    values *= _SCALES[scales][..., None]
    values = values.reshape(*scales.shape[:-1], -1)
    if dtype != _BFLOAT16:
        return values.astype(dtype, copy=False)
    # The lower half of each float32, which comes first, is 0 here; dropping it is faster than a conversion.
    return values.view(np.uint16)[..., 1::2].view(dtype)


def without_mxfp4(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a written checkpoint, without MXFP4: its values are written unpacked."""
    quantization = raw_config.get("quantization_config")
    packed = isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"
    return {key: value for key, value in raw_config.items() if not (packed and key == "quantization_config")}
