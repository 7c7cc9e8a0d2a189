"""Readers of config keys that several model families share."""

from collections.abc import Collection
from typing import Any

from jetspec_jax.config.fields import MAX_HEADS, MAX_LAYERS, MAX_TOKENS, Fields, is_int
from jetspec_jax.config.geometry import Experts, Rope
from jetspec_jax.config.rope import FULL, SLIDING, context_of


def read_decoder(fields: Fields, rope: Rope | None = None) -> dict[str, Any]:
    """The arguments of `ModelConfig` whose keys are the same in every family.

    The scaling of ``rope`` may extend the context.
    """
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "rms_norm_eps": fields.positive("rms_norm_eps"),
        "max_position_embeddings": context_of(fields, rope),
    }


def read_heads(fields: Fields, hidden_size: int | None = None) -> dict[str, Any]:
    """Head counts and head size, as arguments of `LayerConfig`.

    Given ``hidden_size``, ``head_dim`` defaults to its share of a query head, and ``num_key_value_heads`` to
    the number of query heads. Otherwise both keys are required.
    """
    heads = fields.integer("num_attention_heads", most=MAX_HEADS)
    default_kv_heads = default_head_dim = None
    if hidden_size is not None:
        default_kv_heads = heads
        if "head_dim" not in fields and hidden_size % heads:
            raise ValueError(
                f"{fields.where}: without head_dim, hidden_size {hidden_size} must be a multiple of "
                f"num_attention_heads {heads}"
            )
        default_head_dim = hidden_size // heads
    kv_heads = fields.integer("num_key_value_heads", most=MAX_HEADS, default=default_kv_heads)
    head_dim = fields.integer("head_dim", most=MAX_HEADS, default=default_head_dim)
    check_heads(fields.where, heads, kv_heads, head_dim)
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def read_num_layers(fields: Fields) -> int:
    """The number of decoder layers."""
    return fields.integer("num_hidden_layers", most=MAX_LAYERS)


def check_heads(where: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuses query heads that are no multiple of the KV heads, and odd head sizes."""
    if heads % kv_heads:
        raise ValueError(f"{where}: {heads} attention heads are no multiple of {kv_heads} KV heads")
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim {head_dim} is odd; rotary embeddings need pairs")


def check_top_k(fields: Fields, experts: Experts, *names: str) -> None:
    """Checks that a token is not routed to more experts than there are; ``names`` are the key's."""
    if experts.routing.top_k > experts.count:
        raise ValueError(
            f"{fields.where}: {fields.name(*names)} {experts.routing.top_k} of {experts.count} experts"
        )


def read_layer_types(
    fields: Fields, num_layers: int, surplus: int = 0, *, types: Collection[str] = (FULL, SLIDING)
) -> list[str] | None:
    """The type of each layer (``layer_types``); None if the key is absent.

    ``surplus`` is as in `Fields.layers`.
    """
    kinds = fields.layers("layer_types", num_layers, surplus=surplus)
    if kinds is None:
        return None
    if unknown := [kind for kind in kinds if kind not in types]:
        raise ValueError(f"{fields.where}: unsupported layer types {unknown} in layer_types")
    return kinds


def read_routed_layers(fields: Fields, num_layers: int) -> set[int]:
    """The layers with experts: every ``decoder_sparse_step``-th except those in ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(is_int(layer) and 0 <= layer < num_layers for layer in dense):
        raise fields.error("mlp_only_layers", "a list of layers", dense)
    return {layer for layer in range(num_layers) if (layer + 1) % step == 0} - set(dense)


def read_window(fields: Fields, slides: bool) -> int | None:
    """The window of sliding layers; None if ``slides`` is false, whatever the config holds."""
    fields.inert("sliding_window")
    return fields.integer("sliding_window", most=MAX_TOKENS) if slides else None


def read_late_windows(fields: Fields, num_layers: int) -> list[int | None]:
    """Each layer's window by Qwen's keys.

    With ``use_sliding_window``, layers from ``max_window_layers`` on slide.
    """
    slides = fields.flag("use_sliding_window")
    kinds = read_layer_types(fields, num_layers)
    fields.inert("sliding_window", "max_window_layers")
    if kinds is None:
        if not slides:
            return [None] * num_layers
        # Both keys are required: readers have different defaults, and they change the maths.
        window = fields.integer("sliding_window", most=MAX_TOKENS)
        first = fields.integer("max_window_layers", least=0)
        return [window if layer >= first else None for layer in range(num_layers)]
    if SLIDING not in kinds:
        return [None] * num_layers
    if not slides:
        raise ValueError(f"{fields.where}: layer_types has sliding layers, but no sliding window is in use")
    window = fields.integer("sliding_window", most=MAX_TOKENS)
    return [window if kind == SLIDING else None for kind in kinds]


def read_exceptions(fields: Fields, num_layers: int) -> dict[int, Fields]:
    """The objects of ``per_layer_config`` by layer index; the caller must call `done` on each.

    transformers pads the indices with zeros to the same number of digits.
    """
    layers, found = fields.object("per_layer_config"), {}
    if layers is None:
        return found
    for key in layers.raw:
        if not is_index(key, num_layers):
            raise ValueError(f"{layers.where}: there is no layer {key[:20]!r}")
        if int(key) in found:
            raise ValueError(f"{layers.where}: layer {int(key)} is there twice")
        if (exception := layers.object(key)) is not None:
            found[int(key)] = exception
    return found


def is_index(text: str, count: int) -> bool:
    """Whether a string is an integer in ``0..count - 1``; Python's `int` refuses very long ones."""
    return text.isdecimal() and len(text) < 10 and int(text) < count
