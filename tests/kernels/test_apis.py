"""What every operation does alike: which implementation runs, and that gradients pass through a kernel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    dispatch,
    expert_choice,
    expert_mlp,
    gated_activation,
    gated_delta,
    matmul,
    paged_write,
    qkv_rotary,
    quantize_rows,
    rms_norm,
    token_filter,
    tree_attention,
    tree_growth,
)
from pallas_kernels.activation import SILU
from tests.kernels.lowering import KERNEL, lower_for_gpu


def halves(*shape):
    return jnp.full(shape, 0.5)


def zeros(*shape):
    return jnp.zeros(shape, jnp.int32)


#: What only the reference computes, as yet, and what has a Mosaic kernel too.
WITHOUT_KERNEL = {"gated_delta"}
WITH_MOSAIC = {"matmul"}
ROUTING = expert_choice.RouterRule(2)
#: By operation: its package, a call's arrays and its settings.
CALLS = {
    "expert_choice": (expert_choice, [jnp.eye(3, 8)], {"routing": ROUTING}),
    "expert_mlp": (
        expert_mlp,
        [halves(3, 16), halves(2, 16, 2, 4), halves(2, 4, 16), zeros(3, 1), halves(3, 1)],
        {"activation": SILU},
    ),
    "gated_activation": (gated_activation, [halves(3, 2, 40)], {}),
    "gated_delta": (
        gated_delta,
        [*[halves(1, 3, 2, 4)] * 2, halves(1, 3, 4, 5), *[-halves(1, 3, 4)] * 2],
        {"parents": jnp.array([[-1, 0, 0]], jnp.int32)},
    ),
    "least_kept": (token_filter, [halves(1, 2, 9), halves(1), zeros(1), halves(1), halves(1)], {}),
    "matmul": (matmul, ["bm,mf->bf", halves(3, 16), halves(16, 32)], {}),
    "paged_write": (paged_write, [[halves(2, 4, 8)], [halves(1, 3, 8)], zeros(1, 1), zeros(1, 1)], {}),
    "qkv_rotary": (
        qkv_rotary,
        [halves(1, 3, 2, 6, 16), halves(16), halves(16), halves(1, 3, 8), halves(1, 3, 8)],
        {"eps": 1e-6},
    ),
    "quantize_rows": (quantize_rows, [halves(3, 40), 16], {}),
    "rms_norm": (rms_norm, [halves(3, 40), halves(40)], {"eps": 1e-6}),
    "tree_attention": (
        tree_attention,
        [*[halves(1, 1, 2, 16)] * 3, jnp.ones((1, 1, 1), jnp.uint32), None],
        {"scale": 1.0},
    ),
    "tree_growth": (
        tree_growth,
        [-halves(1, 3, 2), zeros(1, 3) + 2, zeros(1) + 9],
        {"num_nodes": 16},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_choice(name, monkeypatch):
    """By default what can run here; a name is that one or an error that says why."""
    package, arrays, settings = CALLS[name]
    call = partial(getattr(package, name), *arrays, **settings)
    monkeypatch.setattr(dispatch, "gpu_problem", lambda: "no GPU here")
    available = package.implementations()
    kernels = () if name in WITHOUT_KERNEL else ("pallas_triton",)
    assert available == (*(("pallas_mosaic",) if name in WITH_MOSAIC else ()), *kernels, "xla")
    default, named = jax.jit(call)(), jax.jit(partial(call, implementation="xla"))()
    jax.tree.map(np.testing.assert_array_equal, default, named)
    for kernel in available[:-1]:
        with pytest.raises(NotImplementedError, match=f"^{name}: {kernel} cannot run: no GPU here"):
            call(implementation=kernel)
    with pytest.raises(
        ValueError, match=f"^{name} has no implementation 'cuda'; available: {', '.join(available)}$"
    ):
        call(implementation="cuda")


@pytest.mark.parametrize("name", ["gated_activation", "qkv_rotary", "rms_norm"])
def test_a_kernel_is_differentiable(name):
    package, arrays, settings = CALLS[name]
    settings = {"gated_activation": {"activation": SILU}}.get(name, settings)
    function = package.api.OPERATION.table["pallas_triton"].function
    arrays = [*arrays, None] if name == "rms_norm" else arrays

    def loss(*arrays):
        return sum(map(jnp.sum, jax.tree.leaves(function(*arrays, **settings))))

    assert lower_for_gpu(jax.value_and_grad(loss), *arrays).count(KERNEL) == 1
