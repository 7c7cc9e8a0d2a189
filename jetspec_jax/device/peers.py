"""Whether the GPUs of a host access each other's memory directly, over NVLink or PCIe, and memory for sums.

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

from jetspec_jax.progress import log_once
from pallas_kernels import shards
from pallas_kernels.dispatch import compute_capability
from pallas_kernels.peer_sum import Exchange, exchange_shapes

_log = logging.getLogger("jetspec_jax")

# The most rows that are summed through an exchange. More are bound by bandwidth, and rare.
_MOST_ROWS = 256
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
    mesh: Mesh | None, hidden_size: int, dtype: jnp.dtype, reaches: Reaches | None = None
) -> Exchange | None:
    """Memory for sums of rows of a hidden size over a mesh; None on one device, or if XLA must add up.

    The log says once why XLA must.
    """
    if mesh is None or mesh.size == 1:
        return None
    if (why := why_no_exchange(list(mesh.devices.flat), reaches)) is not None:
        ids = ", ".join(str(device.id) for device in mesh.devices.flat)
        log_once(logging.INFO, f"devices {ids} add up through XLA, which takes longer: {why}")
        return None
    placed = NamedSharding(mesh, PartitionSpec(shards.ALL))
    shapes = exchange_shapes(mesh.size, _MOST_ROWS * hidden_size, dtype)
    sizes = [((mesh.size * each.shape[0], *each.shape[1:]), each.dtype) for each in shapes]
    make = jax.jit(lambda: [jnp.zeros(*size) for size in sizes], out_shardings=[placed] * 2)
    # Peers write as soon as their programs run, so it must be there.
    return Exchange(*jax.block_until_ready(make()))


def why_no_exchange(devices: Sequence[Any], reaches: Reaches | None = None) -> str | None:
    """Why devices cannot add up through each other's memory; None if they can.

    Without ``reaches`` the driver is queried.
    """
    if any(device.platform != "gpu" for device in devices):
        return "not all of them are GPUs"
    if jax.__version_info__ < (0, 11, 2):
        return f"that needs JAX 0.11.2, and this is {jax.__version__}"
    if jax.process_count() > 1:
        return "they belong to several processes"
    if len(kinds := {device.device_kind for device in devices}) > 1:
        return f"they are of several kinds: {', '.join(sorted(kinds))}"
    if (compute_capability() or (0, 0)) < (9, 0):
        return "they are older than Hopper"
    # Mosaic takes a device's place in the mesh for its number.
    if [device.id for device in devices] != list(range(len(devices))):
        return "they are not the first devices of this process"
    ask = reaches or driver_reaches()
    if not all(ask(*pair) for pair in itertools.permutations((d.local_hardware_id for d in devices), 2)):
        return "not all of them reach each other's memory"
    return None


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
