"""Quantised parameters of a module, in FP8 or MXFP4."""

from collections import defaultdict
from collections.abc import Mapping
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout

from jetspec_jax.config.quantization import Quantization
from jetspec_jax.models.key_table import ParameterPath, key_path, parameters_of
from jetspec_jax.models.mxfp4 import packed_shapes
from jetspec_jax.models.scale_key import shared_axes
from pallas_kernels.mxfp4 import BLOCK, Mxfp4
from pallas_kernels.quantized import FP8, Quantized, scale_shape
from pallas_kernels.weights import Narrow

#: The two parts of a quantised parameter.
VALUES, SCALES = "values", "scales"
#: The suffix of the name of an axis of blocks; an axis with one block is called `ONE_BLOCK`.
BLOCKS, ONE_BLOCK = "_blocks", "one_block"

# The weights of products, without routers, embeddings and output heads, which files never quantise.
_PRODUCTS = frozenset(
    {
        *("qkv_proj", "qk_proj", "o_proj", "g_proj", "gate_up_proj", "down_proj", "fc"),
        *("in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_qkvz", "out_proj"),
    }
)


# The contracted axis of experts' matrices, along which MXFP4 has its blocks.
_PACKED_AXIS = 1


class QuantizedParam(nnx.Module):
    """A quantised parameter: values and scales as two parameters.

    Values whose products quantise rows have as metadata ``memory_order``, see `contracted_last`.
    """

    def __init__(
        self,
        values: Any,
        scales: Any,
        block: tuple[int, ...],
        axes: tuple[str, ...],
        row_group: int | None = None,
    ):
        """Takes arrays, or their shapes and types; ``block`` and ``axes`` are those of the weights.

        ``row_group`` is that of `Quantized`.
        """
        order = None if row_group is None else contracted_last(axes)
        if values.dtype == FP8:
            value_axes, scale_axes = axes, _axes_of_blocks(axes, scales.shape, block)
        else:
            others, packed = [*axes], axes[_PACKED_AXIS]
            del others[_PACKED_AXIS]
            scale_axes = (*others, f"{packed}{BLOCKS}")
            value_axes = (*scale_axes, "block_bytes")
        self.values = nnx.Param(values, axes=value_axes, memory_order=order)
        self.scales = nnx.Param(scales, axes=scale_axes)
        self.block, self.row_group = block, row_group

    def __getitem__(self, index: Any) -> Narrow:
        """The record of values and scales that products accept; the index must be ``...``."""
        assert index is ..., "a part of a quantised parameter"
        return _record(self.values[...], self.scales[...], self.block, self.row_group)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        if self.values.dtype == FP8:
            return self.values.shape
        *others, cells = self.scales.shape
        return (*others[:_PACKED_AXIS], BLOCK * cells, *others[_PACKED_AXIS:])


def is_quantized(path: ParameterPath) -> bool:
    """Whether a path leads to the values or the scales of a quantised parameter."""
    return path[-1] in (VALUES, SCALES)


def blocks_of(module: Any, quantization: Quantization) -> Mapping[ParameterPath, tuple[int, ...]]:
    """The quantised parameters of a module, each with the number of values per scale along each axis.

    All matrices of a fused parameter must be quantised, or none.
    """
    entries = defaultdict(list)
    for key in module.KEYS:
        entries[key.path].append(key)
    if quantization.is_mxfp4:
        return {
            path: packed_block(parameter.shape)
            for path, parameter in parameters_of(module)
            if any(key.scales for key in entries[key_path(path)])
        }
    found, mixed = {}, []
    for path, parameter in parameters_of(module):
        if path[-1] not in _PRODUCTS:
            continue
        indices, shape = [part for part in path if isinstance(part, int)], parameter.shape
        keys = entries[key_path(path)]
        by_form = {}
        for key in keys:
            for name in (entry.name for entry in key.of(indices, shape)):
                by_form.setdefault(key.form, {})[name] = _skips(name, module.PREFIXES, quantization)
        # A file has one form, and the config does not list modules of other forms.
        skipped = [all(names.values()) for names in by_form.values()]
        for names in by_form.values():
            if any(names.values()) and not all(names.values()):
                kept = [name for name, skips in names.items() if skips]
                mixed.append(f"{kept[0]} and not {next(name for name in names if name not in kept)}")
        if not any(skipped):
            firsts = [key.of(indices, shape)[0] for key in keys]
            shares = [shared_axes(key, shape, quantization) for key in firsts]
            found[path] = tuple(gcd(*sizes) for sizes in zip(*shares, strict=True))
    if mixed:
        more = f", and {len(mixed) - 1} more like it" if len(mixed) > 1 else ""
        raise ValueError(
            f"quantization_config leaves out {mixed[0]}{more}; the matrices of a fused parameter must all be "
            "quantised, or none"
        )
    return found


def quantize(
    module: Any, blocks: Mapping[ParameterPath, tuple[int, ...]], quantization: Quantization | None
) -> None:
    """Replaces parameters of a module, or their shapes, by quantised ones; see `blocks_of`."""
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
            others, packed_size = [*weights.shape], weights.shape[_PACKED_AXIS]
            del others[_PACKED_AXIS]
            shapes = packed_shapes((*others, packed_size))
            values, scales = (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes)
        else:
            values = jax.ShapeDtypeStruct(weights.shape, FP8)
            scales = jax.ShapeDtypeStruct(scale_shape(weights.shape, block), jnp.float32)
        row_group = None if quantization is None else quantization.row_group
        setattr(place, name, QuantizedParam(values, scales, block, axes, row_group))


def contracted_last(axes: tuple[str, ...]) -> tuple[int, ...]:
    """The memory order of a matrix's axes, from major to minor, with the contracted axes last.

    Tensor cores multiply two FP8 operands only in this order.
    """
    first = int(axes[0] == "expert")
    count = 1 if axes[first] == "embed" else len(axes) - 1 - first
    others = [i for i in range(len(axes)) if not first <= i < first + count]
    return (*others, *range(first, first + count))


def stored_in_order(values: jax.Array, order: tuple[int, ...] | None) -> jax.Array:
    """The array with a memory order of its axes, from major to minor; None keeps the array."""
    return values if order is None else jax.device_put(values, Format(Layout(order), values.sharding))


def packed_block(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The block of experts' weights in MXFP4; refuses rows that do not consist of whole blocks."""
    packed_shapes((shape[_PACKED_AXIS],))
    return tuple(BLOCK if axis == _PACKED_AXIS else 1 for axis in range(len(shape)))


def widened(weights: dict[str, Any], blocks: Mapping[ParameterPath, tuple[int, ...]]) -> dict[str, Any]:
    """Nested weights, or some of them, with quantised parameters converted to float32."""
    flat: dict[ParameterPath, Any] = dict(nnx.traversals.flatten_mapping(weights))
    for path, block in blocks.items():
        if (values := flat.pop((*path, VALUES), None)) is not None:
            scales = flat.pop((*path, SCALES))
            record = _record(jnp.asarray(values), jnp.asarray(scales), block)
            flat[path] = record.widened(jnp.dtype(jnp.float32))
    return nnx.traversals.unflatten_mapping(flat)


def _record(
    values: jax.Array, scales: jax.Array, block: tuple[int, ...], row_group: int | None = None
) -> Narrow:
    """The record that products accept; the type of the values tells the format."""
    if values.dtype == FP8:
        return Quantized(values, scales, block, row_group)
    return Mxfp4(values, scales, _PACKED_AXIS)


def _skips(name: str, prefixes: tuple[str, ...], quantization: Quantization) -> bool:
    """Whether a matrix is not quantised, under any prefix that files may have."""
    first = prefixes[0]
    module = name.removesuffix(".weight")
    rest = module.removeprefix(first)
    spelled = {module, *(prefix + rest for prefix in prefixes)} if module.startswith(first) else {module}
    return any(map(quantization.skips, spelled))


def _axes_of_blocks(axes: tuple[str, ...], shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(
        name if size == 1 else ONE_BLOCK if count == 1 else f"{name}{BLOCKS}"
        for name, count, size in zip(axes, shape, block, strict=True)
    )
