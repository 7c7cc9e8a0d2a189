"""Loads targets and draft heads with their weights, from a local folder or the Hugging Face hub."""

import functools
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.checkpoint.chat_template import read_chat_template
from jetspec_jax.checkpoint.orbax import is_orbax, read_orbax_weights
from jetspec_jax.checkpoint.packing import with_activations, with_storage
from jetspec_jax.checkpoint.pairs import draft_head_at
from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.checkpoint.source import AUTO, Source
from jetspec_jax.checkpoint.tokenizer import load_named_tokenizer, load_tokenizer, read_eos_token_ids
from jetspec_jax.config import DraftHeadConfig, ModelConfig, check_head_fits
from jetspec_jax.device.groups import Meshes, describe_meshes
from jetspec_jax.device.memory import (
    HEAD_WEIGHTS,
    TARGET_WEIGHTS,
    Bytes,
    check_memory,
    weight_bytes,
    with_more_devices,
)
from jetspec_jax.device.mesh import as_mesh, describe_mesh, without_mesh
from jetspec_jax.device.partition import check_partition, is_split, why_whole
from jetspec_jax.device.peers import say_apart
from jetspec_jax.device.processes import check_devices, compare, spans
from jetspec_jax.models import Weights, quantization_of
from jetspec_jax.progress import log_once
from jetspec_jax.sampling.grammar import Vocabulary
from pallas_kernels import shards
from pallas_kernels.dispatch import fp8_problem

_log = logging.getLogger("jetspec_jax")


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target.

    Attributes:
        config: The model's geometry.
        weights: The parameters, a plain pytree.
        eos_token_ids: Tokens that end a sequence.
        tokenizer: A transformers tokenizer; None if the checkpoint has none.
        mesh: The devices that share the weights, as for `load_target`.
        copies: Replicas of the target on other devices; calls that decode use all of them.
        process: The id of the process that loaded the target: in a fork of it JAX would hang.
    """

    config: ModelConfig
    weights: Weights
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    mesh: Mesh | None = None
    copies: "tuple[Target, ...]" = ()
    process: int = field(default_factory=os.getpid, init=False, repr=False)

    def __post_init__(self) -> None:
        _complete_axes(self)

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the weights."""
        return self.weights["embed_tokens"].dtype

    @property
    def meshes(self) -> Meshes:
        """The meshes of the target and of its copies."""
        return self.mesh, *(copy.mesh for copy in self.copies)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens as llguidance reads them; raises the errors of `Vocabulary`."""
        return Vocabulary(self.tokenizer, self.config.vocab_size, self.eos_token_ids)

    def __repr__(self) -> str:
        has = "a" if self.tokenizer is not None else "no"
        where = "" if self.mesh is None else f", on {describe_meshes(self.meshes)}"
        size = _size(self.config)
        return f"Target({self.config.model_type}, {size}, {self.dtype}, with {has} tokenizer{where})"


@dataclass(frozen=True, eq=False)
class Head:
    """A loaded draft head.

    Attributes:
        config: The head's geometry.
        weights: The parameters, a plain pytree.
        mesh: The devices that share the weights, as for `load_target`.
        copies: Replicas of the head on the devices of the target's copies.
        allow_nonfinite: Whether weights may be NaN or infinite; else decoding with them is refused.
    """

    config: DraftHeadConfig
    weights: Weights
    mesh: Mesh | None = None
    copies: "tuple[Head, ...]" = ()
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        _complete_axes(self)

    @property
    def meshes(self) -> Meshes:
        """The meshes of the head and of its copies."""
        return self.mesh, *(copy.mesh for copy in self.copies)

    def check_finite(self) -> None:
        """Checks the weights, once.

        Raises:
            ValueError: Parameters are NaN or infinite, and the head does not allow it. The first are named.
        """
        if self._nonfinite and not self.allow_nonfinite:
            raise ValueError(
                f"{len(self._nonfinite)} parameters of the draft head are NaN or infinite "
                f"({', '.join(self._nonfinite[:3])}), so it drafts garbage; allow_nonfinite=True takes it"
            )

    @functools.cached_property
    def _nonfinite(self) -> list[str]:
        finite = jax.device_get(_finite(self.weights))
        places = jax.tree_util.tree_leaves_with_path(finite)
        return [jax.tree_util.keystr(path, simple=True, separator=".") for path, fine in places if not fine]

    def __repr__(self) -> str:
        attention = "causal" if self.config.causal else "bidirectional"
        return f"Head({_size(self.config.layers)}, block size {self.config.block_size}, {attention})"


@jax.jit
def _finite(weights: Weights) -> Any:
    return jax.tree.map(lambda array: jnp.isfinite(array).all(), weights)


def _complete_axes(model: Target | Head) -> None:
    # Meshes for training have further axes and are not changed.
    if model.mesh is not None and set(model.mesh.axis_names) <= set(shards.ALL):
        object.__setattr__(model, "mesh", as_mesh(model.mesh))


def _size(config: ModelConfig) -> str:
    layers = f"{config.num_layers} layer{'s' * (config.num_layers != 1)}"
    return f"{layers} of {config.hidden_size}, vocabulary of {config.vocab_size:,}"


@without_mesh
def load_target(
    path_or_id: str | Path,
    *,
    dtype: Any = "auto",
    mesh: Mesh | None = None,
    ignore_config_keys: Collection[str] = (),
    allow_nonfinite: bool = False,
    tokenizer: str | Path | None = None,
    chat_template: str | Path | None = None,
    mxfp4: str = AUTO,
    fp8_activations: bool | None = None,
) -> Target:
    """Loads a target from a local folder, a GGUF file, the Hugging Face hub, or a named pair.

    Args:
        path_or_id: As in `Source`.
        dtype: As in `Source`.
        mesh: The devices that share the weights: a mesh with the axis "expert", "tensor" or both. None means
            one device.
        ignore_config_keys: As in `Source`.
        allow_nonfinite: As in `Source`.
        tokenizer: As in `Source`.
        chat_template: A file, "chatml-tools" (ChatML with tools) or a Jinja text, which replaces the
            tokenizer's template.
        mxfp4: Whether experts in MXFP4 stay "packed" on the devices or are "widened" when they are read.
            "auto" chooses the faster, or "packed" if memory is short.
        fp8_activations: Whether products with FP8 weights also quantise their input to FP8. None means yes in
            16-bit types, unless the GPU has no FP8 arithmetic or a mesh cuts activations that share a scale.
            True warns that it has no effect where no weights are in FP8 or the config excludes activations.

    Raises:
        FileNotFoundError: The folder or file does not exist, or the hub cannot be reached.
        CheckpointError: A file is damaged, does not fit a supported family, or has NaN or infinities. All
            wrong tensors are listed.
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
        DeviceMemoryError: A device cannot hold its shard of the weights.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    source = Source(
        path_or_id, dtype, ignore_config_keys, allow_nonfinite, tokenizer, template, mxfp4, fp8_activations
    )
    return read_target(source, None if mesh is None else as_mesh(mesh))


@without_mesh
def load_draft_head(
    path_or_id: str | Path,
    *,
    dtype: Any = "auto",
    target: Target | None = None,
    mesh: Mesh | None = None,
    ignore_config_keys: Collection[str] = (),
    allow_nonfinite: bool = False,
    fp8_activations: bool | None = None,
) -> Head:
    """Loads a draft head from a local folder or from the Hugging Face hub.

    Args:
        path_or_id: A folder, a hub id such as ``JetSpec/jetspec-qwen3-8b``, or the name of a pair:
            "demo" or "smollm2".
        dtype: As in `Source`.
        target: The target of the head. The head is checked against it before weights are read, and is placed
            on the devices of the target and of its copies.
        mesh: As for `load_target`; a head that cannot be sharded is replicated on every device.
        ignore_config_keys: As in `Source`.
        allow_nonfinite: As in `Source`.
        fp8_activations: As for `load_target`.

    Raises:
        FileNotFoundError: The folder does not exist, or the hub cannot be reached.
        CheckpointError: A file is damaged, does not fit a supported head, or has NaN or infinities.
        ValueError: The head does not fit the target; or as for `load_target`.
        DeviceMemoryError: A device cannot hold its shard of the weights.
    """
    if target is not None and not isinstance(target, Target):
        raise TypeError(f"expected a Target, as load_target returns it, not {type(target).__name__}")
    place = draft_head_at(path_or_id)
    source = Source(place, dtype, ignore_config_keys, allow_nonfinite, fp8_activations=fp8_activations)
    return read_draft_head(source, target, None if mesh is None else as_mesh(mesh))


def read_target(source: Source, mesh: Mesh | None = None, *others: Mesh | None) -> Target:
    """Reads the target of a source, and its copies on other meshes; raises as `load_target` does."""
    config, dtype = source.partition_config, source.weights_dtype
    if spans(mesh):
        parts = {"the mesh": describe_mesh(mesh), "the target's config": config, "its dtype": str(dtype)}
        compare(parts | {"fp8_activations": source.fp8_activations}, "a target", "a target")
    if mesh is not None:
        check_devices(mesh)
    check_partition(config, mesh)
    source = with_storage(source, mesh, *others)
    config = source.target_config
    check_partition(config, mesh)

    def needs(mesh: Mesh | None) -> Bytes:
        return {TARGET_WEIGHTS: weight_bytes(config, dtype, mesh)}

    say_apart((mesh, *others))
    for replica in (mesh, *others):
        others_need = functools.partial(with_more_devices, config, replica, needs)
        check_memory(functools.partial(needs, replica), mesh=replica, others=others_need)
    _warn_of_fp8(source, config, mesh)
    folder = source.folder
    named = source.tokenizer
    # The tokenizer is loaded first, because reading the weights takes longer.
    tokenizer = load_tokenizer(folder) if named is None else load_named_tokenizer(named)
    if source.chat_template is not None:
        if tokenizer is None:
            raise ValueError(
                f"chat_template needs a tokenizer, and {folder} has none; pass the argument tokenizer"
            )
        tokenizer.chat_template = source.chat_template
    eos = read_eos_token_ids(folder, tokenizer, config.vocab_size)
    target = Target(config, _read(source, config, mesh), eos, tokenizer, mesh)
    copies = tuple(replace(target, weights=_read(source, config, other), mesh=other) for other in others)
    return replace(target, copies=copies)


def read_draft_head(source: Source, target: Target | None = None, mesh: Mesh | None = None) -> Head:
    """Reads the draft head of a source onto its target's devices; raises as `load_draft_head` does."""
    source = with_activations(source, *((mesh,) if target is None else target.meshes))
    config = source.head_config
    if target is not None:
        check_head_fits(config, target.config)
        if mesh is not None and mesh != target.mesh:
            raise ValueError(
                f"mesh is {describe_mesh(mesh)}, and the target lies on {describe_mesh(target.mesh)}"
            )
        mesh = target.mesh
        _warn_of_formats(config, target.config)
    _warn_of_fp8(source, config, mesh)
    dtype = source.weights_dtype
    if mesh is not None:
        check_devices(mesh)
        if not is_split(config, mesh):
            _log.warning("the draft head stays whole on every device: %s", why_whole(config, mesh))
    if spans(mesh):
        parts = {"the mesh": describe_mesh(mesh), "the draft head's config": config, "its dtype": str(dtype)}
        compare(parts, "a draft head", "a draft head")
    others = () if target is None else target.meshes[1:]
    for replica in (mesh, *others):
        check_memory(
            lambda replica=replica: {HEAD_WEIGHTS: weight_bytes(config, dtype, replica)}, mesh=replica
        )
    head = Head(config, _read(source, config, mesh), mesh, allow_nonfinite=source.allow_nonfinite)
    copies = tuple(replace(head, weights=_read(source, config, other), mesh=other) for other in others)
    return replace(head, copies=copies)


def _warn_of_formats(head: DraftHeadConfig, target: ModelConfig) -> None:
    """Warns if the target's quantisation differs from the head's, or from the head's training target."""
    rounding, target_rounding = head.layers.rounding, target.rounding
    plain = "not quantised"
    if head.target_format != target_rounding:
        _log.warning(
            "the target is %s, and the draft head was trained with a target that is %s: fewer tokens may be "
            "accepted per round",
            target_rounding or plain,
            head.target_format or plain,
        )
    if rounding and rounding != target_rounding:
        _log.warning("the draft head is %s, the target %s", rounding, target_rounding or plain)


def _warn_of_fp8(source: Source, config: ModelConfig | DraftHeadConfig, mesh: Mesh | None) -> None:
    """Warns if FP8 saves memory but no time on these devices, and if a checkpoint's scales are not used."""
    quantization = quantization_of(config)
    if quantization is None or quantization.is_mxfp4:
        return
    if problem := fp8_problem(mesh and mesh.local_devices[0]):
        _log.warning("%s: weights in FP8 are widened by XLA at every product, and save memory only", problem)
    if quantization.fp8_activations and quantization.activations == "static":
        text = "activations are quantised with dynamic scales, not with the static ones"
        log_once(logging.WARNING, f"{source.path_or_id}: {text}")


def _read(source: Source, config: ModelConfig | DraftHeadConfig, mesh: Mesh | None) -> Weights:
    read = read_orbax_weights if is_orbax(source.folder) else read_weights
    return read(source.folder, config, source.weights_dtype, mesh, allow_nonfinite=source.allow_nonfinite)
