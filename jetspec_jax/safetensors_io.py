"""Parameters from and to safetensors, by the key table of their module.

Reading is strict. All names, shapes and types are checked against the module before a single tensor is read,
and everything that is wrong is said in one error. Tensors then stream one by one from the file to the device,
so that the host holds no more than one parameter at a time.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from jetspec_jax.config import (
    DraftHeadConfig,
    ModelConfig,
    is_draft_head,
    parse_draft_head_config,
    parse_model_config,
    read_json,
)
from jetspec_jax.models import Weights, abstract
from jetspec_jax.models.key_table import Key

FILE_DTYPES = ("F32", "BF16", "F16")

# A buffer that older exporters stored; it follows from the config.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


def read_weights(folder: Path, config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype) -> Weights:
    """Reads the parameters of a config's module from a folder of safetensors.

    Raises:
        ValueError: Tensors are missing, surplus, misshapen, stored twice or of a type that is no plain float
            (all are listed); or a file is corrupt; or the weights are pickled.
        FileNotFoundError: There are no weights.
    """
    with contextlib.ExitStack() as stack:
        tensors, wrong = _index(folder, stack)
        plan = _check(tensors, wrong, config, folder)
        weights: Weights = {}
        # Small checkpoints are there before a bar could be read.
        for parameter in tqdm(plan, desc=f"loading {folder.name}", unit=" parameters", delay=1, leave=False):
            value = np.empty(parameter.shape, dtype)
            for name, key in parameter.tensors.items():
                key.from_file(tensors[name].get_tensor(name), value)
            _put(weights, parameter.path, jnp.asarray(value))
    return weights


def stored_bytes(folder: Path, config: ModelConfig | DraftHeadConfig) -> int:
    """Bytes of a folder's safetensors, once its tensors are known to be those of the config.

    Raises:
        ValueError: As for `read_weights`.
        FileNotFoundError: There are no weights.
    """
    with contextlib.ExitStack() as stack:
        _check(*_index(folder, stack), config, folder)
    return sum(path.stat().st_size for path in _shards(folder))


def save_checkpoint(
    folder: str | Path,
    raw_config: Mapping[str, Any],
    weights: Weights,
    *,
    dtype: str = "bfloat16",
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Writes a target or a draft head in Hugging Face layout, whole or not at all.

    Args:
        folder: Where to; it must not exist yet.
        raw_config: The ``config.json``, which also says whether this is a target or a head.
        weights: The parameters.
        dtype: The type to store.
        extra_files: Further text files by name (tokenizer.json, generation_config.json, ...).

    Raises:
        FileExistsError: The folder exists.
        ValueError: The config is not valid, or the parameters are not its.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name a new folder")
    parse = parse_draft_head_config if is_draft_head(raw_config) else parse_model_config
    expected = _expected(parse(raw_config))
    given = {path: leaf.shape for path, leaf in nnx.traversals.flatten_mapping(weights).items()}
    wanted = {parameter.path: parameter.shape for parameter in expected}
    differing = sorted(
        ".".join(map(str, path))
        for path in wanted.keys() | given.keys()
        if wanted.get(path) != given.get(path)
    )
    if differing:
        raise ValueError(f"these parameters are not those of the config: {differing}")
    tensors = {}
    for parameter in expected:
        value = np.asarray(jnp.asarray(_get(weights, parameter.path), dtype=dtype))
        tensors |= {name: key.to_file(value) for name, key in parameter.tensors.items()}
    files = {"config.json": json.dumps(dict(raw_config), indent=2) + "\n", **(extra_files or {})}
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # the library makes it the owner's alone
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


#: Where a parameter is in the nested weights.
ParameterPath = tuple[str | int, ...]


@dataclass(frozen=True)
class _Parameter:
    """A parameter of a module and the published tensors that it is made of, by name."""

    path: ParameterPath
    shape: tuple[int, ...]
    tensors: dict[str, Key]


def _expected(config: ModelConfig | DraftHeadConfig) -> list[_Parameter]:
    """All parameters of a config's module."""
    module = abstract(config)
    expected = []
    for key_path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        path: ParameterPath = tuple(key_path)  # pyright: ignore[reportAssignmentType]
        dotted = ".".join(map(str, path))
        tensors = {name: key for key in module.KEYS if (name := key.published_name(dotted))}
        assert tensors, f"no entry of the key table makes {dotted}"
        expected.append(_Parameter(path, parameter.shape, tensors))
    return expected


def _weight_map(folder: Path) -> dict[str, str]:
    """Which shard holds which tensor, by the folder's index; empty without one."""
    listing = folder / "model.safetensors.index.json"
    if not listing.exists():
        return {}
    weight_map = read_json(listing).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_text, weight_map.values())):
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


def _index(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Any], list[str]]:
    """Opens all shards: for every stored tensor the open file that holds it; and what is wrong with that."""
    paths, weight_map = _shards(folder), _weight_map(folder)
    tensors: dict[str, Any] = {}
    wrong = []
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in tensors:
                wrong.append(f"stored in more than one file: {name}")
            tensors[name] = file
    if lost := sorted(set(weight_map) - set(tensors)):
        wrong.append(f"the index names tensors that no shard holds: {lost}")
    return tensors, wrong


def _check(
    tensors: Mapping[str, Any], wrong: list[str], config: ModelConfig | DraftHeadConfig, folder: Path
) -> list[_Parameter]:
    """The module's parameters, once the files hold exactly what they need."""
    expected = _expected(config)
    shapes = {
        name: key.file_shape(parameter.shape)
        for parameter in expected
        for name, key in parameter.tensors.items()
    }
    names = set(shapes)
    surplus = set(tensors) - names - _redundant(config)
    wrong = wrong + [f"missing: {name}" for name in sorted(names - set(tensors))]
    wrong += [f"surplus: {name}" for name in sorted(surplus) if not name.endswith(IGNORED_SUFFIX)]
    for name in sorted(names & set(tensors)):
        stored = tensors[name].get_slice(name)
        if tuple(stored.get_shape()) != shapes[name]:
            wrong.append(f"misshapen: {name} is {stored.get_shape()}, expected {list(shapes[name])}")
        if stored.get_dtype() not in FILE_DTYPES:
            wrong.append(f"unsupported type: {name} is {stored.get_dtype()}, not one of {FILE_DTYPES}")
    if wrong:
        raise ValueError(f"{folder} does not hold the tensors of its config:\n  " + "\n  ".join(wrong))
    return expected


def _redundant(config: ModelConfig | DraftHeadConfig) -> set[str]:
    """Tensors that may be there though no parameter is made of them: the second copy of a tied embedding."""
    tied = isinstance(config, ModelConfig) and config.tie_word_embeddings
    return {"lm_head.weight"} if tied else set()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _put(weights: Any, path: ParameterPath, value: Any) -> None:
    for part in path[:-1]:
        weights = weights.setdefault(part, {})
    weights[path[-1]] = value


def _get(weights: Any, path: ParameterPath) -> Any:
    for part in path:
        weights = weights[part]
    return weights
