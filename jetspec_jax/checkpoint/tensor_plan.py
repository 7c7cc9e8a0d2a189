"""Matches a checkpoint's tensors to the parameters of a config's module, by the module's key table.

Files of one model differ in the prefix of their names, in whether experts are separate or fused, and in
additional tensors. All of that is decided from the headers' names, shapes and types before a tensor is read,
and one error lists everything that is wrong.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import DraftHead, Transformer, abstract, dtype_of, quantization_of, quantized_blocks
from jetspec_jax.models.key_table import Key, ParameterPath, Skip, key_path, parameters_of
from jetspec_jax.models.quantized import VALUES, is_quantized
from jetspec_jax.models.scale_key import ScaleKey
from jetspec_jax.models.selector import Selector
from pallas_kernels.quantized import FP8

#: The float types that are read and written, by their names in a file.
FILE_DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}

#: The name of FP8 in a file: E4M3 without infinities. F8_E4M3FNUZ and others are different formats.
FILE_FP8 = "F8_E4M3"

#: The name of bytes in a file, as used for MXFP4.
FILE_BYTES = "U8"

#: All types that are read.
READ_DTYPES = {**FILE_DTYPES, FILE_FP8: FP8, FILE_BYTES: jnp.dtype("uint8")}

# Tensors besides the parameters that the files of any family may have.
ROTARY = Skip(r".*rotary_emb\.inv_freq", "buffers of older exporters, which follow from the config")
INPUT_SCALES = Skip(r".*\.(input_scale|activation_scale)", "scales of activations, which are not read")
TIED = Skip(r"(.*\.)?lm_head\.weight", "second copy of the tied embedding")

# Scales of quantised KV caches, as named in checkpoints of vLLM and llm-compressor.
CACHE_SCALES = r"\.(k_scale|v_scale|kv_scale|q_scale|output_scale)$"

# More lines of an error than this that differ only in their numbers are shown as one.
MAX_ALIKE = 8
# The most lines of an error.
MAX_LINES = 100


class Stored(NamedTuple):
    """The header of a tensor: its shape, and the name of its type in the file."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Parameter:
    """A parameter of a module, and the tensors that may hold it.

    The first of the alternative ``forms`` is used for writing. The scales of a quantised parameter have as
    ``block`` the values per scale along each axis. ``order`` is the memory order of the axes on devices; None
    is the default.
    """

    path: ParameterPath
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    forms: tuple[tuple[Key, ...], ...]
    block: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(map(str, self.path))


class StoredParameter(NamedTuple):
    """A parameter, and the entries of the tensors it is read from."""

    parameter: Parameter
    keys: tuple[Key, ...]


class TensorPlan(NamedTuple):
    """The tensors of each parameter of a checkpoint.

    ``unused`` are known tensors that are not loaded, by description. ``copies`` are pairs of tensors whose
    values must be equal: an output head stored beside the embedding to which it is tied.
    """

    sources: list[StoredParameter]
    unused: dict[str, list[str]]
    copies: list[tuple[str, str]]


def expected_parameters(
    config: ModelConfig | DraftHeadConfig, stored: Collection[str] = ()
) -> list[Parameter]:
    """All parameters of a config's module.

    ``stored`` names of tensors determine the prefix; without them it is the key table's, as for writing.
    """
    module, blocks, quantization = abstract(config), quantized_blocks(config), quantization_of(config)
    if quantization is not None and quantization.is_mxfp4:
        blocks = {}  # files hold values and scales as in memory, so both are ordinary parameters
    first = module.PREFIXES[0]
    prefix = _prefix(module, stored)
    entries = defaultdict(list)
    for key in module.KEYS:
        entries[key.path].append(key.under(prefix, instead_of=first))
    expected = []
    flat = parameters_of(module)
    shapes = {path: tuple(parameter.shape) for path, parameter in flat}
    for path, parameter in flat:
        block = blocks.get(path[:-1])
        whole, values = (path, path) if block is None else (path[:-1], (*path[:-1], VALUES))
        indices, shape = [part for part in whole if isinstance(part, int)], shapes[values]
        keyed = entries[key_path(whole)]
        assert keyed, f"no entry of the key table makes {'.'.join(map(str, whole))}"
        forms = defaultdict(list)
        for key in keyed:
            forms[key.form] += key.of(indices, shape)
        keys = tuple(map(tuple, forms.values()))
        metadata = parameter.get_metadata()
        axes, order = tuple(metadata["axes"]), metadata.get("memory_order")
        if quantization is None or block is None or path == values:
            expected.append(Parameter(path, shapes[path], axes, keys, order=order))
            continue
        scales = [[ScaleKey.of_values(key, quantization, shape, block) for key in form] for form in keys]
        expected.append(Parameter(path, shapes[path], axes, tuple(map(tuple, scales)), block))
    return expected


def make_plan(
    stored: Mapping[str, Stored], config: ModelConfig | DraftHeadConfig, where: str, wrong: Sequence[str] = ()
) -> TensorPlan:
    """Finds the tensors of each parameter, and checks all tensors against the config.

    Raises:
        ValueError: Tensors are missing, surplus, misshapen, stored twice or of an unsupported type (all are
            listed, similar ones shortened); or a stored output head that the config ties cannot be a copy of
            the embedding.
    """
    missing, other, sources, known = [], [], [], set()
    for parameter in expected_parameters(config, stored):
        names = [[name for key in form for name in key.names] for form in parameter.forms]
        known.update(*names)
        there = [[name for name in form if name in stored] for form in names]
        if len(begun := [form[0] for form in there if form]) > 1:
            other.append(f"stored twice: {parameter.name}, as {' and as '.join(begun)}")
        shares = [len(form) / len(expected) for form, expected in zip(there, names, strict=True)]
        chosen = shares.index(max(shares))
        missing += [name for name in names[chosen] if name not in stored]
        for key in parameter.forms[chosen]:
            other += _unfit(key, parameter, stored, config)
        sources.append(StoredParameter(parameter, parameter.forms[chosen]))
    unused, surplus = _unused(sorted(stored.keys() - known), config)
    [embedding] = [keys[0].name for found, keys in sources if found.path == ("embed_tokens",)] or [""]
    copies = [(name, embedding) for name in unused.get(TIED.reason, ())]
    for name, _ in copies:
        other += _no_copy(name, embedding, stored)
    absent = [f"missing: {name}" for name in sorted(missing)]
    caches = [name for name in surplus if re.search(CACHE_SCALES, name)]
    other += [f"unsupported: {name} is a scale of a KV cache, which is not quantised here" for name in caches]
    surplus = [name for name in surplus if name not in caches]
    known_parts = {key.name for key in Selector.KEYS} if isinstance(config, DraftHeadConfig) else set()
    if parts := known_parts.intersection(surplus):
        other.append(
            f"config.json: {len(parts)} of the surplus tensors are those of a selector, and dflash_config "
            "does not have its keys selector_rank and selector_top_k"
        )
    if wrong := [*wrong, *absent, *(f"surplus: {name}" for name in surplus), *other]:
        lines = "\n  ".join(_shortened(wrong))
        raise ValueError(f"{where} does not hold the tensors of its config:\n  {lines}")
    return TensorPlan(sources, unused, copies)


def stored_types(config: ModelConfig | DraftHeadConfig, path: ParameterPath) -> Collection[np.dtype]:
    """The types in which a parameter may be stored."""
    dtype = dtype_of(config, path, jnp.dtype(jnp.float32))
    return FILE_DTYPES.values() if dtype == jnp.float32 else [dtype]


def untied(name: str, embedding: str) -> str:
    """The error for a stored output head that differs from the embedding to which the config ties it."""
    return (
        f"{name} is not {embedding}, and the config ties them; if they are separate matrices, set "
        "tie_word_embeddings: false in config.json"
    )


def stored_dtypes(
    sources: Iterable[StoredParameter], stored: Mapping[str, Stored], where: str
) -> list[np.dtype]:
    """The stored type of each parameter; for MXFP4 bfloat16, which represents all its values."""
    dtypes, mixed = [], []
    for _, keys in sources:
        types = {key.name: "BF16" if key.scales else stored[key.name].dtype for key in keys}
        dtypes.append(READ_DTYPES[next(iter(types.values()))])
        if len(set(types.values())) > 1:
            mixed.append(", ".join(f"{name} is {dtype}" for name, dtype in types.items()))
    if mixed:
        raise ValueError(
            f"{where} stores tensors that make up one parameter in different types; name one type for all "
            "(dtype, on the command line --dtype):\n  " + "\n  ".join(mixed)
        )
    return dtypes


def _prefix(module: Transformer | DraftHead, stored: Collection[str]) -> str:
    """The prefix in `PREFIXES` with which most stored names begin."""
    first = module.PREFIXES[0]
    roots = {
        key.name.removeprefix(first).partition(".")[0] for key in module.KEYS if key.name.startswith(first)
    }

    def count(prefix: str) -> int:
        starts = tuple(f"{prefix}{root}." for root in roots)
        return sum(name.startswith(starts) for name in stored)

    return max(module.PREFIXES, key=count)


def _unfit(
    key: Key, parameter: Parameter, stored: Mapping[str, Stored], config: ModelConfig | DraftHeadConfig
) -> list[str]:
    """The problems of an entry's tensors that are present."""
    there = [name for name in key.names if name in stored]
    quantization = quantization_of(config)
    try:
        expected = dict(zip(key.names, key.file_shapes(parameter.shape), strict=True))
    except ValueError as error:
        return [f"unsupported: {key.name}: {error}"]
    wrong = []
    if any(stored[name].shape != expected[name] for name in there):
        held = " and ".join(f"{name} is {list(stored[name].shape)}" for name in there)
        right = " and ".join(str(list(expected[name])) for name in there)
        why = f" for {quantization.format}" if quantization is not None and parameter.block else ""
        wrong.append(f"misshapen: {held}, expected {right}{why}")
    allowed, why = tuple(FILE_DTYPES), ""
    if key.scales or (quantization is not None and quantization.is_mxfp4 and is_quantized(parameter.path)):
        allowed = (FILE_BYTES,)
    elif parameter.path[-1] == VALUES:
        allowed, why = (FILE_FP8,), "; quantization_config does not leave it out"
    elif any(stored[name].dtype == FILE_FP8 for name in there):
        verb = "has no" if quantization is None else "leaves it out of"
        why = f"; config.json {verb} quantization_config"
    return wrong + [
        f"unsupported type: {name} is {stored[name].dtype}, not one of {allowed}{why}"
        for name in there
        if stored[name].dtype not in allowed
    ]


def _no_copy(name: str, embedding: str, stored: Mapping[str, Stored]) -> list[str]:
    """The reasons, from shapes and types, why a tensor cannot be a copy of the embedding."""
    if stored[name].dtype not in FILE_DTYPES:
        return [f"unsupported type: {name} is {stored[name].dtype}, not one of {tuple(FILE_DTYPES)}"]
    if embedding not in stored or stored[name].shape == stored[embedding].shape:
        return []
    shapes = f"{name} is {list(stored[name].shape)} and {embedding} is {list(stored[embedding].shape)}"
    return [f"not tied: {shapes}: {untied(name, embedding)}"]


def _unused(
    names: Iterable[str], config: ModelConfig | DraftHeadConfig
) -> tuple[dict[str, list[str]], list[str]]:
    """Tensors that belong to no parameter: known ones by their reason, and surplus ones."""
    model = config.layers if isinstance(config, DraftHeadConfig) else config
    tied = isinstance(config, ModelConfig) and config.tie_word_embeddings
    quantized = (INPUT_SCALES,) if model.quantization is not None else ()
    skips = (*abstract(config).SKIPPED, ROTARY, *quantized, *((TIED,) if tied else ()))
    unused, surplus = defaultdict(list), []
    for name in names:
        reasons = (skip.reason for skip in skips if skip.matches(name, model))
        reason = next(reasons, None)
        (surplus if reason is None else unused[reason]).append(name)
    return dict(unused), surplus


def _shortened(lines: Iterable[str]) -> list[str]:
    """The first lines; many that differ only in numbers become the first of them and a count."""
    alike = defaultdict(list)
    for line in lines:
        alike[re.sub(r"\d+", "*", line)].append(line)
    shown = []
    for group in alike.values():
        shown += group if len(group) <= MAX_ALIKE else [f"{group[0]}, and {len(group) - 1} more like it"]
    return (
        shown if len(shown) <= MAX_LINES else [*shown[:MAX_LINES], f"and {len(shown) - MAX_LINES} more lines"]
    )
