"""The arrays of an Orbax folder: written one at a time, read in parts, and checked against the config.

This module needs orbax-checkpoint, an extra; `jetspec_jax.checkpoint.orbax` can be imported without it.
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

#: Bytes of the table of chunks that are cached in memory.
TABLE_BYTES = 100 * 2**20


@dataclass(frozen=True)
class StoredArray:
    """An array of an Orbax folder; indexing by slices reads the chunks that contain them, without caching.

    All arrays of a folder share the table of chunks in ``context``.
    """

    place: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    context: ts.Context

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads a part; ``...`` reads all."""
        base = {"driver": "file", "path": f"{self.place}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{self.name}/", "cache_pool": "cache_pool#table"}
        # By default, a missing chunk would be read as zeros.
        spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
        with _reading(self.place):
            stored = ts.open(ts.Spec(spec), open=True, read=True, context=self.context).result()
            return stored[index].read().result()


def open_arrays(place: Path, config: ModelConfig | DraftHeadConfig) -> dict[ParameterPath, StoredArray]:
    """The unread arrays of a config's parameters in an Orbax checkpoint; an error lists all differences."""
    with open_checkpointer() as checkpointer, _reading(place):
        metadata = checkpointer.metadata(place)
    if metadata.item_metadata is None:
        raise CheckpointError(f"{place} cannot be read: it has no list of arrays")
    stored = stored_arrays(metadata)
    _check(stored, config, where=str(place.parent))
    context = ts.Context({"cache_pool": {}, "cache_pool#table": {"total_bytes_limit": TABLE_BYTES}})
    return {
        parameter.path: StoredArray(
            place, parameter.name, parameter.shape, np.dtype(stored[parameter.name].dtype), context
        )
        for parameter in expected_parameters(config)
    }


def stored_arrays(metadata: Any) -> dict[str, Any]:
    """Metadata (shape and type) of every stored array, by dotted path."""
    flat = nnx.traversals.flatten_mapping(metadata.item_metadata.tree)
    return {".".join(map(str, path)): leaf for path, leaf in flat.items()}


def open_checkpointer(bar: tqdm | None = None) -> ocp.Checkpointer:
    """Orbax's checkpointer, set up to write arrays one at a time and to count them on a progress bar."""
    one_by_one = _OneByOne(bar)
    registry = ocp.type_handlers.create_type_handler_registry(
        # There are no JAX arrays, but Orbax warns if no handler is registered for them.
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (np.ndarray, one_by_one),
        (Unread, one_by_one),
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=registry)
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Orbax from logging errors with a traceback that it also raises."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def first_line(error: Exception) -> str:
    """The first line of a storage library's error, which can be pages long."""
    return str(error).partition("\n")[0]


def _check(stored: Mapping[str, Any], config: ModelConfig | DraftHeadConfig, where: str) -> None:
    expected = {parameter.name: parameter for parameter in expected_parameters(config)}
    wrong = [f"missing: {name}" for name in sorted(expected.keys() - stored.keys())]
    wrong += [f"surplus: {name}" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(expected.keys() & stored.keys()):
        shape, dtype = tuple(stored[name].shape), stored[name].dtype
        if shape != expected[name].shape:
            wrong.append(f"misshapen: {name} is {list(shape)}, expected {list(expected[name].shape)}")
        if dtype not in stored_types(config, expected[name].path):
            wrong.append(f"unsupported type: {name} is {dtype}")
    if wrong:
        raise CheckpointError(f"{where} does not hold the parameters of its config:\n  " + "\n  ".join(wrong))


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of NumPy arrays, changed to make and write one array at a time.

    Orbax's handler copies all arrays first and encodes them at once, which takes twice the memory of the
    weights in addition. This handler makes one array, passes it to Orbax, and waits until it is on disk. So
    no write is pending when an array fails.
    """

    def __init__(self, bar: tqdm | None):
        super().__init__(deepcopy_host_arrays=False)
        self._bar = bar

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return [found for info in infos for found in await super(_OneByOne, self).metadata([info])]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for i, value in enumerate(values):
            array, arg = np.asarray(value), None if args is None else args[i : i + 1]
            for written in await super().serialize([array], infos[i : i + 1], arg):
                written.result()
            del array
            if self._bar is not None:
                self._bar.update()
        return []


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Converts errors of the storage libraries into `CheckpointError`."""
    try:
        with quiet():
            yield
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place} cannot be read: {first_line(error)}") from error
