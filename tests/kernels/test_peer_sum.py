"""Sums through other devices' memory. No interpreter has several GPUs: one is given the terms of others."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec

from bench.common.collectives import Collective, collectives
from bench.common.kernel_trace import classify
from jetspec_jax.device.peers import make_exchange
from jetspec_jax.progress import log_once
from pallas_kernels import peer_sum, shards
from tests.kernels.lowering import MOSAIC, gpu_mesh, lower_for_gpu
from tests.meshes import mesh_of

pytestmark = pytest.mark.usefixtures("no_type_checks")
kernels = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="these kernels need JAX 0.11.2")
MOST = 128 * 4096


def on_mesh(mesh, function):
    each = PartitionSpec(shards.ALL)
    return jax.shard_map(function, mesh=mesh, in_specs=(each, each), out_specs=each, check_vma=False)


def add(x, exchange):
    with shards.through(exchange):
        return shards.all_sum(x)


def exchange_of(parts, dtype):
    shapes = peer_sum.exchange_shapes(parts, 2 * MOST, jnp.dtype(dtype))
    whole = (((parts * each.shape[0], *each.shape[1:]), each.dtype) for each in shapes)
    return peer_sum.Exchange(*(jax.ShapeDtypeStruct(*each) for each in whole))


@kernels
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 33, 128])
def test_lowers_for_cuda(parts, dtype, rows):
    x = jax.ShapeDtypeStruct((parts, rows, 4096), dtype)
    mesh = gpu_mesh(1, parts)
    program = lower_for_gpu(on_mesh(mesh, add), x, exchange_of(parts, dtype), mesh=mesh)
    assert program.count(MOSAIC) == 1
    assert "all_reduce" not in program
    assert "nvshmem" not in program
    assert "multimem" not in program


@kernels
@pytest.mark.parametrize("shape", [(1, 4096), (3, 2880), (199, 64), (128, 4096)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_device_adds_terms_in_the_order_of_the_devices(monkeypatch, dtype, shape):
    """The terms of the other two are there before; the place is that of the block's count."""
    steps = []

    def store(layout, rows, ref):
        steps.append("store")
        ref[...] = rows

    monkeypatch.setattr(peer_sum.plgpu, "remote_ref", lambda ref, device: ref)
    monkeypatch.setattr(peer_sum, "_store", store)
    monkeypatch.setattr(peer_sum, "_raise_flag", lambda flag: steps.append("raise"))
    monkeypatch.setattr(peer_sum, "_lower_flag", lambda flag, times: steps.append(f"lower {times}"))
    rng = np.random.default_rng(shape)
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    of_terms, flags = peer_sum.exchange_shapes(3, MOST, jnp.dtype(dtype))
    terms = jnp.asarray(rng.standard_normal(of_terms.shape), dtype)
    exchange = peer_sum.Exchange(terms, jnp.zeros(flags.shape, jnp.int32).at[2].set(5))
    assert peer_sum.unsupported(x, exchange) is None
    monkeypatch.setattr(peer_sum.np, "unravel_index", lambda device, sizes: (0, 0))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = on_mesh(mesh_of(1, 1), lambda x, e: peer_sum.peer_sum(x, e, shards.ALL))(x, exchange)
    assert steps[-7:] == [*["store"] * 3, *["raise"] * 3, "lower 3"]
    blocks, chunk = peer_sum._chunks(x.size, x.dtype)
    others = np.asarray(terms, np.float64)[1, 1:, :blocks, :chunk].reshape(2, -1)[:, : x.size]
    exact = np.asarray(x, np.float64) + others.sum(axis=0).reshape(shape)
    # Two float32 sums of terms below 16, and the rounding of the result.
    eps = float(jnp.finfo(dtype).eps)
    bound = 2 * np.finfo(np.float32).eps * 16 + eps / 2 * np.abs(exact) * (1 + eps)
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()
    assert (np.asarray(got, np.float64) != np.asarray(x, np.float64)).any()


@pytest.mark.skipif(jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_thousand_sums_on_gpus(dtype):
    """Sums of three sizes in turns, of terms whose sums are exact, and the same bits on both devices."""
    mesh = mesh_of(1, 2)
    exchange = make_exchange(mesh, 4096, jnp.dtype(dtype))
    assert exchange is not None
    shapes = (1, 2880), (16, 4096), (128, 4096)
    terms = [np.random.default_rng(n).integers(-8, 8, (2, *shape)) for n, shape in enumerate(shapes)]

    def many(exchange, *terms):
        def three(i, wrong):
            for term in terms:
                shifted = (term + i % 4).astype(dtype)
                wrong += (add(shifted, exchange) != jax.lax.psum(shifted, shards.ALL)).sum()
            return wrong

        return jax.lax.fori_loop(0, 1000, three, jnp.int32(0))[None], add(terms[1].astype(dtype), exchange)

    each = PartitionSpec(shards.ALL)
    run = jax.shard_map(many, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    wrong, sums = jax.jit(run)(exchange, *map(jnp.asarray, terms))
    assert np.asarray(wrong).tolist() == [0, 0]
    first, second = np.asarray(sums)
    np.testing.assert_array_equal(first, terms[1].sum(axis=0))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (jnp.zeros((1, 4096)), "the exchange is for bfloat16, not float32"),
        (
            jnp.zeros((256, 4096), jnp.bfloat16),
            "a block's chunk of 8192 elements, and there is room for 4096",
        ),
    ],
)
def test_what_it_cannot_do_is_said_and_left_to_xla(x, why):
    shapes = peer_sum.exchange_shapes(2, MOST, jnp.dtype(jnp.bfloat16))
    exchange = peer_sum.Exchange(*(jnp.zeros(each.shape, each.dtype) for each in shapes))
    assert peer_sum.unsupported(x, exchange) == why
    got = on_mesh(mesh_of(1, 2), lambda x, _: add(x, exchange))(jnp.stack([x + 1, x + 2]), jnp.zeros(2))
    assert (got == 3).all()


def test_only_sums_inside_of_the_context_go_through_an_exchange():
    with contextlib.suppress(ZeroDivisionError), shards.through(object()):
        assert shards._EXCHANGE.get() is not None
        raise ZeroDivisionError
    assert shards._EXCHANGE.get() is None


def test_there_is_no_exchange_without_gpus(caplog):
    assert make_exchange(None, 4096, jnp.dtype(jnp.bfloat16)) is None
    if jax.default_backend() == "cpu":
        log_once.cache_clear()
        with caplog.at_level(logging.INFO, "jetspec_jax"):
            for _ in range(2):
                assert make_exchange(mesh_of(1, 2), 4096, jnp.dtype(jnp.bfloat16), lambda *_: True) is None
        assert caplog.messages == [
            "devices 0, 1 add up through XLA, which takes longer: not all of them are GPUs"
        ]


@kernels
def test_a_round_counts_these_sums_too():
    exchange, mesh = exchange_of(2, jnp.bfloat16), gpu_mesh(1, 2)
    x = jax.ShapeDtypeStruct((2, 16, 4096), jnp.bfloat16)

    def three(x, exchange):
        return add(add(x, exchange) + add(2 * x, exchange), exchange)

    lowered = jax.jit(on_mesh(mesh, three)).trace(x, exchange).lower(lowering_platforms=("cuda",))
    assert collectives(lowered) == [Collective("sum", 16 * 4096 * 2, False, 0)] * 3
    assert lowered.as_text().count(MOSAIC) == 1  # three calls of one function
    assert classify("peer_sum_mosaic_gpu_kernel") == "collectives"
