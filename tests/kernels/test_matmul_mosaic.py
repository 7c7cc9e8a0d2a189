"""matmul's Mosaic kernel, which nothing interprets on a CPU: what it takes, its rule, and that it lowers."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import mosaic_tiles, pallas_mosaic
from pallas_kernels.matmul.config import MosaicConfig
from pallas_kernels.quantized import FP8, Quantized, scale_shape
from tests.kernels import ptx
from tests.kernels.lowering import MOSAIC, lower_for_gpu
from tests.marks import wide

BLOCKS = (128, 128)


def fp8_of(shape, block):
    return Quantized(
        jnp.zeros(shape, FP8), jnp.ones(scale_shape(shape, block), jnp.float32), block[: len(shape)]
    )


@pytest.mark.parametrize(
    ("spec", "rows", "shape", "block"),
    [
        ("bm,mf->bf", 1, (4096, 6144), BLOCKS),
        ("bm,mgf->bgf", 64, (512, 2, 384), (128, 1, 128)),
        wide("bm,mf->bf", 128, (12288, 4096), BLOCKS),
        wide("bhe,hem->bm", 256, (4, 128, 256), (1, 128, 128)),
    ],
)
def test_lowers_for_cuda(spec, rows, shape, block):
    x = jnp.zeros((rows, *shape[: len(shape) - len(spec.split("->")[1]) + 1]), jnp.bfloat16)
    w = fp8_of(shape, block)
    assert pallas_mosaic.unsupported(x, w, spec) is None
    run = partial(pallas_mosaic.matmul, spec=spec, wide=False)
    assert lower_for_gpu(run, x, w).count(MOSAIC) == 1


@pytest.mark.parametrize(
    ("x", "w", "why"),
    [
        (jnp.zeros((1, 128)), fp8_of((128, 128), BLOCKS), "not for float32 and fp8 weights"),
        (jnp.zeros((1, 128), jnp.bfloat16), jnp.zeros((128, 128)), "not for bfloat16 and plain weights"),
        (jnp.zeros((1, 96), jnp.bfloat16), fp8_of((96, 128), BLOCKS), "96 terms, no multiple of 128"),
        (
            jnp.zeros((1, 128), jnp.bfloat16),
            fp8_of((128, 192), (32, 192)),
            "scales change after 32 terms, no multiple of 128",
        ),
        (
            jnp.zeros((1, 128), jnp.bfloat16),
            fp8_of((128, 128), (128, 1)),
            "scales change after 1 columns, no multiple of 64",
        ),
        (
            jnp.zeros((1, 128), jnp.bfloat16),
            fp8_of((128, 64), BLOCKS),
            "64 columns, no multiple of 128 or 192",
        ),
    ],
)
def test_what_it_cannot_do_is_said(x, w, why):
    assert why in pallas_mosaic.unsupported(x, w, "bm,mf->bf")


@pytest.mark.parametrize("scale", [2e-38, 3.1e-4, 1.0, 127.9, 128.0, 255.9, 256.0, 1.3e9, 7.56e35])
def test_every_code_times_any_scale_is_finite_and_within_rounding(scale):
    """What the kernel's assembly computes of each value of FP8: twice two of them in a word."""
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], np.uint8)
    scale = np.float32(scale)
    large = not scale < mosaic_tiles._LARGE_SCALE
    factor = scale if large else scale * np.float32(mosaic_tiles._POWER)
    high_low = ptx.run(mosaic_tiles._SPLIT_SCALE, 2, factor)
    wide = np.empty(codes.size)
    for first, selector in zip((0, 2), mosaic_tiles._SELECTORS, strict=True):
        code = mosaic_tiles.widening(selector, large=large)
        [pair] = ptx.run(code, 1, codes.view(np.uint32), *high_low)
        wide[first::4], wide[first + 1 :: 4] = pair.view(ptx.BF16).reshape(-1, 2).T
    exact = codes.view(FP8).astype(np.float64) * np.float64(scale)
    # Half a unit in the last of eight bits, the rounding of the scale to 17 bits, and subnormal numbers.
    assert (abs(wide - exact) <= (2.0**-8 + 2.0**-16) * abs(exact) + 2.0**-133).all()


def test_other_gpus(monkeypatch):
    monkeypatch.setattr(pallas_mosaic, "compute_capability", lambda: (10, 0))
    why = pallas_mosaic.unsupported(
        jnp.zeros((1, 128), jnp.bfloat16), fp8_of((128, 128), BLOCKS), "bm,mf->bf"
    )
    assert why == "it is for compute capability 9.0, not 10.0"


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((64, 4096, 24576), (3, 1)),  # 128 tiles for 132 processors
        ((16, 4096, 6144), (3, 4)),
        ((128, 12288, 4096), (2, 4)),
        ((1, 256, 128), (2, 1)),  # too few terms to share
    ],
)
def test_the_rule_keeps_processors_busy(sizes, found):
    assert pallas_mosaic.default_config(*sizes) == MosaicConfig(*found)


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="groups must be 2 or 3, not 5"):
        MosaicConfig(5, 1)
    with pytest.raises(ValueError, match="splits must be at least 1"):
        MosaicConfig(2, 0)
