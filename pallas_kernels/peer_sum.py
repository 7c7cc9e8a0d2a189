"""Sums over the GPUs of one process, which write their terms into each other's memory, as Pallas Mosaic GPU.

A sum is one kernel. Each of its blocks copies a chunk of the device's term to all devices, raises a flag on
each of them, waits until every device has raised this block's flag, and adds up the chunks in the order of
the devices. So all devices get the same bits. Copies and flags are plain stores over NVLink or PCIe; nothing
is multicast.

The memory that others write to must exist on all devices before one of them begins a sum, and must hold
nothing else. So it is an argument of the program, an `Exchange`, which lives as long as the model. XLA takes
it for constant: it neither copies it nor orders kernels by it.

A block alternates between two places for the chunks that it receives, and counts its sums to know which.
Nobody writes to a place that is still read: a device begins its sum n + 1 after all have raised their flag of
the sum n, and by then all have ended the sum n - 1, which used the same place. Waiting lowers a flag again,
so sums can be repeated without end.

All devices must run the same sums in the same order, one after another. XLA runs a program's kernels in the
order of its schedule, the same on all devices. The scheduling mode CONCURRENT of command buffers would not
guarantee it.

Shapes: P devices, G blocks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float, Int32

_BLOCKS = 128  # all of them run at once, as a processor holds 16
_THREADS = 128  # of a block
_ACCESS = 16  # bytes of a thread's load or store
_MOST_UNROLLED = 4  # loads of a thread before its first store
_COUNT = 2  # the row of flags with the number of a block's sums; the others are the places'


class Exchange(NamedTuple):
    """A device's memory for the terms of all devices, and its flags. Both begin as zeros."""

    terms: Float[Array, "places P G chunk"]
    flags: Int32[Array, "3 G"]


def exchange_shapes(parts: int, most: int, dtype: jnp.dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of a device's `Exchange` for sums over ``parts`` devices of at most ``most`` elements."""
    _, chunk = _chunks(most, dtype)
    return (
        jax.ShapeDtypeStruct((2, parts, _BLOCKS, chunk), dtype),
        jax.ShapeDtypeStruct((3, _BLOCKS), jnp.int32),
    )


def unsupported(x: Array, exchange: Exchange) -> str | None:
    """Why a term cannot be summed through an exchange."""
    if x.dtype != exchange.terms.dtype:
        return f"the exchange is for {exchange.terms.dtype}, not {x.dtype}"
    if (chunk := _chunks(x.size, x.dtype)[1]) > exchange.terms.shape[-1]:
        return f"a block's chunk of {chunk} elements, and there is room for {exchange.terms.shape[-1]}"
    return None


@functools.partial(jax.jit, static_argnames="axes")  # a program's sums of a shape are lowered once
def peer_sum(x: Float[Array, "*shape"], exchange: Exchange, axes: tuple[str, ...]) -> Float[Array, "*shape"]:
    """The sum of ``x`` over the devices along the axes, which are all axes of the mesh."""
    parts, (blocks, chunk) = exchange.terms.shape[1], _chunks(x.size, x.dtype)
    access = _ACCESS // x.dtype.itemsize
    least = _THREADS * access
    tile = least * max(times for times in range(1, _MOST_UNROLLED + 1) if chunk // least % times == 0)
    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=access)
    sizes = tuple(lax.axis_size(axis) for axis in axes)

    def of_device(ref: Any, device: int) -> Any:
        place: Any = dict(zip(axes, map(int, np.unravel_index(device, sizes)), strict=True))
        return plgpu.remote_ref(ref, place)

    def peer_sum(x_ref: Any, terms: Any, flags: Any, out_ref: Any) -> None:  # the kernel's name in traces
        here, block = lax.axis_index(axes), lax.axis_index("blocks")
        count = flags[_COUNT, block]
        place = lax.rem(count, 2)

        def send(i: Array, _: None) -> None:
            rows = plgpu.layout_cast(x_ref[pl.ds(block * chunk + i * tile, tile)], layout)
            for device in range(parts):
                _store(layout, rows, of_device(terms.at[place, here, block, pl.ds(i * tile, tile)], device))

        def add(i: Array, _: None) -> None:
            total = functools.reduce(
                jnp.add,
                (
                    plgpu.layout_cast(terms[place, device, block, pl.ds(i * tile, tile)], layout).astype(
                        jnp.float32
                    )
                    for device in range(parts)
                ),
            )
            out_ref[pl.ds(block * chunk + i * tile, tile)] = total.astype(out_ref.dtype)

        lax.fori_loop(0, chunk // tile, send, None)
        for device in range(parts):
            _raise_flag(of_device(flags.at[place, block], device))
        _lower_flag(flags.at[place, block], parts)
        flags[_COUNT, block] = count + 1
        lax.fori_loop(0, chunk // tile, add, None)

    params: Any = plgpu.CompilerParams
    call = plgpu.kernel(
        peer_sum,
        out_type=jax.ShapeDtypeStruct((blocks * chunk,), x.dtype),
        grid=(blocks,),
        grid_names=("blocks",),
        compiler_params=params(skip_device_barrier=True),
    )
    padded = jnp.pad(x.reshape(-1), (0, blocks * chunk - x.size))
    return call(padded, exchange.terms, exchange.flags)[: x.size].reshape(x.shape)


def _chunks(size: int, dtype: jnp.dtype) -> tuple[int, int]:
    """How many blocks sum so many elements, and how many each of them sums."""
    least = _THREADS * _ACCESS // dtype.itemsize
    tiles = max(1, pl.cdiv(size, least))
    each = pl.cdiv(tiles, _BLOCKS)
    return pl.cdiv(tiles, each), each * least


def _store(layout: Any, rows: Any, ref: Any) -> None:
    """Stores whole vectors: Pallas would store single elements, as it knows no alignment of other devices."""

    def store(_: Any, rows: Any, ref: Any) -> None:
        begin, word = mgpu.memref_ptr(ref), ir.IntegerType.get_signless(32)
        for at, register in zip(rows.layout.linear_thread_idxs(), rows.registers.flat, strict=True):
            address = mgpu.getelementptr(begin, [arith.index_cast(word, at)], rows.mlir_dtype)
            llvm.store(register, address, alignment=_ACCESS)

    _inline((layout, plgpu.RefType()), store)(rows, ref)


def _raise_flag(flag: Any) -> None:
    """Adds 1 to a flag, of this device or another, after all stores of the block."""

    def signal(_: Any, flag: Any) -> None:
        mgpu.warpgroup_barrier()
        mgpu.SemaphoreRef(mgpu.memref_ptr(flag)).signal(1)

    _inline((plgpu.RefType(),), signal)(flag)


def _lower_flag(flag: Any, times: int) -> None:
    """Waits until a flag of this device has been raised so often, and lowers it as often."""

    def wait(_: Any, flag: Any) -> None:
        mgpu.SemaphoreRef(mgpu.memref_ptr(flag)).wait(times)

    _inline((plgpu.RefType(),), wait)(flag)


def _inline(types: tuple[Any, ...], function: Callable[..., None]) -> Callable[..., None]:
    """The function, which emits operations of Mosaic, for calls from a kernel; it gets a context first."""
    inlined: Any = plgpu.inline_mgpu(arg_types=types)(function)
    return inlined
