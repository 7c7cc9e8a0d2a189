"""How weights are quantised: what a ``quantization_config`` says of FP8, and MXFP4 that is kept packed.

Two dialects of FP8 are read: ``quant_method`` "fp8", as Qwen publishes it, and "compressed-tensors", as
llm-compressor writes it, with scales of blocks or of whole rows. Activations are never quantised here: what a
config says of them changes nothing. The config of GPT-OSS in MXFP4 says no more than that.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jetspec_jax.arguments import shown
from jetspec_jax.config.fields import MAX_SIZE, Fields, is_int

FP8, COMPRESSED, MXFP4 = "fp8", "compressed-tensors", "mxfp4"

# Methods that others publish, and what they are.
_OTHERS = {
    "awq": "AWQ, integers of 4 bits",
    "gptq": "GPTQ, integers of 2 to 8 bits",
    "bitsandbytes": "bitsandbytes, integers of 8 bits or NF4",
    "modelopt": "NVIDIA ModelOpt, NVFP4 or FP8",
    "mxfp4": "MXFP4, which GPT-OSS alone is read in",
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
# A name is at most as long as this, and repetitions as many: matching must not take for ever.
_MAX_PATTERN, _MAX_REPEATS = 200, 3


@dataclass(frozen=True)
class Quantization:
    """Weights in FP8: the matrices of all products of the layers, but for routers and what is left out.

    Or experts in MXFP4, see `PACKED`.

    Attributes:
        method: `FP8` or `COMPRESSED`, which name the scales differently, or `MXFP4`.
        rows: Outputs that share a scale; the last ones may be fewer.
        columns: Inputs that share a scale, likewise; None is all of them.
        skipped: Modules that stay as they are: names, or parts of names between dots, or after ``re:`` a
            regular expression of how the name begins.
        activations: What the config says of activations, which stay as they are: "dynamic", "static", "none".
    """

    method: str
    rows: int
    columns: int | None
    skipped: tuple[str, ...] = ()
    activations: str = "dynamic"

    @property
    def is_mxfp4(self) -> bool:
        """Whether this is MXFP4, in which GPT-OSS is published, so that no weight was rounded to it later."""
        return self.method == MXFP4

    @property
    def type(self) -> str:
        """The type of the values, for people."""
        return "MXFP4" if self.is_mxfp4 else "FP8"

    @property
    def suffix(self) -> str:
        """What the name of a scale adds to that of its matrix."""
        return "_scale_inv" if self.method == FP8 else "_scale"

    @property
    def format(self) -> str:
        """What people call it."""
        if self.is_mxfp4:
            return "MXFP4"
        block = f"in blocks of {self.rows} x {self.columns}"
        return f"FP8 {'with a scale for each output' if self.columns is None else block}"

    def skips(self, module: str) -> bool:
        """Whether a module, by its published name, stays as it is."""
        parts = module.split(".")
        runs = {".".join(parts[i:j]) for j in range(1, len(parts) + 1) for i in range(j)}
        return not self._names.isdisjoint(runs) or any(own.match(module) for own in self._patterns)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for name in self.skipped if not name.startswith("re:"))

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(name[3:]) for name in self.skipped if name.startswith("re:"))


#: Experts in MXFP4, packed as files hold them: 32 inputs of an output share a scale.
PACKED = Quantization(MXFP4, 1, 32, activations="none")


def read_quantization(fields: Fields) -> Quantization | None:
    """Reads a config's ``quantization_config``; None if there is none.

    Raises:
        ValueError: It is of a method, or has a setting, that is not supported.
    """
    own = fields.object("quantization_config")
    if own is None:
        return None
    method = own.get("quant_method")
    if method == FP8:
        found = _read_fp8(own)
    elif method == COMPRESSED:
        found = _read_compressed(own)
    else:
        known = _OTHERS.get(method) if isinstance(method, str) else None
        raise ValueError(
            f"{own.where}: quant_method {shown(method)} is not supported{(known and f' ({known})') or ''}; "
            f"supported: {_READ}"
        )
    if own.get("kv_cache_scheme") not in (None, {}):
        raise ValueError(
            f"{own.where}: kv_cache_scheme: scales of a KV cache are not supported; set it to null"
        )
    own.done()
    return found


def fp8_json(block: int = 128) -> dict[str, Any]:
    """The ``quantization_config`` of square blocks."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": FP8,
        "weight_block_size": [block, block],
    }


def _read_fp8(own: Fields) -> Quantization:
    own.only("fmt", "e4m3", "float8_e4m3fn", default="e4m3", feature="another FP8 format")
    own.only("scale_fmt", None, "float", feature="scales that are no floats")
    own.inert("dequantize")
    scheme = own.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise own.error("activation_scheme", "'dynamic' or 'static'", scheme)
    if own.get("weight_block_size") is None:
        raise ValueError(
            f"{own.where}: no weight_block_size: scales of whole tensors are not supported; "
            f"supported: {_READ}"
        )
    rows, columns = _read_block(own, "weight_block_size")
    skipped = own.name("modules_to_not_convert", "ignored_layers")
    return Quantization(FP8, rows, columns, _read_names(own, skipped), scheme)


def _read_compressed(own: Fields) -> Quantization:
    own.only(
        "format", "float-quantized", "naive-quantized", default="float-quantized", feature="packed weights"
    )
    own.inert("quantization_status", "global_compression_ratio", "version")
    for key in ("sparsity_config", "transform_config"):
        settings = own.object(key)
        if settings is not None and settings.raw.get("format", "dense") not in ("dense", None):
            raise ValueError(f"{settings.where} is not supported; supported: dense")
        if key == "transform_config" and settings is not None and settings.raw:
            raise ValueError(f"{settings.where}: transforms are not supported")
    groups = own.object("config_groups")
    if groups is None or len(groups.raw) != 1:
        count = 0 if groups is None else len(groups.raw)
        raise ValueError(f"{own.where}: {count} config_groups are not supported; supported: one")
    [name] = groups.raw
    group = groups.object(name)
    if group is None or (weights := group.object("weights")) is None:
        raise ValueError(f"{groups.where}: {name} quantises no weights")
    if (targets := group.get("targets")) != ["Linear"]:
        raise group.error("targets", "['Linear']", targets)
    group.only("format", None, "float-quantized", "naive-quantized", feature="packed weights")
    # Activations are not quantised here.
    group.inert("output_activations")
    inputs = group.object("input_activations")
    activations = "none" if inputs is None else "dynamic" if inputs.raw.get("dynamic") else "static"
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
    return Quantization(COMPRESSED, rows, columns, _read_names(own, "ignore"), activations)


def _read_block(own: Fields, key: str) -> tuple[int, int]:
    block = own.get(key)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(is_int(size) and 1 <= size <= MAX_SIZE for size in sizes):
        raise own.error(key, "a block's outputs and inputs, such as [128, 128]", block)
    return sizes[0], sizes[1]


def _read_names(own: Fields, key: str) -> tuple[str, ...]:
    names = own.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise own.error(key, "a list of modules", names)
    for name in names:
        if name.startswith("re:"):
            _check_pattern(own, key, name[3:])
    return tuple(names)


def _check_pattern(own: Fields, key: str, pattern: str) -> None:
    """Refuses what is no regular expression, or could take very long to match."""
    repeats = re.findall(r"[*+{]", re.sub(r"\\.", "", pattern))
    if len(pattern) > _MAX_PATTERN or len(repeats) > _MAX_REPEATS or re.search(r"\)[*+{?]", pattern):
        wanted = f"patterns of at most {_MAX_REPEATS} repetitions, none of them of a group"
        raise own.error(key, wanted, pattern)
    try:
        re.compile(pattern)
    except re.error as error:
        raise own.error(key, f"regular expressions ({error})", pattern) from error
