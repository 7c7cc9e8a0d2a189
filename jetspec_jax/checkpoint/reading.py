"""Reads parameters from safetensors or a GGUF file, by the key table of their module.

All names, shapes and types are checked against the module (`tensor_plan`) before a tensor is read. Then
parameters are transferred one by one from the file to the device. The host holds at most two: it makes one
while the previous one is sent. On a mesh, a process reads only the rows of its devices' shards.
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
from jetspec_jax.models.scale_key import check_fp8_scales
from jetspec_jax.progress import unseen

INDEX = "model.safetensors.index.json"
#: The most shards that an index may name.
MAX_SHARDS = 4096

# Tensors are compared in parts of this many bytes.
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

    Tensors that are known and not needed are logged in one line. ``dtype`` is the type of all parameters,
    with the exceptions of `dtype_of`; None keeps the stored types.

    Raises:
        CheckpointError: Tensors are missing, surplus, misshapen, stored twice or of an unsupported type (all
            are listed); a file is corrupt; the weights are pickled; without a dtype, the tensors of one
            parameter have different types; a stored output head that the config ties differs from the
            embedding; values are not finite; scales of FP8 weights are not positive, or so large that weights
            may not be finite; or shards would cut MXFP4 blocks (all layers are listed). With
            several processes, each checks the values of its shards.
        FileNotFoundError: There are no weights.
    """
    placement = None if mesh is None else Placement(config, mesh)
    parameters = open_parameters(folder, config, dtype, placement, allow_nonfinite=allow_nonfinite)
    # A second copy of the embedding is read for comparison, so it is not logged as unread.
    unused = parameters.plan.unused.items()
    if left := [f"{len(names)} ({reason})" for reason, names in unused if reason != TIED.reason]:
        _log.warning("%s: tensors left unread: %s", folder, ", ".join(left))
    return to_devices(parameters, placement)


def open_parameters(
    folder: Path,
    config: ModelConfig | DraftHeadConfig,
    dtype: jnp.dtype | None = None,
    placement: Placement | None = None,
    *,
    allow_nonfinite: bool = False,
) -> "StoredParameters":
    """Opens the parameters of a folder for reading in any order; everything but values is checked."""
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
        # Without a dtype, scales keep their stored type too.
        parameter.path: kept if dtype is None and parameter.block else dtype_of(config, parameter.path, kept)
        for parameter, kept in zip(found, dtypes, strict=True)
    }
    products = jnp.dtype(jnp.float32) if dtype is None else dtype
    parameters = StoredParameters(folder, files, plan, types, products, placement, allow_nonfinite)
    parameters.check_copies()
    return parameters


@dataclass(frozen=True)
class StoredParameters:
    """The parameters of open files: see `Parameters`.

    Products have quantised weights in the type ``products``.
    """

    folder: Path
    files: Mapping[str, TensorFile | GgufTensors]
    plan: TensorPlan
    dtypes: Mapping[ParameterPath, np.dtype]
    products: np.dtype
    placement: Placement | None
    allow_nonfinite: bool

    @functools.cached_property
    def _keys(self) -> Mapping[ParameterPath, tuple[Key, ...]]:
        return {parameter.path: keys for parameter, keys in self.plan.sources}

    @property
    def parameters(self) -> Sequence[Parameter]:
        """All parameters."""
        return [parameter for parameter, _ in self.plan.sources]

    def read(
        self, parameter: Parameter, rows: ShardRows | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A parameter, or a device's shard of it, reading only the shard's rows; see `Parameters`."""
        value = np.empty(parameter.shape if shape is None else shape, self.dtypes[parameter.path])
        with ThreadPoolExecutor(THREADS) as pool:
            threads = None if value.nbytes < SMALL else pool
            copies = [(key, Copies(threads)) for key in self._keys[parameter.path]]
            for key, key_copies in copies:
                with self._naming(key):
                    self._fill(value, key, rows, key_copies.begin)
            for key, key_copies in copies:
                with self._naming(key):
                    key_copies.end()
            finite = value.dtype == np.uint8 or self.allow_nonfinite or all_finite(value, threads)
        if not finite:
            raise CheckpointError(self._nonfinite(parameter, value, rows))
        if parameter.path[-1] == SCALES:
            self._check_scales(parameter, rows)
        return value

    def check_copies(self) -> None:
        """Checks that a stored output head equals the embedding if the config ties them.

        On a mesh, a process compares the rows of its devices.
        """
        for name, embedding in self.plan.copies:
            [parameter] = [source for source, keys in self.plan.sources if keys[0].name == embedding]
            rows = [np.arange(parameter.shape[0])]
            if self.placement is not None:
                rows = [part.rows.rows[0] for part in self.placement.local_parts(parameter)]
            # Padding (-1), which comes last, is excluded by the maximum.
            ranges = [(int(shard[0]), int(shard.max()) + 1) for shard in rows if shard[0] >= 0]
            if not _equal(name, embedding, self.files, ranges, parameter.shape[1]):
                where = self.files[name].path.name
                raise CheckpointError(f"{self.folder}: {untied(name, embedding)} ({where})")

    def _tensors(self, key: Key, rows: ShardRows | None) -> tuple[Key, list[np.ndarray]] | None:
        """The rows of an entry's tensors that a shard needs, and the entry for them; None without rows."""
        if rows is None:
            return key, [np.asarray(self.files[name].tensor(name)) for name in key.names]
        found = key.of_part(rows)
        if found is None:
            return None
        entry, needed = found
        tensors = [self.files[name].tensor(name) for name in key.names]
        return entry, [take_rows(*pair) for pair in zip(tensors, needed, strict=True)]

    def _fill(self, value: np.ndarray, key: Key, rows: ShardRows | None, each: Each) -> None:
        if (found := self._tensors(key, rows)) is not None:
            entry, tensors = found
            entry.from_file(value, *tensors, each=each)

    def _check_scales(self, parameter: Parameter, rows: ShardRows | None) -> None:
        """Checks the scales of quantised weights tensor by tensor, so that the error names one."""
        for key in self._keys[parameter.path]:
            if (found := self._tensors(key, rows)) is None:
                continue
            [scales] = found[1]
            with self._naming(key):
                if scales.dtype == np.uint8:
                    check_scales(scales)
                else:
                    check_fp8_scales(scales, self.products, allow_nonfinite=self.allow_nonfinite)

    @contextlib.contextmanager
    def _naming(self, key: Key) -> Iterator[None]:
        """Adds the names of an entry's tensors and their file to errors."""
        try:
            yield
        except ValueError as error:
            where = self.files[key.name].path.name
            raise CheckpointError(f"{self.folder}: {', '.join(key.names)}: {error} ({where})") from error

    def _nonfinite(self, parameter: Parameter, value: np.ndarray, rows: ShardRows | None) -> str:
        """The error for a parameter that is not finite: its first bad tensor, stored or converted."""
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
    """The headers of a checkpoint's files. ``wrong`` are problems with the files, as lines of an error."""

    where: str
    tensors: Mapping[str, Stored]
    wrong: Sequence[str]
    file_bytes: int

    def plan(self, config: ModelConfig | DraftHeadConfig) -> TensorPlan:
        """Matches the tensors to a config's parameters."""
        with content_of(self.where):
            return make_plan(self.tensors, config, self.where, self.wrong)


def read_headers(folder: Path) -> Headers:
    """Reads the headers of a folder's safetensors, or of a GGUF file."""
    return _open(folder)[1]


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors, including all files in its index."""
    try:
        return bool(_shards(folder, _weight_map(folder)))
    except (ValueError, FileNotFoundError):
        return False


def merge_shards(
    shards: Iterable[Mapping[str, Stored]], weight_map: Mapping[str, str]
) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of all shard files by name, and problems with the names.

    Without an index ``weight_map`` is empty.
    """
    tensors: dict[str, Stored] = {}
    wrong = []
    for shard in shards:
        wrong += [f"stored in more than one file: {name}" for name in shard if name in tensors]
        tensors |= shard
    if lost := sorted(weight_map.keys() - tensors.keys()):
        wrong.append(f"the index names tensors that no shard holds: {shown(lost)}")
    return tensors, wrong


def _weight_map(folder: Path) -> dict[str, str]:
    """The index's map from tensor names to shard files; empty without an index.

    The index is untrusted, so its file names must stay inside the folder. The files themselves may be
    symbolic links, as in the hub's cache.
    """
    listing = folder / INDEX
    if not listing.exists():
        return {}
    weight_map = read_object(listing).get("weight_map")
    named = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not weight_map or not named:
        raise CheckpointError(f"{listing} has no weight_map from tensors to files")
    shards = set(weight_map.values())
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{listing} names {len(shards):,} shards; it may name {MAX_SHARDS:,}")
    if outside := sorted(name for name in shards if not _is_inside(folder, name)):
        raise CheckpointError(f"{listing} names shards outside the checkpoint's folder: {shown(outside)}")
    return weight_map


def _is_inside(folder: Path, name: str) -> bool:
    """Whether a relative path stays in a folder; the file may be a link, but its folder may not."""
    if not is_inside(name):
        return False
    try:
        place = Path(os.path.realpath((folder / name).parent))
    except ValueError:  # an invalid file name
        return False
    return place.is_relative_to(os.path.realpath(folder))


def _shards(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    """The checkpoint's safetensors files, of the index if there is one."""
    paths = sorted(folder / file for file in set(weight_map.values()))
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
    """Opens all shard files; returns the file of each tensor by name, and the headers."""
    if is_gguf(folder):
        file = GgufTensors.open(folder)
        return dict.fromkeys(file.stored, file), Headers(str(folder), file.stored, [], folder.stat().st_size)
    weight_map = _weight_map(folder)
    paths = _shards(folder, weight_map)
    opened = [TensorFile.open(path) for path in paths]
    tensors, wrong = merge_shards([file.stored for file in opened], weight_map)
    files = {name: file for file in opened for name in file.stored}
    return files, Headers(str(folder), tensors, wrong, sum(path.stat().st_size for path in paths))


def _equal(
    name: str,
    other: str,
    files: Mapping[str, TensorFile | GgufTensors],
    ranges: Sequence[tuple[int, int]],
    width: int,
) -> bool:
    """Whether two matrices of any types have equal values in ranges of rows, compared in parts."""
    step = max(1, _COMPARED_BYTES // (4 * width))
    starts = [(begin, stop) for start, stop in ranges for begin in range(start, stop, step)]
    tensors = [files[tensor].tensor(tensor) for tensor in (name, other)]
    bar = tqdm(starts, desc=f"comparing {name}", unit=" parts", delay=1, disable=unseen(), leave=False)
    for begin, stop in bar:
        left, right = (tensor[begin : min(begin + step, stop)] for tensor in tensors)
        # Compare bits first: they are mostly equal, and much faster to compare than bfloat16 values.
        if left.dtype == right.dtype and np.array_equal(left.view(np.uint8), right.view(np.uint8)):
            continue
        if not np.array_equal(left.astype(np.float32), right.astype(np.float32), equal_nan=True):
            bar.close()
            return False
    return True
