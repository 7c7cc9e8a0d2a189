"""Orbax folders: the parameters as chunks that each device of a mesh reads its part of.

Storage is zarr3 in OCDBT, compressed, in chunks of at most `CHUNK_BYTES` that split a parameter's longest
axis. Arrays are written and read one by one, so that either needs little memory besides the weights.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from convert.folders import MANIFEST, Checkpoint, locate
from jetspec_jax import __version__
from jetspec_jax.checkpoint.content import CheckpointError, read_object
from jetspec_jax.checkpoint.files import new_folder, write_files
from jetspec_jax.checkpoint.finite import is_finite
from jetspec_jax.checkpoint.reading import put
from jetspec_jax.checkpoint.tensor_plan import FILE_DTYPES, expected_parameters
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights

FORMAT = "jetspec-jax orbax"
VERSION = 1
WEIGHTS = "weights"

CHUNK_BYTES = 4 * 2**20


def write_orbax(folder: str | Path, kind: str, config_files: Mapping[str, bytes], weights: Weights) -> None:
    """Writes an Orbax folder, whole or not at all.

    Args:
        folder: Where to; it must not exist yet.
        kind: "target" or "draft head".
        config_files: ``config.json`` and the tokenizer's files.
        weights: The parameters, as NumPy arrays.

    Raises:
        FileExistsError: The folder exists.
        OSError: The disk is full, or cannot be written.
    """
    manifest = {"format": FORMAT, "version": VERSION, "kind": kind, "jetspec_jax": __version__}
    count = len(jax.tree.leaves(weights))
    with (
        new_folder(Path(folder)) as partial,
        _bar(f"writing {Path(folder).name}", count) as bar,
        _checkpointer(bar) as checkpointer,
    ):
        arguments = ocp.args.PyTreeSave(
            weights, save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), weights)
        )
        try:
            with _quiet():
                checkpointer.save((partial / WEIGHTS).absolute(), args=arguments)
        except (ValueError, RuntimeError) as error:  # how Orbax's storage library reports a failed write
            raise OSError(f"{folder} cannot be written: {_first_line(error)}") from error
        write_files(partial, {**config_files, MANIFEST: json.dumps(manifest, indent=2) + "\n"})


def read_orbax(folder: str | Path | Checkpoint, shardings: Any = None) -> Weights:
    """Reads the parameters of an Orbax folder, each in the type that it is stored in.

    Args:
        folder: What `write_orbax` wrote, or what `locate` found it to be.
        shardings: Where the parameters go: a `jax.sharding.Sharding` for each, in the structure of the
            weights. Each device reads the chunks that its part lies in. None gives NumPy arrays on the host.

    Raises:
        FileNotFoundError: There is no such folder.
        CheckpointError: It is no whole Orbax folder, or one of another version, or its parameters are not its
            config's (all that differ are listed), or not finite, or they cannot be read.
        ValueError: It is a Hugging Face folder.
    """
    checkpoint = locate(folder)
    folder = checkpoint.folder
    if checkpoint.layout != "orbax":
        raise ValueError(f"{folder} is a Hugging Face folder; an Orbax folder holds {MANIFEST}")
    check_manifest(checkpoint)
    place = (checkpoint.folder / WEIGHTS).absolute()
    if not place.is_dir():
        raise CheckpointError(f"{folder} has no {WEIGHTS}/, so it is no whole Orbax folder")
    # Arrays of a mesh are read side by side, so there is nothing to count.
    count = len(expected_parameters(checkpoint.config)) if shardings is None else None
    with _bar(f"loading {checkpoint.folder.name}", count) as bar, _checkpointer(bar) as checkpointer:
        with _reading(place):
            metadata = checkpointer.metadata(place)
        if metadata.item_metadata is None:
            raise CheckpointError(f"{place} cannot be read: what it holds is not listed")
        with _reading(place):
            stored = _stored(metadata)
        item = _abstract(stored, checkpoint.config, where=str(folder))
        if shardings is None:
            restore = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        else:
            restore = jax.tree.map(
                lambda _, sharding: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding),
                item,
                shardings,
            )
        with _reading(place):
            arguments = ocp.args.PyTreeRestore(item=item, restore_args=restore)
            weights = checkpointer.restore(place, args=arguments)
    if not checkpoint.allow_nonfinite:
        _check_finite(weights, where=str(folder))
    return weights


def check_manifest(checkpoint: Checkpoint) -> None:
    """Checks that an Orbax folder is of the version that is read here, and of the kind of its config.

    Raises:
        CheckpointError: It is not.
    """
    path = checkpoint.folder / MANIFEST
    manifest = read_object(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: the format is {manifest.get('format')!r}, not {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {manifest.get('version')!r} of the format, written by jetspec_jax "
            f"{manifest.get('jetspec_jax')}; this is {__version__}, which reads version {VERSION}"
        )
    if manifest.get("kind") != checkpoint.kind:
        raise CheckpointError(
            f"{path} says that this is a {manifest.get('kind')}, config.json that it is a {checkpoint.kind}"
        )


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


def _check_finite(weights: Weights, where: str) -> None:
    """Names the parameters that are not finite; of a mesh's arrays each process looks at its own parts."""
    wrong = []
    for path, value in nnx.traversals.flatten_mapping(weights).items():
        on_mesh = isinstance(value, jax.Array)
        parts = [shard.data for shard in value.addressable_shards] if on_mesh else [value]
        if not all(is_finite(np.asarray(part)) for part in parts):
            wrong.append(".".join(map(str, path)))
    if wrong:
        raise CheckpointError(f"{where}/{WEIGHTS}: values that are not finite, in {wrong}")


def _stored(metadata: Any) -> dict[str, Any]:
    """Shape and type of every stored array, by its dotted path."""
    tree = metadata.item_metadata.tree
    flat = nnx.traversals.flatten_mapping(tree)
    return {".".join(map(str, path)): leaf for path, leaf in flat.items()}


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


def _checkpointer(bar: tqdm) -> ocp.Checkpointer:
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()), (np.ndarray, _OneByOne(bar))
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=registry)
    )


def _bar(text: str, count: int | None) -> tqdm:
    # Small checkpoints are there before a bar could be read.
    return tqdm(total=count, desc=text, unit=" parameters", delay=1, leave=False, disable=count is None)


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Names what could not be read, whatever the storage library raises."""
    try:
        with _quiet():
            yield
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place} cannot be read: {_first_line(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from logging, with a traceback, what is raised all the same."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
