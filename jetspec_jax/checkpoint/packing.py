"""Decides whether experts in MXFP4 stay packed on the devices or are widened when they are read."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.checkpoint.hub import find_headers
from jetspec_jax.checkpoint.orbax import is_orbax
from jetspec_jax.checkpoint.reading import Headers
from jetspec_jax.checkpoint.source import PACKED, WIDENED, Source
from jetspec_jax.checkpoint.tensor_plan import expected_parameters
from jetspec_jax.config import ModelConfig
from jetspec_jax.device.memory import TARGET_WEIGHTS, fits, weight_bytes
from jetspec_jax.device.partition import cut_blocks
from jetspec_jax.models import family_of, kept_packed
from jetspec_jax.models.quantized import is_quantized

#: The faster choice if both fit into memory, by JAX's platform name. On a CPU, each product widens packed
#: weights again. On a GPU trees are verified in less time with packed experts; a plain step takes 4 % more.
FASTER = {"gpu": PACKED, "cpu": WIDENED}
# The largest share of a device's free memory for widened weights; stores and programs need the rest.
_SHARE = 0.8

_log = logging.getLogger("jetspec_jax")


def holds_mxfp4(config: ModelConfig, headers: Callable[[], Headers]) -> bool:
    """Whether a checkpoint has experts in MXFP4 that can stay packed; reads ``headers`` only if needed."""
    if not any(key.scales for key in family_of(config).KEYS):
        return False
    names = headers().tensors
    try:
        parameters = expected_parameters(kept_packed(config), names)
    except ValueError:  # rows do not consist of whole blocks; the reader reports each tensor
        return False
    keys = (parameter.forms[0][0] for parameter in parameters if is_quantized(parameter.path))
    return any(key.name in names for key in keys)


def with_storage(source: Source, *meshes: Mesh | None) -> Source:
    """The source of a target with ``mxfp4`` decided, "packed" or "widened", and ``fp8_activations``.

    Raises ValueError if it cannot be "packed" as the source says.
    """
    source = with_activations(source, *meshes)
    if source.mxfp4 == WIDENED:
        return source
    wide = replace(source, mxfp4=WIDENED)
    config, dtype, folder = wide.target_config, source.weights_dtype, source.config_folder
    problem = None
    headers = functools.partial(find_headers, source.path_or_id, folder)
    if is_orbax(folder) or not holds_mxfp4(config, headers):
        problem = f"{source.path_or_id} holds no experts in MXFP4"
    elif dtype == jnp.float16:
        problem = "float16 does not hold all of its values: use bfloat16 or float32"
    if problem is not None:
        if source.mxfp4 == PACKED:
            raise ValueError(f"mxfp4={PACKED!r}: {problem}")
        return wide
    packed = replace(source, mxfp4=PACKED)
    if source.mxfp4 == PACKED:
        return packed
    uncut = not any(cut_blocks(packed.target_config, mesh) for mesh in meshes if mesh is not None)
    if uncut and FASTER.get(jax.default_backend()) == PACKED:
        return packed
    needed = {mesh: weight_bytes(config, dtype, mesh) for mesh in meshes or (None,)}
    if all(fits({TARGET_WEIGHTS: round(size / _SHARE)}, mesh) for mesh, size in needed.items()):
        return wide
    most = max(needed.values()) / 2**30
    _log.warning("experts stay in MXFP4: widened, the target's weights would take %.1f GiB of a device", most)
    return packed


def with_activations(source: Source, *meshes: Mesh | None) -> Source:
    """The source with ``fp8_activations`` decided: no instead of None if a mesh cuts what shares a scale."""
    if source.fp8_activations is not None:
        return source
    kept = replace(source, fp8_activations=False)

    def cuts(mesh: Mesh | None) -> bool:
        return mesh is not None and cut_blocks(source.config, mesh) != cut_blocks(kept.config, mesh)

    return kept if any(map(cuts, meshes)) else source
