"""Groups of devices, one for each copy of a model, from a caller's parallel sizes or mesh."""

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

#: One mesh for each copy of a model; None means JAX's default device.
Meshes = tuple[Mesh | None, ...]


def meshes_for(
    config: ModelConfig,
    *,
    mesh: Any = None,
    tensor_parallel_size: Any = 1,
    expert_parallel_size: Any = 1,
    data_parallel_size: Any = 1,
) -> Meshes:
    """One mesh for each copy of a model, (None,) for one device: the given mesh or the first devices.

    Devices of ``tensor_parallel_size`` share each expert. ``expert_parallel_size`` groups of devices have
    different experts; everything else is sharded over all devices of both sizes.

    Raises:
        TypeError: A size is not an integer, or the mesh is not a mesh.
        ValueError: A size is below 1 or exceeds the devices, sizes are given together with a mesh, an axis is
            unknown, the model cannot be sharded so, or there are several copies in several processes. All
            problems are reported together.
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
                f"data_parallel_size {data} in {processes} processes: groups are served by one "
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
    """Logs a warning if only some of the visible devices are used."""
    used, there = sum(map(size_of, meshes)), len(jax.devices())
    if meshes != (None,) and used < there:
        _log.warning("decoding on the first %d of %d devices", used, there)


def describe_meshes(meshes: Meshes) -> str:
    """A description of groups of devices."""
    return " and ".join(map(describe_mesh, meshes))


def _shape(tensor: int, expert: int) -> AbstractMesh:
    """An abstract mesh of these sizes, without devices."""
    by_axis = {shards.EXPERT: expert, shards.TENSOR: tensor}
    return AbstractMesh(tuple(by_axis[axis] for axis in shards.ALL), shards.ALL)


def _too_few(config: ModelConfig, tensor: int, expert: int, data: int, devices: list[Any]) -> str:
    """The error for sizes that exceed the devices, with the possible sizes."""
    there = len(devices)
    everybody = {device.process_index for device in devices}
    possible = [
        f"{t} x {e} x {d}"
        for d in range(1, there + 1)
        for e in range(1, there // d + 1)
        for t in range(1, there // (e * d) + 1)
        if data % d == 0 and expert % e == 0 and _splits(config, t, e)
        # One process serves all copies, and each process needs a device.
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
