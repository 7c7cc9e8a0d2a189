"""The draft head against a plain PyTorch one, written from the description of the published checkpoints."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from jetspec_jax import draft_logits, load_draft_head, load_target
from tests.parity.oracle import VOCAB, assert_close, random_ids, random_model, save_newer

pytestmark = pytest.mark.parity

# Attention of another shape than the target's, another rotary base, and the target's last layer tapped.
HEAD = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2e4,
    "block_size": 6,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 59, "target_layer_ids": [0, 1, 3]},
}


def random_head(seed):
    m, f, e = HEAD["hidden_size"], HEAD["intermediate_size"], HEAD["head_dim"]
    q, kv = HEAD["num_attention_heads"] * e, HEAD["num_key_value_heads"] * e
    shapes = {"fc": (m, 3 * m), "hidden_norm": (m,), "norm": (m,)}
    for i in range(HEAD["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (q, m),
            "self_attn.k_proj": (kv, m),
            "self_attn.v_proj": (kv, m),
            "self_attn.o_proj": (m, q),
            "self_attn.q_norm": (e,),
            "self_attn.k_norm": (e,),
            "mlp.gate_proj": (f, m),
            "mlp.up_proj": (f, m),
            "mlp.down_proj": (m, f),
            "input_layernorm": (m,),
            "post_attention_layernorm": (m,),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    noise = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {f"{name}.weight": 1 + x if x.ndim == 1 else x for name, x in noise.items()}


def rotated(x, positions):
    """Rotary embedding of [B, T, heads, E]: pairs (i, i + E/2) as complex numbers, turned."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * HEAD["rope_theta"] ** (-torch.arange(half) / half)[None, :]
    pairs = (
        torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@torch.no_grad()
def oracle_draft_logits(model, weights, ids, *, causal):
    """Draft logits [B, D, V]: the last token of ``ids`` is the anchor, all before it the context."""
    ids = torch.from_numpy(np.asarray(ids, np.int64))
    context, anchor = ids[:, :-1], ids[:, -1:]
    batch, length = context.shape
    taps, m, e = HEAD["dflash_config"]["target_layer_ids"], HEAD["hidden_size"], HEAD["head_dim"]

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[name + ".weight"], HEAD["rms_norm_eps"])

    def linear(x, name):
        return F.linear(x, weights[name + ".weight"])

    # Hooks, because the last of transformers' `hidden_states` has been through the final norm.
    outputs = {}
    hooks = [
        model.model.layers[i].register_forward_hook(lambda _m, _a, out, i=i: outputs.update({i: out}))
        for i in taps
    ]
    if length:
        model.model(context, use_cache=False)
    for hook in hooks:
        hook.remove()
    tapped = [outputs.get(i, torch.zeros(batch, 0, m)) for i in taps]
    features = norm(linear(torch.cat(tapped, dim=-1), "fc"), "hidden_norm")

    mask = torch.full((batch, HEAD["block_size"] - 1), HEAD["dflash_config"]["mask_token_id"])
    x = model.model.embed_tokens(torch.cat([anchor, mask], dim=1))
    block = x.shape[1]
    positions = torch.arange(length + block, dtype=torch.float32)
    inside = torch.ones(block, block, dtype=torch.bool)
    sees = torch.cat(
        [torch.ones(block, length, dtype=torch.bool), inside.tril() if causal else inside], dim=1
    )
    for i in range(HEAD["num_hidden_layers"]):
        own = f"layers.{i}."
        normed = norm(x, own + "input_layernorm")
        known = torch.cat([features, normed], dim=1)
        q = linear(normed, own + "self_attn.q_proj").unflatten(-1, (-1, e))
        k = linear(known, own + "self_attn.k_proj").unflatten(-1, (-1, e))
        v = linear(known, own + "self_attn.v_proj").unflatten(-1, (-1, e))
        q = rotated(norm(q, own + "self_attn.q_norm"), positions[length:])
        k = rotated(norm(k, own + "self_attn.k_norm"), positions)
        k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], dim=2) for y in (k, v))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / e**0.5
        attention = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("bhqk,bkhe->bqhe", attention, v).flatten(2)
        x = x + linear(mixed, own + "self_attn.o_proj")
        y = norm(x, own + "post_attention_layernorm")
        gated = F.silu(linear(y, own + "mlp.gate_proj")) * linear(y, own + "mlp.up_proj")
        x = x + linear(gated, own + "mlp.down_proj")
    return model.lm_head(norm(x, "norm")[:, 1:]).numpy()


def save_head(weights, folder, *, causal):
    raw = {**HEAD, "dflash_config": {**HEAD["dflash_config"], "causal_head": causal}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("shape", "causal"),
    [("untied", True), ("untied", False), ("tied", False), ("sliding", True)],
    ids=lambda value: {True: "causal", False: "bidirectional"}.get(value, value),
)
def test_draft_logits(tmp_path, shape, causal):
    model, weights = random_model(shape, seed=5), random_head(seed=6)
    target = load_target(save_newer(model, tmp_path / "target"), dtype="float32")
    head = load_draft_head(
        save_head(weights, tmp_path / "head", causal=causal), dtype="float32", target=target
    )
    for length in (1, 30):
        ids = random_ids(length, 2, length)
        ours = draft_logits(target, head, ids)
        assert_close(ours, oracle_draft_logits(model, weights, ids, causal=causal))
