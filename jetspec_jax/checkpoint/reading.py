"""Parameters from safetensors or a GGUF file, by the key table of their module.

All names, shapes and types are checked against the module (`tensor_plan`) before a tensor is read. Then
parameters go one by one from the file to the device. The host holds two at most: it makes one while the one
before is sent. For a mesh a process reads those rows alone that its own devices need, likewise part by part.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jetspec_jax.arguments import shown
from jetspec_jax.checkpoint.content import CheckpointError, content_of, read_object
from jetspec_jax.checkpoint.copying import SMALL, THREADS, Copies, all_finite
from jetspec_jax.checkpoint.files import is_inside
from jetspec_jax.checkpoint.finite import is_finite
from jetspec_jax.checkpoint.gguf.header import is_gguf
from jetspec_jax.checkpoint.gguf.tensors import GgufTensors
from jetspec_jax.checkpoint.parts import Placement, check_blocks, take_rows, to_devices
from jetspec_jax.checkpoint.tensor_file import TensorFile
from jetspec_jax.checkpoint.tensor_plan import (
    TIED,
    Parameter,
    ParameterPath,
    Stored,
    TensorPlan,
    make_plan,
    stored_dtypes,
    untied,
)
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights, dtype_of
from jetspec_jax.models.key_table import Each, Key, ShardRows
from jetspec_jax.models.mxfp4 import check_scales
from jetspec_jax.models.quantized import SCALES
from jetspec_jax.progress import unseen

INDEX = "model.safetensors.index.json"

# Tensors are compared in parts of this size.
_COMPARED_BYTES = 64 * 2**20

_log = logging.getLogger("jetspec_jax")


def read_weights(
    folder: Path,
    config: ModelConfig | DraftHeadConfig,
    dtype: jnp.dtype | None = None,
    mesh: Mesh | None = None,
    *,
    allow_nonfinite: bool = False,
) -> Weights:
    """Reads the parameters of a config's module from a folder of safetensors, or from a GGUF file.

    One line of the log says what else the folder holds, if it does.

    Args:
        folder: The checkpoint.
        config: Its config.
        dtype: The type of all parameters, as far as `dtype_of` lets it; None leaves each in the type that it
            is stored in, likewise.
        mesh: The devices that share them; None is one.
        allow_nonfinite: Whether values may be NaN or infinite.

    Raises:
        CheckpointError: Tensors are missing, surplus, misshapen, stored twice or of a type that is no plain
            float (all are listed); or a file is corrupt; or the weights are pickled; or, without a dtype, one
            parameter is made of tensors of different types; or the head that a config ties to the embedding
            is stored too and differs from it; or values are not finite; or the mesh would cut blocks of MXFP4
            (all layers are listed). On a mesh of several processes each of them finds what its part has.
        FileNotFoundError: There are no weights.
    """
    placement = None if mesh is None else Placement(config, mesh)
    parameters = open_parameters(folder, config, dtype, placement, allow_nonfinite=allow_nonfinite)
    # A second copy of the embedding is compared with it, so it does not count as unread.
    unused = parameters.plan.unused.items()
    if left := [f"{len(names)} ({reason})" for reason, names in unused if reason != TIED.reason]:
        _log.warning("%s: tensors left unread: %s", folder, ", ".join(left))
    return to_devices(parameters, placement)


def read_parameters(
    folder: Path,
    config: ModelConfig | DraftHeadConfig,
    dtype: jnp.dtype | None = None,
    *,
    allow_nonfinite: bool = False,
) -> Iterator[tuple[ParameterPath, np.ndarray]]:
    """Reads parameters one by one, each with its place in the weights, without touching a device.

    Raises:
        CheckpointError: As for `read_weights`; before the first parameter, but for values.
        FileNotFoundError: Likewise.
    """
    parameters = open_parameters(folder, config, dtype, allow_nonfinite=allow_nonfinite)
    for parameter in parameters.counted():
        yield parameter.path, parameters.read(parameter)


def open_parameters(
    folder: Path,
    config: ModelConfig | DraftHeadConfig,
    dtype: jnp.dtype | None = None,
    placement: Placement | None = None,
    *,
    allow_nonfinite: bool = False,
) -> "StoredParameters":
    """The parameters of a folder, to be read in any order; all but their values is checked by then.

    Raises:
        CheckpointError: As for `read_weights`.
        FileNotFoundError: Likewise.
    """
    files, headers = _open(folder)
    plan = headers.plan(config)
    with content_of(folder):
        if placement is not None:
            check_blocks(plan.sources, placement)
        if dtype is None:
            dtypes = stored_dtypes(plan.sources, headers.tensors, headers.where)
        else:
            dtypes = [dtype] * len(plan.sources)
    found = [source.parameter for source in plan.sources]
    types = {
        # Scales, too, stay as they are stored where all do.
        parameter.path: own if dtype is None and parameter.block else dtype_of(config, parameter.path, own)
        for parameter, own in zip(found, dtypes, strict=True)
    }
    parameters = StoredParameters(folder, files, plan, types, placement, allow_nonfinite)
    parameters.check_copies()
    return parameters


@dataclass(frozen=True)
class StoredParameters:
    """The parameters of open files: see `Parameters`.

    Attributes:
        folder: The checkpoint.
        files: Which of them holds each tensor.
        plan: How the tensors make up parameters.
        dtypes: The type that each parameter is read in.
        placement: Where they go; None is one device.
        allow_nonfinite: Whether values may be NaN or infinite.
    """

    folder: Path
    files: Mapping[str, TensorFile | GgufTensors]
    plan: TensorPlan
    dtypes: Mapping[ParameterPath, np.dtype]
    placement: Placement | None
    allow_nonfinite: bool

    @functools.cached_property
    def _keys(self) -> Mapping[ParameterPath, tuple[Key, ...]]:
        return {parameter.path: keys for parameter, keys in self.plan.sources}

    def counted(self) -> Iterable[Parameter]:
        """All parameters, with a bar on a terminal."""
        # Small checkpoints are there before a bar could be read.
        parameters = [parameter for parameter, _ in self.plan.sources]
        text = f"loading {self.folder.name}"
        return tqdm(parameters, desc=text, unit=" parameters", delay=1, disable=unseen(), leave=False)

    def read(
        self, parameter: Parameter, rows: ShardRows | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A parameter, or a device's part of it, for which no other rows are read; see `Parameters`."""
        value = np.empty(parameter.shape if shape is None else shape, self.dtypes[parameter.path])
        with ThreadPoolExecutor(THREADS) as pool:
            threads = None if value.nbytes < SMALL else pool
            copies = [(key, Copies(threads)) for key in self._keys[parameter.path]]
            for key, own in copies:
                with self._naming(key):
                    self._fill(value, key, rows, own.begin)
            for key, own in copies:
                with self._naming(key):
                    own.end()
            if value.dtype == np.uint8:
                if parameter.path[-1] == SCALES:
                    with self._naming(copies[0][0]):
                        check_scales(value)
                return value
            finite = self.allow_nonfinite or all_finite(value, threads)
        if not finite:
            raise CheckpointError(self._nonfinite(parameter, value, rows))
        return value

    def check_copies(self) -> None:
        """Checks that a head that is stored beside the embedding that it is tied to is the same.

        Of a mesh's embedding a process looks at the rows of its own devices.

        Raises:
            CheckpointError: It is not.
        """
        for name, embedding in self.plan.copies:
            [parameter] = [own for own, keys in self.plan.sources if keys[0].name == embedding]
            rows = [np.arange(parameter.shape[0])]
            if self.placement is not None:
                rows = [part.rows.rows[0] for part in self.placement.own_parts(parameter)]
            # Padding, which comes last, is in no file.
            ranges = [(int(own[0]), int(own.max()) + 1) for own in rows if own[0] >= 0]
            if not _equal(name, embedding, self.files, ranges, parameter.shape[1]):
                where = self.files[name].path.name
                raise CheckpointError(f"{self.folder}: {untied(name, embedding)} ({where})")

    def _tensors(self, key: Key, rows: ShardRows | None) -> tuple[Key, list[np.ndarray]] | None:
        """The tensors of an entry as far as rows need them, and the entry of those; None is nothing."""
        if rows is None:
            return key, [np.asarray(self.files[name].tensor(name)) for name in key.names]
        found = key.of_part(rows)
        if found is None:
            return None
        entry, wanted = found
        tensors = [self.files[name].tensor(name) for name in key.names]
        return entry, [take_rows(*each) for each in zip(tensors, wanted, strict=True)]

    def _fill(self, value: np.ndarray, key: Key, rows: ShardRows | None, each: Each) -> None:
        """Fills what an entry is of a parameter, or of a part of it."""
        if (found := self._tensors(key, rows)) is not None:
            entry, tensors = found
            entry.from_file(value, *tensors, each=each)

    @contextlib.contextmanager
    def _naming(self, key: Key) -> Iterator[None]:
        """Says of what is wrong with an entry's tensors which they are."""
        try:
            yield
        except ValueError as error:
            where = self.files[key.name].path.name
            raise CheckpointError(f"{self.folder}: {', '.join(key.names)}: {error} ({where})") from error

    def _nonfinite(self, parameter: Parameter, value: np.ndarray, rows: ShardRows | None) -> str:
        """What to say of a parameter that is not finite: which of its tensors, as stored or as read."""
        for key in self._keys[parameter.path]:
            path, found = self.files[key.name].path, self._tensors(key, rows)
            if found is not None and not key.scales and not is_finite(found[1][0]):
                return f"{path}: {key.name} holds values that are not finite"
            alone = np.zeros(value.shape, value.dtype)
            self._fill(alone, key, rows, Copies(None).begin)
            if not is_finite(alone):
                largest = float(jnp.finfo(value.dtype).max)
                return (
                    f"{path}: {key.name} holds values that are not finite in {value.dtype}, whose largest is "
                    f"{largest:g}; "
                    "load it in bfloat16 or float32"
                )
        raise AssertionError(f"{parameter.name} is made of finite values only")


@dataclass(frozen=True)
class Headers:
    """What the headers of a checkpoint's files say: its tensors, none of them read.

    Attributes:
        where: What errors call the checkpoint.
        tensors: By name.
        wrong: What is wrong with the files.
        file_bytes: Sum over all files.
    """

    where: str
    tensors: Mapping[str, Stored]
    wrong: Sequence[str]
    file_bytes: int

    def plan(self, config: ModelConfig | DraftHeadConfig) -> TensorPlan:
        """How the tensors make up a config's parameters.

        Raises:
            CheckpointError: As for `read_weights`.
        """
        with content_of(self.where):
            return make_plan(self.tensors, config, self.where, self.wrong)


def read_headers(folder: Path) -> Headers:
    """The headers of a folder's safetensors, or that of a GGUF file.

    Raises:
        CheckpointError: A file is corrupt; or the weights are pickled.
        FileNotFoundError: There are no weights.
    """
    return _open(folder)[1]


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors, and all that its index names."""
    try:
        return bool(_shards(folder))
    except (ValueError, FileNotFoundError):
        return False


def merge_shards(
    shards: Iterable[Mapping[str, Stored]], weight_map: Mapping[str, str]
) -> tuple[dict[str, Stored], list[str]]:
    """What is known of the tensors of all shards, by name, and what is wrong with the names.

    Args:
        shards: The tensors of each.
        weight_map: Which shard should hold which, by the index; empty without one.
    """
    tensors: dict[str, Stored] = {}
    wrong = []
    for shard in shards:
        wrong += [f"stored in more than one file: {name}" for name in shard if name in tensors]
        tensors |= shard
    if lost := sorted(weight_map.keys() - tensors.keys()):
        wrong.append(f"the index names tensors that no shard holds: {lost}")
    return tensors, wrong


def _weight_map(folder: Path) -> dict[str, str]:
    """Which shard holds which tensor, by the folder's index; empty without one.

    The index may come from anybody: no name of it leads out of the folder. The shards themselves may be
    links, as they are in the hub's cache.
    """
    listing = folder / INDEX
    if not listing.exists():
        return {}
    weight_map = read_object(listing).get("weight_map")
    named = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not weight_map or not named:
        raise CheckpointError(f"{listing} has no weight_map from tensors to files")
    if outside := sorted(name for name in set(weight_map.values()) if not _is_inside(folder, name)):
        raise CheckpointError(f"{listing} names shards outside the checkpoint's folder: {shown(outside)}")
    return weight_map


def _is_inside(folder: Path, name: str) -> bool:
    """Whether a name stays in a folder; what it names may be a link, but not lie in a linked folder."""
    if not is_inside(name):
        return False
    try:
        place = Path(os.path.realpath((folder / name).parent))
    except ValueError:  # no system has such a name
        return False
    return place.is_relative_to(os.path.realpath(folder))


def _shards(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint."""
    paths = sorted({folder / file for file in _weight_map(folder).values()})
    if absent := [path.name for path in paths if not os.path.isfile(path)]:
        raise CheckpointError(f"{folder / INDEX}: the index names shards that are not there: {shown(absent)}")
    paths = paths or sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{folder} holds pickled weights {pickled}, which can run code when they are read; "
                "convert them to safetensors"
            )
        raise FileNotFoundError(f"{folder} holds no *.safetensors file")
    return paths


def _open(folder: Path) -> tuple[Mapping[str, TensorFile | GgufTensors], Headers]:
    """Opens all shards: the file that holds each stored tensor, by the tensor's name, and all headers."""
    if is_gguf(folder):
        file = GgufTensors.open(folder)
        return dict.fromkeys(file.stored, file), Headers(str(folder), file.stored, [], folder.stat().st_size)
    paths = _shards(folder)
    opened = [TensorFile.open(path) for path in paths]
    tensors, wrong = merge_shards([file.stored for file in opened], _weight_map(folder))
    files = {name: file for file in opened for name in file.stored}
    return files, Headers(str(folder), tensors, wrong, sum(path.stat().st_size for path in paths))


def _equal(
    name: str,
    other: str,
    files: Mapping[str, TensorFile | GgufTensors],
    ranges: Sequence[tuple[int, int]],
    width: int,
) -> bool:
    """Whether ranges of rows of two matrices hold the same values, of whatever types; some at a time."""
    step = max(1, _COMPARED_BYTES // (4 * width))
    starts = [(begin, stop) for start, stop in ranges for begin in range(start, stop, step)]
    tensors = [files[own].tensor(own) for own in (name, other)]
    bar = tqdm(starts, desc=f"comparing {name}", unit=" parts", delay=1, disable=unseen(), leave=False)
    for begin, stop in bar:
        ours, theirs = (own[begin : min(begin + step, stop)] for own in tensors)
        # Bits first: they are mostly the same, and are compared many times faster than bfloat16 values.
        if ours.dtype == theirs.dtype and np.array_equal(ours.view(np.uint8), theirs.view(np.uint8)):
            continue
        if not np.array_equal(ours.astype(np.float32), theirs.astype(np.float32), equal_nan=True):
            bar.close()
            return False
    return True
