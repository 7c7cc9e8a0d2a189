"""Parameters in FP8 or MXFP4: which of a module's they are, and what stands in their place."""

from collections import defaultdict
from collections.abc import Mapping
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config.quantization import Quantization
from jetspec_jax.models.scale_key import shared_axes
from pallas_kernels.mxfp4 import BLOCK, BLOCK_BYTES, Mxfp4
from pallas_kernels.quantized import FP8, Quantized, scale_shape
from pallas_kernels.weights import Narrow

#: Where a parameter is in the nested weights.
Path = tuple[str | int, ...]

#: The names of what a quantised parameter consists of.
VALUES, SCALES = "values", "scales"
#: What the name of an axis adds where its blocks are meant. An axis with one block has the other name.
BLOCKS, ONE_BLOCK = "_blocks", "one_block"

# The weights of products, but for those of routers, embeddings and logits, which no file quantises.
_PRODUCTS = frozenset(
    {
        *("qkv_proj", "qk_proj", "o_proj", "g_proj", "gate_up_proj", "down_proj", "fc"),
        *("in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_qkvz", "out_proj"),
    }
)


# Of experts' matrices the axis that products sum over, along which a file in MXFP4 has its blocks.
_PACKED_AXIS = 1


class QuantizedParam(nnx.Module):
    """What stands in the place of a parameter that is quantised: two parameters."""

    def __init__(self, values: Any, scales: Any, block: tuple[int, ...], axes: tuple[str, ...]):
        """Makes it of arrays, or of their shapes and types.

        Args:
            values: Of type `FP8`, or the bytes of MXFP4.
            scales: One for each block.
            block: Weights that share a scale along each axis.
            axes: Names of the weights' axes.
        """
        if values.dtype == FP8:
            own, of_scales = axes, _axes_of_blocks(axes, scales.shape, block)
        else:
            others, packed = [*axes], axes[_PACKED_AXIS]
            del others[_PACKED_AXIS]
            of_scales = (*others, f"{packed}{BLOCKS}")
            own = (*of_scales, "block_bytes")
        self.values, self.scales = nnx.Param(values, axes=own), nnx.Param(scales, axes=of_scales)
        self.block = block

    def __getitem__(self, index: Any) -> Narrow:
        """All of it, as products take it."""
        assert index is ..., "a part of a quantised parameter"
        return _record(self.values[...], self.scales[...], self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        if self.values.dtype == FP8:
            return self.values.shape
        *others, cells = self.scales.shape
        return (*others[:_PACKED_AXIS], BLOCK * cells, *others[_PACKED_AXIS:])


def is_quantized(path: Path) -> bool:
    """Whether a parameter is a part of one that is quantised."""
    return path[-1] in (VALUES, SCALES)


def blocks_of(module: Any, quantization: Quantization) -> Mapping[Path, tuple[int, ...]]:
    """Which parameters of a module are quantised, and how many values share a scale along each of their axes.

    Args:
        module: With none of them quantised.
        quantization: Which are.

    Raises:
        ValueError: Of the matrices that make up a parameter some would be quantised and others not; or rows
            of values are no whole blocks of MXFP4.
    """
    entries = defaultdict(list)
    for key in module.KEYS:
        entries[key.path].append(key)
    if quantization.is_mxfp4:
        return _packed_blocks(module, {path for path, keys in entries.items() if any(k.scales for k in keys)})
    found, mixed = {}, []
    for key_path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        path: Path = tuple(key_path)  # pyright: ignore[reportAssignmentType]
        if path[-1] not in _PRODUCTS:
            continue
        indices, shape = [part for part in path if isinstance(part, int)], parameter.shape
        own = entries[".".join("{}" if isinstance(part, int) else part for part in path)]
        left = {}
        for key in own:
            for name in (one.name for one in key.of(indices, shape)):
                left.setdefault(key.form, {})[name] = _skips(name, module.PREFIXES, quantization)
        # A file has one of the forms, and names of modules that it has not are not listed.
        skipped = [all(names.values()) for names in left.values()]
        for names in left.values():
            if any(names.values()) and not all(names.values()):
                kept = [name for name, skips in names.items() if skips]
                mixed.append(f"{kept[0]} and not {next(name for name in names if name not in kept)}")
        if not any(skipped):
            one_each = [key.of(indices, shape)[0] for key in own]
            shares = [shared_axes(key, shape, quantization) for key in one_each]
            found[path] = tuple(gcd(*sizes) for sizes in zip(*shares, strict=True))
    if mixed:
        more = f", and {len(mixed) - 1} more like it" if len(mixed) > 1 else ""
        raise ValueError(
            f"quantization_config leaves out {mixed[0]}{more}; matrices that are multiplied at once must all "
            "be quantised or none"
        )
    return found


def quantize(module: Any, blocks: Mapping[Path, tuple[int, ...]], quantization: Quantization | None) -> None:
    """Quantises parameters of a module, or shapes that stand in their place.

    Args:
        module: The module.
        blocks: Which parameters, as `blocks_of` says it.
        quantization: How.
    """
    for path, block in blocks.items():
        *way, last = path
        place, name = module, str(last)
        for part in way:
            place = place[part] if isinstance(part, int) else getattr(place, part)
        parameter = getattr(place, name)
        weights, axes = parameter.get_value(), tuple(parameter.get_metadata()["axes"])
        packed = quantization is not None and quantization.is_mxfp4
        if not isinstance(weights, jax.ShapeDtypeStruct):
            made = Mxfp4.of(weights, _PACKED_AXIS) if packed else Quantized.of(weights, block)
            values, scales = made.values, made.scales
        elif packed:
            cells = packed_cells(weights.shape)
            values = jax.ShapeDtypeStruct((*cells, BLOCK_BYTES), jnp.uint8)
            scales = jax.ShapeDtypeStruct(cells, jnp.uint8)
        else:
            values = jax.ShapeDtypeStruct(weights.shape, FP8)
            scales = jax.ShapeDtypeStruct(scale_shape(weights.shape, block), jnp.float32)
        setattr(place, name, QuantizedParam(values, scales, block, axes))


def packed_cells(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of experts' weights in MXFP4: the packed axis comes last.

    Raises:
        ValueError: That axis does not consist of whole blocks.
    """
    others, size = [*shape], shape[_PACKED_AXIS]
    del others[_PACKED_AXIS]
    if size % BLOCK:
        raise ValueError(f"rows of {size} values are no whole blocks of {BLOCK}, as MXFP4 has them")
    return (*others, size // BLOCK)


def widened(weights: dict[str, Any], blocks: Mapping[Path, tuple[int, ...]]) -> dict[str, Any]:
    """Nested weights with what is quantised in float32, as if it never had been.

    Args:
        weights: The weights, or some of them.
        blocks: What is quantised; only what is among the weights is looked at.
    """
    flat: dict[Path, Any] = dict(nnx.traversals.flatten_mapping(weights))
    for path, block in blocks.items():
        if (values := flat.pop((*path, VALUES), None)) is not None:
            scales = flat.pop((*path, SCALES))
            own = _record(jnp.asarray(values), jnp.asarray(scales), block)
            flat[path] = own.widened(jnp.dtype(jnp.float32))
    return nnx.traversals.unflatten_mapping(flat)


def _record(values: jax.Array, scales: jax.Array, block: tuple[int, ...]) -> Narrow:
    """Values and scales as products take them; their type tells which format they are of."""
    if values.dtype == FP8:
        return Quantized(values, scales, block)
    return Mxfp4(values, scales, _PACKED_AXIS)


def _packed_blocks(module: Any, names: set[str]) -> Mapping[Path, tuple[int, ...]]:
    """The parameters of some dotted paths, which MXFP4 packs, and their blocks."""
    found = {}
    for key_path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        path: Path = tuple(key_path)  # pyright: ignore[reportAssignmentType]
        if ".".join("{}" if isinstance(part, int) else part for part in path) in names:
            packed_cells(parameter.shape)
            found[path] = tuple(BLOCK if i == _PACKED_AXIS else 1 for i in range(len(parameter.shape)))
    return found


def _skips(name: str, prefixes: tuple[str, ...], quantization: Quantization) -> bool:
    """Whether a matrix is left out, under any prefix that files may have."""
    first = prefixes[0]
    module = name.removesuffix(".weight")
    rest = module.removeprefix(first)
    spelled = {module, *(prefix + rest for prefix in prefixes)} if module.startswith(first) else {module}
    return any(map(quantization.skips, spelled))


def _axes_of_blocks(axes: tuple[str, ...], shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(
        name if own == 1 else ONE_BLOCK if count == 1 else f"{name}{BLOCKS}"
        for name, count, own in zip(axes, shape, block, strict=True)
    )
