"""Parameters from safetensors, by the key table of their module.

All names, shapes and types are checked against the module (`tensor_plan`) before a tensor is read. Then
parameters go one by one from the file to the device, so that the host holds no more than one at a time.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from jetspec_jax.checkpoint.tensor_plan import (
    TIED,
    ParameterPath,
    Stored,
    TensorPlan,
    make_plan,
    stored_dtypes,
    untied,
)
from jetspec_jax.config import DraftHeadConfig, ModelConfig, read_json
from jetspec_jax.models import Weights

INDEX = "model.safetensors.index.json"

# Tensors are compared in parts of this size.
_COMPARED_BYTES = 64 * 2**20

_log = logging.getLogger("jetspec_jax")


def read_weights(
    folder: Path, config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype | None = None
) -> Weights:
    """Reads the parameters of a config's module from a folder of safetensors.

    One line of the log says what else the folder holds, if it does.

    Args:
        folder: The checkpoint.
        config: Its config.
        dtype: The type of all parameters; None leaves each in the type that it is stored in.

    Raises:
        ValueError: Tensors are missing, surplus, misshapen, stored twice or of a type that is no plain float
            (all are listed); or a file is corrupt; or the weights are pickled; or, without a dtype, one
            parameter is made of tensors of different types; or the head that a config ties to the embedding
            is stored too and differs from it.
        FileNotFoundError: There are no weights.
    """
    weights: Weights = {}
    with contextlib.ExitStack() as stack:
        files, headers = _open(folder, stack)
        plan = headers.plan(config)
        # A second copy of the embedding is compared with it, so it does not count as unread.
        left = [f"{len(names)} ({reason})" for reason, names in plan.unused.items() if reason != TIED.reason]
        if left:
            _log.warning("%s: tensors left unread: %s", folder, ", ".join(left))
        for path, value in _read(folder, files, headers, plan, dtype):
            put(weights, path, jnp.asarray(value))
    return weights


def read_parameters(
    folder: Path, config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype | None = None
) -> Iterator[tuple[ParameterPath, np.ndarray]]:
    """Reads parameters one by one, each with its place in the weights, without touching a device.

    Raises:
        ValueError: As for `read_weights`; before the first parameter.
        FileNotFoundError: Likewise.
    """
    with contextlib.ExitStack() as stack:
        files, headers = _open(folder, stack)
        yield from _read(folder, files, headers, headers.plan(config), dtype)


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
            ValueError: As for `read_weights`.
        """
        return make_plan(self.tensors, config, self.where, self.wrong)


def read_headers(folder: Path) -> Headers:
    """The headers of a folder's safetensors.

    Raises:
        ValueError: A file is corrupt; or the weights are pickled.
        FileNotFoundError: There are no weights.
    """
    with contextlib.ExitStack() as stack:
        return _open(folder, stack)[1]


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


def put(weights: Any, path: ParameterPath, value: Any) -> None:
    """Puts a parameter at its place in nested weights that are being made."""
    for part in path[:-1]:
        weights = weights.setdefault(part, {})
    weights[path[-1]] = value


def _weight_map(folder: Path) -> dict[str, str]:
    """Which shard holds which tensor, by the folder's index; empty without one."""
    listing = folder / INDEX
    if not listing.exists():
        return {}
    weight_map = read_json(listing).get("weight_map")
    named = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not weight_map or not named:
        raise ValueError(f"{listing} has no weight_map from tensors to files")
    return weight_map


def _shards(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint."""
    paths = sorted({folder / file for file in _weight_map(folder).values()})
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ValueError(f"{folder}: the index names shards that are not there: {absent}")
    paths = paths or sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickled:
            raise ValueError(
                f"{folder} holds pickled weights {pickled}, which can run code when they are read; "
                "convert them to safetensors"
            )
        raise FileNotFoundError(f"{folder} holds no *.safetensors file")
    return paths


def _open(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Any], Headers]:
    """Opens all shards: the file that holds each stored tensor, by the tensor's name, and all headers."""
    paths = _shards(folder)
    opened = [_open_file(path, stack) for path in paths]
    tensors, wrong = merge_shards([stored for _, stored in opened], _weight_map(folder))
    files = {name: file for file, stored in opened for name in stored}
    return files, Headers(str(folder), tensors, wrong, sum(path.stat().st_size for path in paths))


def _open_file(path: Path, stack: contextlib.ExitStack) -> tuple[Any, dict[str, Stored]]:
    try:
        file = stack.enter_context(safe_open(path, framework="numpy"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return file, {name: Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def _read(
    folder: Path,
    files: Mapping[str, Any],
    headers: Headers,
    plan: TensorPlan,
    dtype: jnp.dtype | None,
) -> Iterator[tuple[ParameterPath, np.ndarray]]:
    """The parameters of a plan, one by one, once its copies are known to be copies."""
    if dtype is None:
        dtypes = stored_dtypes(plan.sources, headers.tensors, headers.where)
    else:
        dtypes = [dtype] * len(plan.sources)
    for name, embedding in plan.copies:
        if not _equal(name, embedding, files, headers.tensors[name].shape):
            raise ValueError(f"{folder}: {untied(name, embedding)}")
    # Small checkpoints are there before a bar could be read.
    bar = tqdm(
        plan.sources, desc=f"loading {folder.name}", unit=" parameters", delay=1, disable=None, leave=False
    )
    for (parameter, keys), own_dtype in zip(bar, dtypes, strict=True):
        value = np.empty(parameter.shape, own_dtype)
        for key in keys:
            try:
                with np.errstate(over="ignore"):
                    key.from_file(value, *(files[name].get_tensor(name) for name in key.names))
            except ValueError as error:
                raise ValueError(f"{folder}: {', '.join(key.names)}: {error}") from error
            if own_dtype == np.float16 and headers.tensors[key.name].dtype != "F16":
                _check_float16(f"{folder}: {key.name}", value[key.part])
        yield parameter.path, value


def _check_float16(where: str, values: np.ndarray) -> None:
    """Refuses what was finite in a type of a wider range."""
    if not np.isfinite(values).all():
        largest = float(jnp.finfo(jnp.float16).max)
        raise ValueError(
            f"{where} holds values that are not finite in float16, whose largest is {largest:g}; "
            "load it in bfloat16 or float32"
        )


def _equal(name: str, other: str, files: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether two matrices of a shape hold the same values, of whatever types; some rows at a time."""
    count, width = shape
    step = max(1, _COMPARED_BYTES // (4 * width))
    slices = [files[own].get_slice(own) for own in (name, other)]
    bar = tqdm(
        range(0, count, step), desc=f"comparing {name}", unit=" parts", delay=1, disable=None, leave=False
    )
    for begin in bar:
        ours, theirs = (part[begin : min(begin + step, count)] for part in slices)
        # Bits first: they are mostly the same, and are compared many times faster than bfloat16 values.
        if ours.dtype == theirs.dtype and np.array_equal(ours.view(np.uint8), theirs.view(np.uint8)):
            continue
        if not np.array_equal(ours.astype(np.float32), theirs.astype(np.float32), equal_nan=True):
            bar.close()
            return False
    return True
