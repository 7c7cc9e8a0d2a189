"""Converts a GGUF file's metadata to a ``config.json`` of its family."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jetspec_jax.arguments import shown
from jetspec_jax.checkpoint.content import content_of
from jetspec_jax.checkpoint.gguf.architectures import ARCHITECTURES, ROPE_FACTORS, name_of
from jetspec_jax.checkpoint.gguf.header import Header, Kind
from jetspec_jax.checkpoint.gguf.vocabulary import special_ids
from jetspec_jax.config.fields import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_TOKENS, Fields
from jetspec_jax.config.geometry import Llama3, Rope
from jetspec_jax.models.rotary import frequencies

#: A ``config.json``, or some keys of one.
Raw = dict[str, Any]

# llama.cpp's default base of the rotary embedding.
USUAL_THETA = 10000.0
# Files store Llama 3's scaling as factors. All published files of Llama 3.1 to 3.3 have these settings.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The factors are computed and stored in float32.
FACTOR_RTOL = 1e-5
# Gemma 3's largest model has a different attention scale; llama.cpp also recognises it by its layers.
GEMMA3_27B_LAYERS = 62


def read_config(header: Header, ignore_config_keys: Collection[str] = ()) -> Raw:
    """Converts a file's metadata to a ``config.json``.

    ``ignore_config_keys`` are given without the architecture's prefix.
    """
    with content_of(header.path):
        name = name_of(header)
        prefix, architecture = f"{name}.", ARCHITECTURES[name]
        keys = {
            key.removeprefix(prefix): value
            for key, value in header.metadata.items()
            if key.startswith(prefix)
        }
        fields = Fields(keys, f"{header.path}: {name}", ignore_config_keys)
        raw = {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            **_common(fields, header),
            **_READERS[name](fields, header),
            **special_ids(header),
        }
        fields.done()
    return raw


def _common(fields: Fields, header: Header) -> Raw:
    """The keys of all architectures, in the older dialect."""
    fields.only("attention.causal", True, default=True)
    hidden_size = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count", most=MAX_HEADS)
    key = fields.name("attention.key_length", "rope.dimension_count")
    head_dim = fields.integer(key, most=MAX_HEADS, default=hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.only(key, head_dim, default=head_dim)
    return {
        "vocab_size": _vocab_size(fields, header),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", most=MAX_HEADS, default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length", most=MAX_TOKENS),
        "rms_norm_eps": fields.positive("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.optional("rope.freq_base") or USUAL_THETA,
        "rope_scaling": _scaling(fields),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _vocab_size(fields: Fields, header: Header) -> int:
    if "token_embd.weight" not in header.tensors:
        raise ValueError("it has no token_embd.weight, so it holds no language model, or not all of one")
    rows = header.tensors["token_embd.weight"].shape[0]
    fields.only("vocab_size", rows, default=rows, feature=f"token_embd.weight has {rows} rows")
    return rows


def _scaling(fields: Fields) -> Raw | None:
    fields.inert("rope.scaling.finetuned")
    kind = fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none")
    if kind == "none":
        fields.inert("rope.scaling.factor", "rope.scaling.original_context_length")
        return None
    if kind == "linear":
        return {
            "rope_type": "linear",
            "factor": fields.positive(fields.name("rope.scaling.factor", "rope.scale_linear")),
        }
    if kind != "yarn":
        raise ValueError(
            f"{fields.where}: unsupported rope.scaling.type {shown(kind)}; supported: none, linear, yarn"
        )
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        fields.only(f"rope.scaling.{key}", 1.0, default=1.0)
    return {
        "rope_type": "yarn",
        "factor": fields.positive("rope.scaling.factor"),
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", most=MAX_TOKENS
        ),
        "beta_fast": fields.optional("rope.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": fields.optional("rope.scaling.yarn_beta_slow") or 1.0,
    }


def _llama(fields: Fields, header: Header) -> Raw:
    """The keys of Llama, and of Mistral, whose architecture is also called "llama"."""
    fields.only("expert_count", 0, default=0, feature="routed experts, as in Mixtral")
    fields.only("expert_used_count", 0, default=0)
    fields.inert("tensor_data_layout")
    raw: Raw = {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    if ROPE_FACTORS in header.tensors:
        raw["rope_scaling"] = _llama3(fields, header)
    if "attention.sliding_window" in fields:
        window = fields.integer("attention.sliding_window", most=MAX_TOKENS)
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        raw.update(mistral)
    return raw


def _llama3(fields: Fields, header: Header) -> Raw:
    """The ``rope_scaling`` from a file's rotary factors, which must be those of Llama 3's scaling."""
    info, raw = header.tensors[ROPE_FACTORS], _common(fields, header)
    where = f"{header.path}: {ROPE_FACTORS}"
    if raw["rope_scaling"] is not None:
        raise ValueError(f"{where} and rope.scaling.type name two scalings of the rotary embedding")
    head_dim = raw["head_dim"]
    if info.kind is not Kind.F32 or info.shape != (head_dim // 2,):
        raise ValueError(
            f"{where} must hold {head_dim // 2} values of type F32, half a head's, not {list(info.shape)} of "
            f"{info.kind.name}"
        )
    factors = header.content[info.start : info.start + info.nbytes].view(np.float32).astype(np.float64)
    factor = float(str(factors.astype(np.float32).max()))
    scaling = Llama3(factor, *(LLAMA3[key] for key in LLAMA3))
    plain = Rope(raw["rope_theta"], head_dim)
    expected = frequencies(plain) / frequencies(Rope(raw["rope_theta"], head_dim, scaling=scaling))
    if not np.allclose(factors, expected, rtol=FACTOR_RTOL, atol=0):
        settings = ", ".join(f"{key} {value}" for key, value in LLAMA3.items())
        raise ValueError(
            f"{where} holds factors that are not those of Llama 3's scaling with factor {factor}, {settings}"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _qwen2(fields: Fields, header: Header) -> Raw:
    return {"use_sliding_window": False}


def _qwen3(fields: Fields, header: Header) -> Raw:
    return {"attention_bias": False, "use_sliding_window": False}


def _qwen3_moe(fields: Fields, header: Header) -> Raw:
    """The keys of Qwen3-MoE; llama.cpp always renormalises the weights of a token's experts."""
    fields.only("expert_weights_norm", True, default=True)
    fields.only("expert_weights_scale", 0.0, 1.0, default=1.0)
    fields.only("expert_shared_count", 0, default=0)
    fields.only("expert_gating_func", 0, 1, default=1, feature="a router with another function than softmax")
    return {
        **_qwen3(fields, header),
        "num_experts": fields.integer("expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": fields.integer("expert_used_count", most=MAX_EXPERTS),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(fields: Fields, header: Header) -> Raw:
    """The keys of Gemma 3. llama.cpp hard-codes the window pattern: every sixth layer is full."""
    fields.only("attention.sliding_window_pattern", 6, default=6)
    fields.only("attn_logit_softcapping", 0.0, default=0.0)
    common = _common(fields, header)
    scalar = common["head_dim"]
    if common["num_hidden_layers"] == GEMMA3_27B_LAYERS:
        scalar = common["hidden_size"] // common["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": fields.optional("rope.freq_base") or 1e6,
        "rope_local_base_freq": fields.optional("rope.freq_base_swa") or 1e4,
        "sliding_window": fields.integer("attention.sliding_window", most=MAX_TOKENS),
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": fields.optional("final_logit_softcapping"),
    }


_READERS: Mapping[str, Callable[[Fields, Header], Raw]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
}
