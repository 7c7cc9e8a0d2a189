"""Tiny checkpoints as others publish them: configs of both dialects, tensor names and shapes.

Written by hand from the published layouts, so that the library's own key tables are not their own judge.
"""

import json

import numpy as np
from safetensors.numpy import save_file

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 12,  # neither head_dim times heads nor a multiple of head_dim
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "max_position_embeddings": 128,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 19,
}
V4 = {
    **COMMON,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "torch_dtype": "float32",
    "transformers_version": "4.57.1",
}
V5 = {
    **COMMON,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": None,
    "layer_types": ["full_attention"] * 3,
    "pad_token_id": None,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "transformers_version": "5.23.0",
}
HEAD = {
    **V4,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 4,
    "num_target_layers": 3,
    "dflash_config": {"causal_head": True, "mask_token_id": 18, "target_layer_ids": [0, 2]},
}


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def with_dflash(**changes):
    """The head's config with other dflash_config entries; None takes one away."""
    dflash = {**HEAD["dflash_config"], **changes}
    return {**HEAD, "dflash_config": {key: value for key, value in dflash.items() if value is not None}}


#: The head with a selector, in the tensors and keys of DFlash 2.
SELECTING = with_dflash(selector_rank=2, selector_top_k=5, selector_tail=True)


def layer_shapes(prefix, raw):
    m, f, e = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    h, g = raw["num_attention_heads"], raw["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (h * e, m),
        "self_attn.k_proj": (g * e, m),
        "self_attn.v_proj": (g * e, m),
        "self_attn.o_proj": (m, h * e),
        "self_attn.q_norm": (e,),
        "self_attn.k_norm": (e,),
        "mlp.gate_proj": (f, m),
        "mlp.up_proj": (f, m),
        "mlp.down_proj": (m, f),
        "input_layernorm": (m,),
        "post_attention_layernorm": (m,),
    }
    return {
        f"{prefix}layers.{i}.{name}.weight": shape
        for i in range(raw["num_hidden_layers"])
        for name, shape in shapes.items()
    }


def target_shapes(raw):
    m, v = raw["hidden_size"], raw["vocab_size"]
    ends = {"model.embed_tokens.weight": (v, m), "model.norm.weight": (m,), "lm_head.weight": (v, m)}
    if raw["tie_word_embeddings"]:
        del ends["lm_head.weight"]
    return ends | layer_shapes("model.", raw)


def head_shapes(raw):
    m, taps = raw["hidden_size"], len(raw["dflash_config"]["target_layer_ids"])
    ends = {"fc.weight": (m, taps * m), "hidden_norm.weight": (m,), "norm.weight": (m,)}
    return ends | selector_shapes(raw) | layer_shapes("", raw)


def selector_shapes(raw):
    if not (rank := raw["dflash_config"].get("selector_rank")):
        return {}
    codebook = (raw["vocab_size"], rank)
    return {
        "candidate_selector.hidden_projection.weight": (rank, raw["hidden_size"]),
        "candidate_selector.predecessor_codebook": codebook,
        "candidate_selector.successor_codebook": codebook,
    }


def random_tensors(shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def halves(tensors):
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[i::2]} for i in range(2)]


def write(folder, raw, *shards, index=False):
    """A checkpoint folder; several shards, or ``index``, make it a sharded one with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    if len(shards) == 1 and not index:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder, weight_map):
    listing = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
