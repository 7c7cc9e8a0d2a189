"""The arrays of an Orbax folder: written one by one, read in parts; and the checks of what is stored.

Whoever imports this has orbax-checkpoint, which is an extra; `jetspec_jax.checkpoint.orbax` does without.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import nnx
from tqdm import tqdm

from jetspec_jax.checkpoint.content import CheckpointError
from jetspec_jax.checkpoint.tensor_plan import ParameterPath, expected_parameters, stored_types
from jetspec_jax.checkpoint.unread import Unread
from jetspec_jax.config import DraftHeadConfig, ModelConfig

#: Bytes of the table of chunks that are kept in memory.
TABLE_BYTES = 100 * 2**20


@dataclass(frozen=True)
class StoredArray:
    """An array of an Orbax folder: indexed by slices, it reads the chunks that these lie in, each time anew.

    Attributes:
        place: The Orbax checkpoint.
        name: The array's dotted path.
        shape: Its shape.
        dtype: The type that it is stored in.
        context: What arrays of one folder share: their table of chunks.
    """

    place: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    context: ts.Context

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads a part; ``...`` is all.

        Raises:
            CheckpointError: It cannot be read.
        """
        base = {"driver": "file", "path": f"{self.place}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{self.name}/", "cache_pool": "cache_pool#table"}
        # Left to itself it takes a chunk that is not there for one of zeros.
        spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
        with _reading(self.place):
            stored = ts.open(ts.Spec(spec), open=True, read=True, context=self.context).result()
            return stored[index].read().result()


def open_arrays(place: Path, config: ModelConfig | DraftHeadConfig) -> dict[ParameterPath, StoredArray]:
    """The arrays of a config's parameters, none of them read.

    Args:
        place: An Orbax checkpoint.
        config: What it should hold.

    Raises:
        CheckpointError: The parameters are not the config's (all that differ are listed), or cannot be read.
    """
    with progress("", None) as bar, open_checkpointer(bar) as checkpointer:
        stored = _stored_in(checkpointer, place)
    _check(stored, config, where=str(place.parent))
    context = ts.Context({"cache_pool": {}, "cache_pool#table": {"total_bytes_limit": TABLE_BYTES}})
    return {
        parameter.path: StoredArray(
            place, parameter.name, parameter.shape, np.dtype(stored[parameter.name].dtype), context
        )
        for parameter in expected_parameters(config)
    }


def stored_arrays(metadata: Any) -> dict[str, Any]:
    """Shape and type of every stored array, by its dotted path."""
    tree = metadata.item_metadata.tree
    flat = nnx.traversals.flatten_mapping(tree)
    return {".".join(map(str, path)): leaf for path, leaf in flat.items()}


def open_checkpointer(bar: tqdm) -> ocp.Checkpointer:
    """Orbax's checkpointer, which writes arrays one by one and counts them on a bar."""
    one_by_one = _OneByOne(bar)
    registry = ocp.type_handlers.create_type_handler_registry(
        # Of JAX's arrays there are none, but Orbax warns where nothing handles them.
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (np.ndarray, one_by_one),
        (Unread, one_by_one),
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


def _check(stored: Mapping[str, Any], config: ModelConfig | DraftHeadConfig, where: str) -> None:
    """Raises CheckpointError where names, shapes or types are not the config's."""
    wanted = {parameter.name: parameter for parameter in expected_parameters(config)}
    wrong = [f"missing: {name}" for name in sorted(wanted.keys() - stored.keys())]
    wrong += [f"surplus: {name}" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        shape, dtype = tuple(stored[name].shape), stored[name].dtype
        if shape != wanted[name].shape:
            wrong.append(f"misshapen: {name} is {list(shape)}, expected {list(wanted[name].shape)}")
        if dtype not in stored_types(config, wanted[name].path):
            wrong.append(f"unsupported type: {name} is {dtype}")
    if wrong:
        raise CheckpointError(f"{where} does not hold the parameters of its config:\n  " + "\n  ".join(wrong))


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of NumPy arrays, except that it makes and writes one after the other.

    Left to itself it copies all arrays before it writes, then encodes all at once, which takes two more times
    the memory of the weights. This one makes an array of what stands in its place, gives it to Orbax, waits
    until that is on the disk, and goes on. So nothing is under way either when an array fails.
    """

    def __init__(self, bar: tqdm):
        super().__init__(deepcopy_host_arrays=False)
        self._bar = bar

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return [found for info in infos for found in await super(_OneByOne, self).metadata([info])]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for i, value in enumerate(values):
            array, own = np.asarray(value), None if args is None else args[i : i + 1]
            for written in await super().serialize([array], infos[i : i + 1], own):
                written.result()
            del array
            self._bar.update()
        return []


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Names what could not be read, whatever the storage library raises."""
    try:
        with quiet():
            yield
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place} cannot be read: {first_line(error)}") from error
