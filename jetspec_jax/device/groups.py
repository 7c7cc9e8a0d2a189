"""Which devices decode: what callers ask for, as a mesh for each group that has a copy of the model."""

import logging
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jetspec_jax.arguments import Complaints, check_integer
from jetspec_jax.config import ModelConfig
from jetspec_jax.device.mesh import as_mesh, describe_mesh, make_mesh, size_of
from jetspec_jax.device.partition import check_partition
from jetspec_jax.device.processes import check_devices
from pallas_kernels import shards

_log = logging.getLogger("jetspec_jax")

#: One mesh for each copy of a model; None is one device, as JAX chooses it.
Meshes = tuple[Mesh | None, ...]


def meshes_for(
    config: ModelConfig,
    *,
    mesh: Any = None,
    tensor_parallel_size: Any = 1,
    expert_parallel_size: Any = 1,
    data_parallel_size: Any = 1,
) -> Meshes:
    """The meshes that a caller asks for: one that is given, or as many of the first devices as sizes say.

    Args:
        config: The target's geometry.
        mesh: A mesh with the axes "expert" and "tensor", of which one may be missing; or None.
        tensor_parallel_size: Devices of a group that share each expert.
        expert_parallel_size: Parts of a group that have experts of their own; all else is split over both.
        data_parallel_size: Groups, each with a copy of the model.

    Returns:
        One mesh for each group; (None,) where nothing is asked for.

    Raises:
        TypeError: A size is no integer, or the mesh is none.
        ValueError: All else that is wrong, at once: sizes below 1 or beyond the devices, sizes beside a mesh,
            unknown axes, a model that cannot be split so, several groups in several processes.
    """
    sizes = {
        "tensor_parallel_size": tensor_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "data_parallel_size": data_parallel_size,
    }
    complaints = Complaints()
    for name, size in sizes.items():
        with complaints:
            sizes[name] = check_integer(name, size, 1)
    if mesh is not None:
        with complaints:
            if given := [name for name, size in sizes.items() if size != 1]:
                raise ValueError(f"give mesh or {' and '.join(given)}, not both: a mesh has its own sizes")
        with complaints:
            mesh = as_mesh(mesh)
            check_partition(config, mesh)
        complaints.raise_all()
        return (mesh,)
    complaints.raise_all()
    tensor, expert, data = sizes.values()
    there, processes = list(jax.devices()), jax.process_count()
    if tensor * expert * data == 1:
        return (None,)
    with complaints:
        if tensor * expert * data > len(there):
            raise ValueError(_too_few(config, tensor, expert, data, there))
    with complaints:
        if data > 1 and processes > 1:
            raise ValueError(
                f"data_parallel_size {data} in {processes} processes: groups share one queue in one "
                "process; start one job per host behind one balancer instead"
            )
    with complaints:
        check_partition(config, _shape(tensor, expert))
    size = tensor * expert
    if processes > 1 and size <= len(there):
        with complaints:
            check_devices(make_mesh(tensor, expert, devices=there))
    complaints.raise_all()
    return tuple(
        make_mesh(tensor, expert, devices=there[first : first + size])
        for first in range(0, data * size, size)
    )


def say_unused(meshes: Meshes) -> None:
    """Logs how many of the visible devices decode, where sizes name fewer than there are."""
    used, there = sum(map(size_of, meshes)), len(jax.devices())
    if meshes != (None,) and used < there:
        _log.warning("decoding on the first %d of %d devices", used, there)


def describe_meshes(meshes: Meshes) -> str:
    """Groups of devices in words."""
    return " and ".join(map(describe_mesh, meshes))


def _shape(tensor: int, expert: int) -> AbstractMesh:
    """A mesh of sizes alone, for which there need be no devices."""
    by_axis = {shards.EXPERT: expert, shards.TENSOR: tensor}
    return AbstractMesh(tuple(by_axis[axis] for axis in shards.ALL), shards.ALL)


def _too_few(config: ModelConfig, tensor: int, expert: int, data: int, devices: list[Any]) -> str:
    """What is said of sizes beyond the devices, with those that are possible instead."""
    there = len(devices)
    everybody = {device.process_index for device in devices}
    possible = [
        f"{t} x {e} x {d}"
        for d in range(1, there + 1)
        for e in range(1, there // d + 1)
        for t in range(1, there // (e * d) + 1)
        if data % d == 0 and expert % e == 0 and _splits(config, t, e)
        # One queue is one process's, and every process needs a device.
        if len(everybody) == 1
        or (d == 1 and {device.process_index for device in devices[: t * e]} == everybody)
    ]
    return (
        f"tensor_parallel_size {tensor} x expert_parallel_size {expert} x data_parallel_size {data} needs "
        f"{tensor * expert * data} devices, and there are {there}; possible: {', '.join(possible)}"
    )


def _splits(config: ModelConfig, tensor: int, expert: int) -> bool:
    try:
        check_partition(config, _shape(tensor, expert))
    except ValueError:
        return False
    return True
