"""The arrays of an Orbax folder, one parameter after the other, and the checks of what is stored.

Whoever imports this has orbax-checkpoint, which is an extra; `jetspec_jax.checkpoint.orbax` does without.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from jetspec_jax.checkpoint.content import CheckpointError
from jetspec_jax.checkpoint.reading import put
from jetspec_jax.checkpoint.tensor_plan import FILE_DTYPES, expected_parameters
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights


def restore(place: Path, config: ModelConfig | DraftHeadConfig, shardings: Any = None) -> Weights:
    """Reads the parameters of a config, each in the type that it is stored in.

    Args:
        place: An Orbax checkpoint.
        config: What it should hold.
        shardings: Where the parameters go, see `jetspec_jax.checkpoint.orbax.read_orbax`.

    Raises:
        ValueError: The parameters are not the config's (all that differ are listed), or cannot be read.
    """
    # Arrays of a mesh are read side by side, so there is nothing to count.
    count = len(expected_parameters(config)) if shardings is None else None
    with progress(f"loading {place.parent.name}", count) as bar, open_checkpointer(bar) as checkpointer:
        item = _abstract(_stored_in(checkpointer, place), config, where=str(place.parent))
        if shardings is None:
            restore = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        else:
            restore = jax.tree.map(
                lambda _, sharding: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding),
                item,
                shardings,
            )
        with _reading(place):
            return checkpointer.restore(place, args=ocp.args.PyTreeRestore(item=item, restore_args=restore))


def check_stored(place: Path, config: ModelConfig | DraftHeadConfig) -> None:
    """Checks names, shapes and types without reading an array.

    Raises:
        ValueError: As for `restore`.
    """
    with progress("", None) as bar, open_checkpointer(bar) as checkpointer:
        _abstract(_stored_in(checkpointer, place), config, where=str(place.parent))


def stored_arrays(metadata: Any) -> dict[str, Any]:
    """Shape and type of every stored array, by its dotted path."""
    tree = metadata.item_metadata.tree
    flat = nnx.traversals.flatten_mapping(tree)
    return {".".join(map(str, path)): leaf for path, leaf in flat.items()}


def open_checkpointer(bar: tqdm) -> ocp.Checkpointer:
    """Orbax's checkpointer, which reads and writes NumPy arrays one by one and counts them on a bar."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()), (np.ndarray, _OneByOne(bar))
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=registry)
    )


def progress(text: str, count: int | None) -> tqdm:
    """A bar of parameters on a terminal; None is no bar."""
    # Small checkpoints are there before a bar could be read.
    hidden = True if count is None else None
    return tqdm(total=count, desc=text, unit=" parameters", delay=1, leave=False, disable=hidden)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Orbax from logging, with a traceback, what is raised all the same."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def first_line(error: Exception) -> str:
    """What the storage library says, without the pages that it adds."""
    return str(error).partition("\n")[0]


def _stored_in(checkpointer: ocp.Checkpointer, place: Path) -> dict[str, Any]:
    with _reading(place):
        metadata = checkpointer.metadata(place)
    if metadata.item_metadata is None:
        raise CheckpointError(f"{place} cannot be read: what it holds is not listed")
    return stored_arrays(metadata)


def _abstract(stored: Mapping[str, Any], config: ModelConfig | DraftHeadConfig, where: str) -> Weights:
    """Shapes and types of the weights to read, once they are known to be the config's."""
    wanted = {parameter.name: parameter for parameter in expected_parameters(config)}
    wrong = [f"missing: {name}" for name in sorted(wanted.keys() - stored.keys())]
    wrong += [f"surplus: {name}" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        shape, dtype = tuple(stored[name].shape), stored[name].dtype
        if shape != wanted[name].shape:
            wrong.append(f"misshapen: {name} is {list(shape)}, expected {list(wanted[name].shape)}")
        if dtype not in FILE_DTYPES.values():
            wrong.append(f"unsupported type: {name} is {dtype}")
    if wrong:
        raise CheckpointError(f"{where} does not hold the parameters of its config:\n  " + "\n  ".join(wrong))
    weights: Weights = {}
    for name, parameter in wanted.items():
        put(weights, parameter.path, jax.ShapeDtypeStruct(parameter.shape, stored[name].dtype))
    return weights


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of NumPy arrays, except that it never holds copies of all of them.

    Left to itself it copies all arrays before it writes, then encodes all at once, which takes two more times
    the memory of the weights. This one gives it an array, waits until that is on the disk, and goes on. So
    nothing is under way either when an array fails.
    """

    def __init__(self, bar: tqdm):
        super().__init__(deepcopy_host_arrays=False)
        self._bar = bar

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return [found for info in infos for found in await super(_OneByOne, self).metadata([info])]

    async def serialize(
        self, values: Sequence[np.ndarray], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for i in range(len(values)):
            for written in await super().serialize(values[i : i + 1], infos[i : i + 1], _part(args, i)):
                written.result()
            self._bar.update()
        return []

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[np.ndarray]:
        values: list[np.ndarray] = []
        for i in range(len(infos)):
            values += await super().deserialize(infos[i : i + 1], _part(args, i))
            self._bar.update()
        return values


def _part(args: Sequence[Any] | None, i: int) -> Sequence[Any] | None:
    return None if args is None else args[i : i + 1]


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Names what could not be read, whatever the storage library raises."""
    try:
        with quiet():
            yield
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place} cannot be read: {first_line(error)}") from error
