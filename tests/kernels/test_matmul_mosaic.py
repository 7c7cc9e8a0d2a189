"""matmul's Mosaic kernel: what it takes, its rule, and that it lowers; `test_quantized_rows` runs it."""

from functools import partial

import jax.numpy as jnp
import pytest

from pallas_kernels.matmul import pallas_mosaic
from pallas_kernels.matmul.config import MosaicConfig
from pallas_kernels.quantized import FP8, Quantized, scale_shape
from tests.kernels.lowering import MOSAIC, launches, lower_for_gpu
from tests.marks import wide

BLOCKS = (128, 128)


def fp8_of(shape, block, row_group=128):
    scales = jnp.ones(scale_shape(shape, block), jnp.float32)
    return Quantized(jnp.zeros(shape, FP8), scales, block, row_group)


@pytest.mark.parametrize(
    ("spec", "rows", "shape", "block"),
    [
        ("bm,mf->bf", 1, (4096, 6144), BLOCKS),
        ("bm,mgf->bgf", 64, (512, 2, 384), (128, 1, 128)),
        wide("bm,mf->bf", 128, (12288, 4096), BLOCKS),
        wide("bhe,hem->bm", 256, (4, 128, 256), (1, 128, 128)),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_lowers_for_cuda(spec, rows, shape, block, wide, monkeypatch):
    """Its rows are quantised by one launch, as it reads them."""
    monkeypatch.setattr("pallas_kernels.dispatch.gpu_problem", lambda: None)
    x = jnp.zeros((rows, *shape[: len(shape) - len(spec.split("->")[1]) + 1]), jnp.bfloat16)
    w = fp8_of(shape, block)
    assert pallas_mosaic.unsupported(x, w, spec) is None
    program = lower_for_gpu(partial(pallas_mosaic.matmul, spec=spec, wide=wide), x, w)
    assert program.count(MOSAIC) == 1
    assert launches(program) == {"quantize_rows": 1}
    assert "stablehlo.pad" not in program


@pytest.mark.parametrize(
    ("w", "why"),
    [
        (fp8_of((128, 128), BLOCKS, None), "for rows and weights in FP8, not for fp8 weights alone"),
        (jnp.zeros((128, 128)), "for rows and weights in FP8, not for plain weights alone"),
        (fp8_of((128, 128), BLOCKS, 64), "64 terms of a row share a scale, not 128"),
        (fp8_of((128, 128), BLOCKS, 0), "all terms of a row share a scale, not 128"),
        (fp8_of((96, 128), BLOCKS), "96 terms, no multiple of 128"),
        (fp8_of((128, 192), (32, 192)), "scales change after 32 terms, no multiple of 128"),
        (fp8_of((128, 128), (128, 1)), "scales change after 1 columns, no multiple of 64"),
        (fp8_of((128, 64), BLOCKS), "64 columns, no multiple of 128 or 192"),
    ],
)
def test_what_it_cannot_do_is_said(w, why):
    assert why in pallas_mosaic.unsupported(jnp.zeros((1, w.shape[0]), jnp.bfloat16), w, "bm,mf->bf")


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
