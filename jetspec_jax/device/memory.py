"""Device memory: free bytes, the bytes of weights and arrays, and checks before anything is allocated.

On a mesh all counts are per device, and the device with the least free memory decides. The free memory of a
CPU comes from Linux. Devices that do not report their memory pass every check.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.device.mesh import make_mesh, size_of
from jetspec_jax.device.partition import check_partition, parameter_specs, spread
from jetspec_jax.device.processes import gathered, same_processes, spans
from jetspec_jax.models import abstract, dtype_of, weights_of, with_quantization
from pallas_kernels import shards
from pallas_kernels.dispatch import default_device

#: Bytes by purpose.
Bytes = Mapping[str, int]

TARGET_WEIGHTS = "weights of the target"
HEAD_WEIGHTS = "weights of the draft head"


class DeviceMemoryError(RuntimeError):
    """A device lacks the memory for a call, which has not read or allocated anything."""


class Alternative(NamedTuple):
    """An alternative value of a setting, and the memory that it would need."""

    setting: str
    value: int | str
    needs: Bytes
    mesh: Mesh | None = None


def free_bytes(mesh: Mesh | None = None) -> int | None:
    """Free bytes of a device, or the minimum over a mesh; None if a device does not report it.

    The free memory of a CPU is the system's, and is divided among simulated devices. On a mesh of several
    processes, each process considers its local devices.
    """
    devices = [default_device()] if mesh is None else mesh.local_devices
    free = [_free_bytes(device, len(devices)) for device in devices]
    known = [size for size in free if size is not None]
    return min(known, default=None) if len(known) == len(free) else None


def check_memory(
    needs: Callable[[], Bytes],
    *,
    mesh: Mesh | None = None,
    others: Callable[[], Iterable[Alternative]] = tuple,
) -> None:
    """Checks that each device has enough free memory.

    On a mesh of several processes all must call this, and all raise the same error.

    ``needs`` is called only if devices report their memory. The error lists all parts and their sum, and
    recommends the first fitting value of each setting among the ``others``.
    """
    free = _known_free(mesh)
    if free is None:
        return
    parts = needs()
    total = sum(parts.values())
    if total <= free:
        return
    fitting: dict[str, int | str] = {}
    for other in others():
        room = free
        if other.mesh != mesh:
            room = _free_everywhere(other.mesh) if spans(mesh) else free_bytes(other.mesh)
        if room is None or sum(other.needs.values()) <= room:
            fitting.setdefault(other.setting, other.value)
    width = max(map(len, parts))
    count = size_of(mesh)
    kind = (default_device() if mesh is None else mesh.local_devices[0]).device_kind
    where, fullest = (f"each of {count} x {kind}", " on the fullest") if count > 1 else (kind, "")
    lines = [f"too little memory on {where}: {_gib(total)} needed, {_gib(free)} free{fullest}"]
    lines += [f"  {name:<{width}}  {_gib(size):>11}" for name, size in parts.items()]
    if fitting:
        settings = [f"{setting} {value}" for setting, value in fitting.items()]
        lines.append(f"one of these would fit: {', '.join(settings)}")
    raise DeviceMemoryError("\n".join(lines))


def fits(needs: Bytes, mesh: Mesh | None = None) -> bool:
    """Whether each device has enough free memory, or does not report it; see `check_memory`."""
    room = room_beside(needs, mesh)
    return room is None or room >= 0


def room_beside(needs: Bytes, mesh: Mesh | None = None) -> int | None:
    """Free bytes of each device beside some parts, negative if these are too many; None if not reported."""
    free = _known_free(mesh)
    return None if free is None else free - sum(needs.values())


def _known_free(mesh: Mesh | None) -> int | None:
    """Free bytes of each device of a mesh, over all processes that share it."""
    return _free_everywhere(mesh) if spans(mesh) else free_bytes(mesh)


def _free_everywhere(mesh: Mesh | None) -> int | None:
    """`free_bytes` over the devices of all processes."""
    free = gathered(free_bytes(mesh), "a check of memory")
    known = [size for size in free if size is not None]
    return min(known) if len(known) == len(free) else None


def with_more_devices(
    config: ModelConfig, mesh: Mesh | None, needs: Callable[[Mesh], Bytes]
) -> Iterator[Alternative]:
    """Larger tensor-parallel sizes, powers of two, that the devices allow and that divide a target."""
    if mesh is not None and set(mesh.axis_names) - set(shards.ALL):
        return  # training has no such setting
    shape = {} if mesh is None else mesh.shape
    experts, tensor = (shape.get(axis, 1) for axis in (shards.EXPERT, shards.TENSOR))
    devices = jax.devices((default_device() if mesh is None else mesh.devices.flat[0]).platform)
    size = 1 << tensor.bit_length()
    while size * experts <= len(devices):
        larger = make_mesh(size, experts, devices=devices)
        if mesh is not None and spans(mesh) and not same_processes(larger, mesh):
            size *= 2
            continue
        with contextlib.suppress(ValueError):
            check_partition(config, larger)
            yield Alternative("tensor_parallel_size", size, needs(larger), larger)
        size *= 2


def num_parameters(config: ModelConfig | DraftHeadConfig) -> int:
    """Number of a config's parameters; scales of quantised weights do not count."""
    return sum(math.prod(shape) for shape in _parameter_shapes(with_quantization(config, None)).values())


def weight_bytes(config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype, mesh: Mesh | None = None) -> int:
    """Bytes of a config's parameters on a device, in type ``dtype`` with the exceptions of `dtype_of`."""
    return sum(_parameter_bytes(config, dtype, mesh))


def largest_parameter_bytes(
    config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype, mesh: Mesh | None = None
) -> int:
    """Bytes on a device of the largest of a config's parameters, with quantised ones widened."""
    return max(_parameter_bytes(with_quantization(config, None), dtype, mesh))


def array_bytes(tree: Any, shardings: Any = None) -> int:
    """Bytes of all arrays of a pytree.

    Shardings, for each array or for whole branches, count the bytes of one device.
    """
    if shardings is None:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    def shard_bytes(sharding: NamedSharding, branch: Any) -> int:
        return sum(
            math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(branch)
        )

    return sum(jax.tree.leaves(jax.tree.map(shard_bytes, shardings, tree)))


def _parameter_bytes(config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype, mesh: Mesh | None) -> list[int]:
    shapes = _parameter_shapes(spread(config, mesh))
    if mesh is not None:
        specs = nnx.traversals.flatten_mapping(parameter_specs(config, mesh))
        shapes = {
            path: NamedSharding(mesh, specs[path]).shard_shape(tuple(shape)) for path, shape in shapes.items()
        }
    return [math.prod(shape) * dtype_of(config, path, dtype).itemsize for path, shape in shapes.items()]


@functools.cache
def _parameter_shapes(config: ModelConfig | DraftHeadConfig) -> Mapping[tuple[str | int, ...], Sequence[int]]:
    leaves = nnx.traversals.flatten_mapping(weights_of(abstract(config)))
    return {path: leaf.shape for path, leaf in leaves.items()}


def _free_bytes(device: Any, sharing: int) -> int | None:
    """Free bytes of a device; ``sharing`` is the number of simulated devices that share a CPU's memory."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    free = _available_bytes() if device.platform == "cpu" else None
    return None if free is None else free // sharing


def _available_bytes() -> int | None:
    """Bytes that Linux can allocate without swapping; None on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    available = kibibytes.get("MemAvailable")
    return None if available is None else int(available.split()[0]) * 1024


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
