"""Whether the GPUs of a host reach each other's memory directly, over NVLink or PCIe.

JAX does not say, so NVIDIA's driver is asked. It knows what the hardware can do; that NCCL chooses the host's
memory all the same, as between sockets, nobody is told.
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

#: Whether the first GPU reaches the second, by their numbers in this process; None where nobody can say.
Reaches = Callable[[int, int], bool | None]


def say_apart(meshes: Iterable[Mesh | None], reaches: Reaches | None = None) -> None:
    """Logs, once in a process, which devices that share a model exchange all they sum through the host.

    Nothing is said where nobody can tell: a wrong warning is worse than none.

    Args:
        meshes: The devices of each copy; None is one device.
        reaches: None asks the driver.
    """
    ask = reaches or driver_reaches()
    groups = [apart(list(mesh.devices.flat), ask) for mesh in meshes if mesh is not None]
    if found := tuple(device.id for group in groups for device in group):
        _say(found)


def apart(devices: Sequence[Any], reaches: Reaches) -> list[Any]:
    """Those GPUs of this process that do not reach each of the others directly.

    Devices of other processes are left out: they may be those of another host.
    """
    own = [d for d in devices if d.platform == "gpu" and d.process_index == jax.process_index()]
    found = {
        device
        for pair in itertools.permutations(own, 2)
        if reaches(*(device.local_hardware_id for device in pair)) is False
        for device in pair
    }
    return [device for device in own if device in found]


@functools.cache
def _say(ids: tuple[int, ...]) -> None:
    _log.warning(
        "devices %s do not reach each other directly: what they sum goes through the host's memory, several "
        "times more slowly. Let as few devices share a model as hold it; copies of it (data parallel) are "
        "likely to be faster",
        ", ".join(map(str, ids)),
    )


@functools.cache
def driver_reaches() -> Reaches:
    """What the driver says; it knows nothing where it is not NVIDIA's, or is not there."""
    try:
        return reaches_by(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return lambda first, second: None


def reaches_by(driver: Any) -> Reaches:
    """What a library with the functions of CUDA's driver says.

    It counts GPUs as JAX does, for both see what CUDA_VISIBLE_DEVICES leaves of them.
    """
    known = driver.cuInit(0) == 0

    def reaches(first: int, second: int) -> bool | None:
        handles, can = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
        numbered = zip(handles, (first, second), strict=True)
        if not known or any(driver.cuDeviceGet(ctypes.byref(own), number) for own, number in numbered):
            return None
        failed = driver.cuDeviceCanAccessPeer(ctypes.byref(can), *handles)
        return None if failed else bool(can.value)

    return reaches
