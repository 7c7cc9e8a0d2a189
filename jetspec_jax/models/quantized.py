"""Parameters in FP8: which of a module's they are, and what stands in their place."""

from collections import defaultdict
from collections.abc import Mapping
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config.quantization import Quantization
from jetspec_jax.models.scale_key import shared_axes
from pallas_kernels.quantized import FP8, Quantized, scale_shape

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


class QuantizedParam(nnx.Module):
    """What stands in the place of a parameter that is quantised: two parameters."""

    def __init__(self, values: Any, scales: Any, block: tuple[int, ...], axes: tuple[str, ...]):
        """Makes it of arrays, or of their shapes and types.

        Args:
            values: Of type `FP8`.
            scales: One for each block.
            block: Values that share a scale along each axis.
            axes: Names of the values' axes.
        """
        self.values = nnx.Param(values, axes=axes)
        self.scales = nnx.Param(scales, axes=_axes_of_blocks(axes, scales.shape, block))
        self.block = block

    def __getitem__(self, index: Any) -> Quantized:
        """All of it, as products take it."""
        assert index is ..., "a part of a quantised parameter"
        return Quantized(self.values[...], self.scales[...], self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape


def blocks_of(module: Any, quantization: Quantization) -> Mapping[Path, tuple[int, ...]]:
    """Which parameters of a module are quantised, and how many values share a scale along each of their axes.

    Args:
        module: With none of them quantised.
        quantization: Which are.

    Raises:
        ValueError: Of the matrices that make up a parameter some would be quantised and others not.
    """
    entries = defaultdict(list)
    for key in module.KEYS:
        entries[key.path].append(key)
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


def quantize(module: Any, blocks: Mapping[Path, tuple[int, ...]]) -> None:
    """Quantises parameters of a module, or shapes that stand in their place."""
    for path, block in blocks.items():
        *way, last = path
        place, name = module, str(last)
        for part in way:
            place = place[part] if isinstance(part, int) else getattr(place, part)
        parameter = getattr(place, name)
        weights, axes = parameter.get_value(), tuple(parameter.get_metadata()["axes"])
        if isinstance(weights, jax.ShapeDtypeStruct):
            values = jax.ShapeDtypeStruct(weights.shape, FP8)
            scales = jax.ShapeDtypeStruct(scale_shape(weights.shape, block), jnp.float32)
        else:
            made = Quantized.of(weights, block)
            values, scales = made.values, made.scales
        setattr(place, name, QuantizedParam(values, scales, block, axes))


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
            own = Quantized(jnp.asarray(values), jnp.asarray(scales), block)
            flat[path] = own.widened(jnp.dtype(jnp.float32))
    return nnx.traversals.unflatten_mapping(flat)


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
