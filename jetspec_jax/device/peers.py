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
from jax.sharding import Mesh

_log = logging.getLogger("jetspec_jax")

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
