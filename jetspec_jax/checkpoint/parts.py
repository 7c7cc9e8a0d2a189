"""Parameters on a mesh: each device's shard is made from the rows of a checkpoint's tensors that it needs.

The host holds at most two shards: it makes one while the previous one is sent.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jetspec_jax.checkpoint.tensor_plan import Parameter, ParameterPath, StoredParameter, expected_parameters
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.device.mesh import size_of
from jetspec_jax.device.partition import channel_order, parameter_specs, ranges, spread
from jetspec_jax.models import Weights, abstract, weights_of
from jetspec_jax.models.key_table import ShardRows
from jetspec_jax.models.quantized import BLOCKS, VALUES, stored_in_order
from jetspec_jax.progress import unseen


class Part(NamedTuple):
    """A shard of a parameter, and the devices that have it."""

    rows: ShardRows
    shape: tuple[int, ...]
    devices: tuple[Any, ...]


class Placement:
    """The placement of a model's parameters on a mesh."""

    def __init__(self, config: ModelConfig | DraftHeadConfig, mesh: Mesh):
        self.mesh, self._layers = mesh, config if isinstance(config, ModelConfig) else config.layers
        self._sent: list[jax.Array] = []
        self._specs: Mapping[ParameterPath, PartitionSpec] = nnx.traversals.flatten_mapping(
            parameter_specs(config, mesh)
        )
        flat = nnx.traversals.flatten_mapping(weights_of(abstract(spread(config, mesh))))
        self._shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}

    def sharding(self, parameter: Parameter) -> NamedSharding:
        """A parameter's sharding."""
        return NamedSharding(self.mesh, self._specs[parameter.path])

    def parts(self, parameter: Parameter) -> list[Part]:
        """The shards of a parameter on the devices of all processes."""
        shape = self._shapes[parameter.path]
        by_bounds: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in self.sharding(parameter).devices_indices_map(shape).items():
            assert index is not None
            bounds = tuple(
                axis_index.indices(size)[:2] for axis_index, size in zip(index, shape, strict=True)
            )
            by_bounds.setdefault(bounds, []).append(device)
        return [
            Part(
                self._shard_rows(parameter, bounds),
                tuple(stop - start for start, stop in bounds),
                tuple(devices),
            )
            for bounds, devices in by_bounds.items()
        ]

    def local_parts(self, parameter: Parameter) -> list[Part]:
        """The shards of a parameter on the devices of this process."""
        process = jax.process_index()
        found = []
        for part in self.parts(parameter):
            devices = tuple(device for device in part.devices if device.process_index == process)
            found += [part._replace(devices=devices)] if devices else []
        return found

    def put(
        self, parameter: Parameter, make: Callable[[ShardRows, tuple[int, ...]], np.ndarray]
    ) -> jax.Array:
        """Puts a parameter on this process's devices shard by shard; the last transfers may be pending."""
        shape, sharding = self._shapes[parameter.path], self.sharding(parameter)
        arrays: dict[Any, jax.Array] = {}
        for part in self.local_parts(parameter):
            values = make(part.rows, part.shape)
            # Frees the previous shard's host memory before the next shard is made.
            jax.block_until_ready(self._sent)
            self._sent = [jax.device_put(values, device) for device in part.devices]
            arrays |= zip(part.devices, self._sent, strict=True)
            del values
        ordered = [arrays[device] for device in sharding.addressable_devices_indices_map(shape)]
        whole = jax.make_array_from_single_device_arrays(shape, sharding, ordered)
        return stored_in_order(whole, parameter.order)

    def _shard_rows(self, parameter: Parameter, bounds: Sequence[tuple[int, int]]) -> ShardRows:
        rows, sizes, repeats = [], [], []
        placed = self._shapes[parameter.path]
        block = parameter.block or (1,) * len(placed)
        values = self._shapes[(*parameter.path[:-1], VALUES)] if parameter.block else placed
        for axis, (name, (start, stop)) in enumerate(zip(parameter.axes, bounds, strict=True)):
            # For scales, `row` is the first value of each block.
            row, size, repeat = block[axis] * np.arange(start, stop), values[axis], 1
            if name == "vocab":
                size = parameter.shape[axis]
                row = np.where(row < size, row, -1)
            elif name == "kv_heads":
                repeat = placed[axis] // parameter.shape[axis]
            elif name.removesuffix(BLOCKS) == "channels" and stop - start < placed[axis]:
                layer: Any = parameter.path[1]
                recurrence = self._layers.layers[layer].recurrence
                assert recurrence is not None
                row = channel_order(recurrence, size_of(self.mesh))[:: block[axis]][start:stop]
            rows.append(row)
            sizes.append(size)
            repeats.append(repeat)
        return ShardRows(tuple(rows), tuple(sizes), tuple(repeats))


@runtime_checkable
class Parameters(Protocol):
    """The parameters of an opened checkpoint; everything but their values has been checked."""

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        ...

    @property
    def parameters(self) -> Sequence[Parameter]:
        """All parameters."""
        ...

    @property
    def dtypes(self) -> Mapping[ParameterPath, np.dtype]:
        """The type in which each parameter is read."""
        ...

    def read(
        self, parameter: Parameter, rows: ShardRows | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Reads a parameter, or a device's shard of it."""
        ...


def to_devices(parameters: Parameters, placement: Placement | None) -> Weights:
    """Reads parameters one by one onto their devices; without a placement, onto the default device."""
    weights: dict[ParameterPath, jax.Array] = {}
    sent = None
    text, hidden = f"loading {parameters.folder.name}", unseen()
    # The delay hides the bar for small checkpoints.
    bar = tqdm(parameters.parameters, desc=text, unit=" parameters", delay=1, disable=hidden, leave=False)
    for parameter in bar:
        read = functools.partial(parameters.read, parameter)
        if placement is None:
            values = read()
            jax.block_until_ready(sent)
            weights[parameter.path] = sent = stored_in_order(jnp.asarray(values), parameter.order)
            del values
        else:
            weights[parameter.path] = placement.put(parameter, read)
    return nnx.traversals.unflatten_mapping(weights)


def place(weights: Weights, config: ModelConfig | DraftHeadConfig, mesh: Mesh) -> Weights:
    """Places whole weights on a mesh, with the same result as `read_weights`."""
    placement, placed = Placement(config, mesh), dict(nnx.traversals.flatten_mapping(weights))
    for parameter in expected_parameters(config):
        make = functools.partial(part_of, parameter, np.asarray(placed[parameter.path]))
        placed[parameter.path] = placement.put(parameter, make)
    return nnx.traversals.unflatten_mapping(placed)


def part_of(parameter: Parameter, whole: np.ndarray, rows: ShardRows, shape: tuple[int, ...]) -> np.ndarray:
    """A device's shard of a whole parameter."""
    part = np.empty(shape, whole.dtype)
    for key in parameter.forms[0]:
        if (found := key.of_part(rows)) is not None:
            local, [file_rows] = found
            local.from_file(part, take_rows(key.to_file(whole), file_rows))
    return part


def check_blocks(sources: Iterable[StoredParameter], placement: Placement) -> None:
    """Checks that no shard begins or ends inside an MXFP4 block."""
    found: dict[str, set[int]] = {}
    for parameter, keys in sources:
        for key in (key for key in keys if key.scales):
            for part in placement.parts(parameter):
                try:
                    key.of_part(part.rows)
                except ValueError as error:
                    _, layer, *name = parameter.path
                    assert isinstance(layer, int)
                    found.setdefault(f"{'.'.join(map(str, name))}: {error}", set()).add(layer)
    if found:
        wrong = "; ".join(f"{problem} (layers {ranges(sorted(layers))})" for problem, layers in found.items())
        raise ValueError(
            f"{size_of(placement.mesh)} devices cannot split the weights: {wrong}; "
            "experts can be split by number instead, with expert_parallel_size"
        )


def take_rows(tensor: Any, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Selected rows along each axis of a tensor; no other rows are read.

    Indices may be in any order and repeated; -1 gives zeros. Tensors are indexed by slices.
    """
    runs = [_runs(indices) for indices in rows]
    whole = [slice(0, len(indices)) for indices in rows]
    if [target for axis_runs in runs for target, _ in axis_runs] == whole:
        return np.asarray(tensor[tuple(source for axis_runs in runs for _, source in axis_runs)])
    first = np.asarray(tensor[(slice(0, 1),) * len(rows)])
    out = np.zeros(tuple(map(len, rows)), first.dtype)
    for places in product(*runs):
        block = tensor[tuple(source for _, source in places)]
        out[tuple(target for target, _ in places)] = block
    return out


def _runs(rows: np.ndarray) -> list[tuple[slice, slice]]:
    """Runs of consecutive indices, each as its slice in the result and its slice in the tensor."""
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1), len(rows)]
    found, start = [], 0
    for end in map(int, ends):
        if rows[start] >= 0:
            found.append((slice(start, end), slice(int(rows[start]), int(rows[start]) + end - start)))
        start = end
    return found
