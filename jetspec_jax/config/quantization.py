"""Quantised weights: FP8 from a ``quantization_config``, and packed MXFP4.

Two dialects of FP8 are read: ``quant_method`` "fp8", as Qwen publishes it, and "compressed-tensors", as
llm-compressor writes it, with a scale per block or per row. The caller chooses whether activations are
quantised too, unless the config excludes them. The config of GPT-OSS only says that its experts are MXFP4.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jetspec_jax.arguments import shown
from jetspec_jax.config.fields import MAX_SIZE, Fields, is_int

FP8, COMPRESSED, MXFP4 = "fp8", "compressed-tensors", "mxfp4"

# Unsupported methods, described for error messages.
_OTHERS = {
    "awq": "AWQ, integers of 4 bits",
    "gptq": "GPTQ, integers of 2 to 8 bits",
    "bitsandbytes": "bitsandbytes, integers of 8 bits or NF4",
    "modelopt": "NVIDIA ModelOpt, NVFP4 or FP8",
    "mxfp4": "MXFP4, which is supported for GPT-OSS only",
    "quark": "AMD Quark",
    "fbgemm_fp8": "FBGEMM, whose scales are of rows under other names",
    "torchao": "torchao",
    "hqq": "HQQ",
}
_READ = (
    f"quant_method {FP8!r} with weight_block_size, and {COMPRESSED!r} with float weights of 8 bits and "
    "strategy 'channel' or 'block'; or take the unquantised checkpoint, of which python -m convert "
    "--quantize fp8 makes the former"
)
# Limits of a pattern's length and repetitions, so that matching ends soon.
_MAX_PATTERN, _MAX_REPEATS = 200, 3


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a model's weights.

    FP8 applies to all matrices of the layers except routers and ``skipped``; MXFP4 to experts, see `PACKED`.

    Attributes:
        method: `FP8` or `COMPRESSED`, whose scales have different names, or `MXFP4`.
        rows: Outputs that share a scale; the last block may be smaller.
        columns: Inputs that share a scale, likewise; None means all.
        skipped: Modules that are not quantised: names, parts of names between dots, or after ``re:`` a
            regular expression that matches the beginning of a name.
        activations: The config's setting for activations: "dynamic", "static", "none", or words for one that
            `fp8_activations` does not support.
        fp8_activations: Whether products quantise activations in FP8, with scales that they compute.
    """

    method: str
    rows: int
    columns: int | None
    skipped: tuple[str, ...] = ()
    activations: str = "dynamic"
    fp8_activations: bool = False

    @property
    def row_group(self) -> int | None:
        """Activations of a token that share a scale; 0 is all. None: activations are not quantised."""
        return (self.columns or 0) if self.fp8_activations else None

    @property
    def is_mxfp4(self) -> bool:
        """Whether this is MXFP4. GPT-OSS is trained in it, so no weight was rounded after training."""
        return self.method == MXFP4

    @property
    def type(self) -> str:
        """The type of the values, for display."""
        return "MXFP4" if self.is_mxfp4 else "FP8"

    @property
    def suffix(self) -> str:
        """The suffix that turns a matrix's name into the name of its scale."""
        return "_scale_inv" if self.method == FP8 else "_scale"

    @property
    def format(self) -> str:
        """The format, for display."""
        if self.is_mxfp4:
            return "MXFP4"
        block = f"in blocks of {self.rows} x {self.columns}"
        return f"FP8 {'with a scale for each output' if self.columns is None else block}"

    def skips(self, module: str) -> bool:
        """Whether the module with this published name is not quantised."""
        parts = module.split(".")
        runs = {".".join(parts[i:j]) for j in range(1, len(parts) + 1) for i in range(j)}
        return not self._names.isdisjoint(runs) or any(pattern.match(module) for pattern in self._patterns)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for name in self.skipped if not name.startswith("re:"))

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(name[3:]) for name in self.skipped if name.startswith("re:"))


#: Experts in MXFP4, packed as in the files: 32 inputs of an output share a scale.
PACKED = Quantization(MXFP4, 1, 32, activations="none")


def read_quantization(fields: Fields) -> Quantization | None:
    """Reads a config's ``quantization_config``; None if it is absent."""
    settings = fields.object("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method")
    if method == FP8:
        found = _read_fp8(settings)
    elif method == COMPRESSED:
        found = _read_compressed(settings)
    else:
        known = _OTHERS.get(method) if isinstance(method, str) else None
        raise ValueError(
            f"{settings.where}: quant_method {shown(method)} is not supported"
            f"{(known and f' ({known})') or ''}; supported: {_READ}"
        )
    if settings.get("kv_cache_scheme") not in (None, {}):
        raise ValueError(
            f"{settings.where}: kv_cache_scheme: scales of a KV cache are not supported; set it to null"
        )
    settings.done()
    return found


def _read_fp8(settings: Fields) -> Quantization:
    settings.only("fmt", "e4m3", "float8_e4m3fn", default="e4m3", feature="another FP8 format")
    settings.only("scale_fmt", None, "float", feature="scales that are no floats")
    settings.inert("dequantize")
    scheme = settings.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise settings.error("activation_scheme", "'dynamic' or 'static'", scheme)
    if settings.get("weight_block_size") is None:
        raise ValueError(
            f"{settings.where}: no weight_block_size: scales of whole tensors are not supported; "
            f"supported: {_READ}"
        )
    rows, columns = _read_block(settings, "weight_block_size")
    skipped = settings.name("modules_to_not_convert", "ignored_layers")
    return Quantization(FP8, rows, columns, _read_names(settings, skipped), scheme)


def _read_compressed(settings: Fields) -> Quantization:
    settings.only(
        "format", "float-quantized", "naive-quantized", default="float-quantized", feature="packed weights"
    )
    settings.inert("quantization_status", "global_compression_ratio", "version")
    for key in ("sparsity_config", "transform_config"):
        nested = settings.object(key)
        if nested is not None and nested.raw.get("format", "dense") not in ("dense", None):
            raise ValueError(f"{nested.where} is not supported; supported: dense")
        if key == "transform_config" and nested is not None and nested.raw:
            raise ValueError(f"{nested.where}: transforms are not supported")
    groups = settings.object("config_groups")
    if groups is None or len(groups.raw) != 1:
        count = 0 if groups is None else len(groups.raw)
        raise ValueError(f"{settings.where}: {count} config_groups are not supported; supported: one")
    [name] = groups.raw
    group = groups.object(name)
    if group is None or (weights := group.object("weights")) is None:
        raise ValueError(f"{groups.where}: {name} quantises no weights")
    if (targets := group.get("targets")) != ["Linear"]:
        raise group.error("targets", "['Linear']", targets)
    group.only("format", None, "float-quantized", "naive-quantized", feature="packed weights")
    group.inert("output_activations")
    inputs = group.object("input_activations")
    group.done()
    kind = f"{weights.get('type')} of {weights.get('num_bits')} bits"
    if kind != "float of 8 bits":
        raise ValueError(f"{weights.where}: weights of type {kind} are not supported; supported: {_READ}")
    weights.only("symmetric", True, default=True)
    weights.only("dynamic", False, default=False)
    weights.inert("observer", "observer_kwargs", "actorder", "group_size", "zp_dtype", "scale_dtype")
    strategy = weights.get("strategy")
    if strategy == "channel":
        weights.inert("block_structure")
        rows, columns = 1, None
    elif strategy == "block":
        rows, columns = _read_block(weights, "block_structure")
    else:
        raise ValueError(
            f"{weights.where}: strategy {shown(strategy)} is not supported; supported: 'channel' and 'block'"
        )
    weights.done()
    activations = _activations(None if inputs is None else inputs.raw, columns)
    return Quantization(COMPRESSED, rows, columns, _read_names(settings, "ignore"), activations)


def _activations(inputs: Mapping[str, Any] | None, columns: int | None) -> str:
    """`Quantization.activations` of ``input_activations``, beside weights of so many columns a block."""
    if inputs is None:
        return "none"
    kind = inputs.get("type", "float"), inputs.get("num_bits", 8)
    strategy, group, dynamic = (inputs.get(key) for key in ("strategy", "group_size", "dynamic"))
    fits = strategy == "token" if columns is None else (strategy, group) == ("group", columns)
    if kind != ("float", 8) or dynamic not in (True, False, None) or (dynamic and not fits):
        return f"strategy {shown(strategy)}, {kind[0]} of {kind[1]} bits, groups of {group}"
    return "dynamic" if dynamic else "static"


def _read_block(fields: Fields, key: str) -> tuple[int, int]:
    block = fields.get(key)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(is_int(size) and 1 <= size <= MAX_SIZE for size in sizes):
        raise fields.error(key, "a block's outputs and inputs, such as [128, 128]", block)
    return sizes[0], sizes[1]


def _read_names(fields: Fields, key: str) -> tuple[str, ...]:
    names = fields.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.error(key, "a list of modules", names)
    for name in names:
        if name.startswith("re:"):
            _check_pattern(fields, key, name[3:])
    return tuple(names)


def _check_pattern(fields: Fields, key: str, pattern: str) -> None:
    """Refuses a string that is not a regular expression, or could take very long to match."""
    repeats = re.findall(r"[*+{]", re.sub(r"\\.", "", pattern))
    if len(pattern) > _MAX_PATTERN or len(repeats) > _MAX_REPEATS or re.search(r"\)[*+{?]", pattern):
        expected = f"patterns of at most {_MAX_REPEATS} repetitions, none of them of a group"
        raise fields.error(key, expected, pattern)
    try:
        re.compile(pattern)
    except re.error as error:
        raise fields.error(key, f"regular expressions ({error})", pattern) from error
