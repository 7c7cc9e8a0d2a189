"""Products of one row, which a GPU's compiler is kept from writing out term by term."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.models.layers import einsum
from pallas_kernels.activation import SILU
from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.quantized import FP8, Quantized, scale_shape


def rows_of_product(spec, *arrays):
    jaxpr = jax.make_jaxpr(lambda *args: einsum(spec, *args))(*arrays)
    (product,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general")
    (axes, _), _ = product.params["dimension_numbers"]
    row = product.invars[0].aval
    return row.size // np.prod([row.shape[axis] for axis in axes])


def arrays_of(x, w):
    keys = jax.random.split(jax.random.key(0))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, (x, w), strict=True))


@pytest.mark.parametrize(
    ("spec", "x", "w", "rows"),
    [
        ("tm,me->te", (1, 2048), (2048, 1024), 2),
        ("bnhe,hem->bnm", (1, 1, 16, 128), (16, 128, 1024), 2),
        ("bnm,vm->bnv", (1, 1, 256), (8192, 256), 2),
        ("tm,me->te", (1, 2048), (2048, 128), 1),  # small: fused
        ("tm,me->te", (1, 4096), (4096, 2560), 1),  # large: a product anyway
        ("bnm,mgre->bngre", (1, 3, 1024), (1024, 2, 4, 256), 3),
    ],
)
def test_rows(spec, x, w, rows, monkeypatch):
    arrays = arrays_of(x, w)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert rows_of_product(spec, *arrays) == rows
    found = einsum(spec, *arrays)
    np.testing.assert_allclose(found, jnp.einsum(spec, *arrays, precision="highest"), rtol=1e-4, atol=1e-4)


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def quantised(shape):
    """With a scale for each entry of the first and the last axis."""
    block = (1, *shape[1:-1], 1)
    return Quantized(jnp.zeros(shape, FP8), jnp.ones(scale_shape(shape, block)), block)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(("rows", "computed"), [(1, 2), (3, 3)])
def test_rows_of_quantised_weights(rows, computed):
    x, w = jnp.zeros((1, rows, 16, 128), jnp.bfloat16), quantised((16, 128, 1024))
    assert rows_of_product("bnhe,hem->bnm", x, w) == computed


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("make", [jnp.zeros, quantised])
def test_one_token_s_expert(make):
    """Blocks of one row, by the XLA reference, which quantised experts take on a GPU too."""
    weights = make((2, 1024, 2, 1024)), make((2, 1024, 1024))
    arrays = jnp.zeros((1, 1024)), *weights, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))
    run = partial(expert_mlp, activation=SILU, implementation="xla")
    products = re.findall(r"\[([\d,]*)\] = dot_general", str(jax.make_jaxpr(run)(*arrays)))
    assert products == ["2,2,1024", "1,1024"]  # the second matrix is small


def test_elsewhere_a_row_stays_alone():
    assert rows_of_product("tm,me->te", *arrays_of((1, 2048), (2048, 1024))) == 1
