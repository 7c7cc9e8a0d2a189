"""Meshes for decoding: the devices that share a model, and programs that run on all of them.

A mesh has the axes of `pallas_kernels.shards`: routed experts are sharded by number over "expert" and by
features over "tensor"; everything else is sharded over both together.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jetspec_jax.arguments import check_integer, check_type
from pallas_kernels import shards

#: Replication: the whole array on every device.
WHOLE = PartitionSpec()
P = ParamSpec("P")
T = TypeVar("T")


def without_mesh(function: Callable[P, T]) -> Callable[P, T]:
    """The function, run as if its caller had set no mesh by `jax.set_mesh`.

    Arrays and programs of this package name their meshes; under a caller's mesh their types would differ.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **settings: P.kwargs) -> T:
        try:
            context = jax.set_mesh(None)
        except ValueError as error:
            name = function.__qualname__.removesuffix(".__init__")
            raise TypeError(
                f"{name} cannot be traced, as by jax.jit: it runs programs of its own; a TreeDecoder can be"
            ) from error
        with context:
            return function(*arguments, **settings)

    return run


def make_mesh(
    tensor_parallel_size: int = 1, expert_parallel_size: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of the first devices.

    Args:
        tensor_parallel_size: Devices that share each expert.
        expert_parallel_size: Groups of devices with different experts.
        devices: The available devices; None means those of all processes.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, or there are too few devices.
    """
    tensor = check_integer("tensor_parallel_size", tensor_parallel_size, 1)
    expert = check_integer("expert_parallel_size", expert_parallel_size, 1)
    there = list(jax.devices() if devices is None else devices)
    count = tensor * expert
    if count > len(there):
        possible = [f"{t} x {e}" for e in _divisors(expert) for t in range(1, len(there) // e + 1)]
        raise ValueError(
            f"tensor_parallel_size {tensor} x expert_parallel_size {expert} needs {count} devices, and there "
            f"are {len(there)}; possible: {', '.join(possible)}"
        )
    return _mesh(np.asarray(there[:count], object).reshape(expert, tensor))


def as_mesh(mesh: object) -> Mesh:
    """A mesh of the same devices with both axes in standard order, whose axis types are `AxisType.Auto`."""
    check_type("mesh", mesh, Mesh, "a jax.sharding.Mesh")
    assert isinstance(mesh, Mesh)
    if unknown := [axis for axis in mesh.axis_names if axis not in shards.ALL]:
        raise ValueError(f"mesh has the axes {unknown}; only {' and '.join(shards.ALL)} are known")
    present = [axis for axis in shards.ALL if axis in mesh.axis_names]
    devices = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in present])
    return _mesh(devices.reshape([mesh.shape.get(axis, 1) for axis in shards.ALL]))


def everywhere(
    mesh: Mesh | AbstractMesh, function: Callable[..., Any], in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """A function that each device of a mesh runs on its shards of the arguments (`jax.shard_map`)."""
    # JAX's check of values that vary over devices does not support the kernels.
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)


def on_all_devices(mesh: Mesh | None, array: np.ndarray) -> jax.Array:
    """A host array replicated on every device of a mesh; every process must have the array."""
    if mesh is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, WHOLE), lambda part: array[part])


def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    """An array's shape, type and placement, for which programs are compiled as for the array."""
    sharding = array.sharding if array.committed else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=array.weak_type)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The shardings of a pytree of specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _mesh(devices: np.ndarray) -> Mesh:
    return Mesh(devices, shards.ALL, axis_types=(AxisType.Auto,) * len(shards.ALL))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def describe_mesh(mesh: Mesh | None) -> str:
    """A description of a mesh."""
    if mesh is None:
        return "one device"
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"a mesh of {sizes} (devices {', '.join(str(device.id) for device in mesh.devices.flat)})"


def size_of(mesh: Mesh | AbstractMesh | None) -> int:
    """The number of devices that share a model; axes of training do not count."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in shards.ALL)
