"""Detects whether the GPUs of a host can access each other's memory directly, over NVLink or PCIe.

JAX does not report it, so NVIDIA's driver is queried. The driver reports the hardware's abilities; NCCL may
still use host memory, for example between CPU sockets, which cannot be detected.
"""

import ctypes
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import shards
from pallas_kernels.dispatch import compute_capability
from pallas_kernels.peer_sum import Exchange, exchange_shapes

_log = logging.getLogger("jetspec_jax")

#: The most rows that are summed through an exchange. More are bound by bandwidth, and rare.
MOST_SUMMED_ROWS = 256
#: Whether the first GPU can access the second, by their indices in this process; None if unknown.
Reaches = Callable[[int, int], bool | None]


def say_apart(meshes: Iterable[Mesh | None], reaches: Reaches | None = None) -> None:
    """Warns, once per process, about devices that share a model and communicate through host memory.

    If the access is unknown, nothing is logged.

    Without ``reaches`` the driver is queried.
    """
    ask = reaches or driver_reaches()
    groups = [apart(list(mesh.devices.flat), ask) for mesh in meshes if mesh is not None]
    if found := tuple(device.id for group in groups for device in group):
        _warn_once(found)


def make_exchange(
    mesh: Mesh | None, most: int, dtype: jnp.dtype, reaches: Reaches | None = None
) -> Exchange | None:
    """Memory for sums of at most ``most`` elements, if the devices can write to each other's; else None.

    They must be the first GPUs of the only process: Mosaic takes a device's place in the mesh for its number.
    """
    if mesh is None or mesh.size == 1 or jax.process_count() > 1 or jax.__version_info__ < (0, 11, 2):
        return None
    devices = list(mesh.devices.flat)
    if [device.id for device in devices] != list(range(mesh.size)) or devices[0].platform != "gpu":
        return None
    pairs = itertools.permutations((device.local_hardware_id for device in devices), 2)
    ask = reaches or driver_reaches()
    if (compute_capability() or (0, 0)) < (9, 0) or not all(ask(*pair) for pair in pairs):
        return None
    placed = NamedSharding(mesh, PartitionSpec(shards.ALL))
    shapes = exchange_shapes(mesh.size, most, dtype)
    sizes = [((mesh.size * each.shape[0], *each.shape[1:]), each.dtype) for each in shapes]
    make = jax.jit(lambda: [jnp.zeros(*size) for size in sizes], out_shardings=[placed] * 2)
    # Peers write as soon as their programs run, so it must be there.
    return Exchange(*jax.block_until_ready(make()))


def apart(devices: Sequence[Any], reaches: Reaches) -> list[Any]:
    """The GPUs of this process without direct access to all of the others.

    Devices of other processes are ignored, because they may be on another host.
    """
    local = [d for d in devices if d.platform == "gpu" and d.process_index == jax.process_index()]
    found = {
        device
        for pair in itertools.permutations(local, 2)
        if reaches(*(device.local_hardware_id for device in pair)) is False
        for device in pair
    }
    return [device for device in local if device in found]


@functools.cache
def _warn_once(ids: tuple[int, ...]) -> None:
    _log.warning(
        "devices %s do not reach each other directly: their sums go through the host's memory, several times "
        "more slowly. Use the smallest tensor-parallel size that fits; copies of the model (data parallel) "
        "are likely to be faster",
        ", ".join(map(str, ids)),
    )


@functools.cache
def driver_reaches() -> Reaches:
    """The test by NVIDIA's driver; the result is always None if the driver is missing."""
    try:
        return reaches_by(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return lambda first, second: None


def reaches_by(driver: Any) -> Reaches:
    """The test by a library with the functions of CUDA's driver.

    It has the same GPU indices as JAX, because both respect CUDA_VISIBLE_DEVICES.
    """
    known = driver.cuInit(0) == 0

    def reaches(first: int, second: int) -> bool | None:
        handles, can = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
        numbered = zip(handles, (first, second), strict=True)
        if not known or any(driver.cuDeviceGet(ctypes.byref(handle), number) for handle, number in numbered):
            return None
        failed = driver.cuDeviceCanAccessPeer(ctypes.byref(can), *handles)
        return None if failed else bool(can.value)

    return reaches
