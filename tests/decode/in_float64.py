"""Dense Qwen3 targets of `tests.decode.tiny` in float64: the published maths in NumPy, of whole sequences.

Only the layout of the parameters is the library's. Shapes: T tokens, G KV heads, R query heads of each,
E head size; a leading axis has the samples of a `Rounding`.
"""

import numpy as np

from tests.float64 import Rounding, reference_of
from tests.sampling.reference import log_softmax


def reference_logprobs(target, ids):
    """Log-probabilities after each token of a sequence, ``[T, V]``, and how far float32 may be from them."""
    rounded = Rounding()
    return reference_of(rounded(log_softmax(_logits(target, np.asarray(ids), rounded))))


def _logits(target, ids, rounded):
    config, weights = target.config, _as_float64(target.weights)

    def norm(x, module):
        normed = rounded(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps))
        return rounded(normed * module["weight"])

    x = rounded.sampled(weights["embed_tokens"][ids])
    for number, layer in enumerate(config.layers):
        own = weights["layers"][number]
        x = rounded(x + _attention(layer, own["self_attn"], norm, norm(x, own["input_layernorm"]), rounded))
        normed = norm(x, own["post_attention_layernorm"])
        gate, up = (rounded(normed @ own["mlp"]["gate_up_proj"][:, part]) for part in (0, 1))
        x = rounded(x + rounded(rounded(gate / (1 + np.exp(-gate)) * up) @ own["mlp"]["down_proj"]))
    table = weights["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    return rounded(norm(x, weights["norm"]) @ table.T)


def _attention(layer, own, norm, x, rounded):
    places = np.arange(x.shape[1])
    half = layer.rope.size // 2
    angles = places[:, None] * layer.rope.theta ** (-np.arange(half) / half)
    # Programs round the frequency, and then the angle: far along, these are the largest roundings.
    angles = rounded(rounded(rounded.sampled(angles)))[:, :, None, None]
    cos, sin = np.cos(angles), np.sin(angles)

    def turned(x):
        first, second = x[..., :half], x[..., half:]
        return rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))

    projected = rounded(np.einsum("stm,mgre->stgre", x, own["qkv_proj"]))
    q = turned(norm(projected[..., :-2, :], own["q_norm"]))
    k, v = turned(norm(projected[..., -2:-1, :], own["k_norm"]))[..., 0, :], projected[..., -1, :]
    scores = rounded(np.einsum("stgre,suge->sgrtu", q, k) * layer.head_dim**-0.5)
    behind = places[:, None] - places
    seen = (behind >= 0) & (behind < (layer.window or len(places)))
    scores = np.where(seen, scores, -np.inf)
    weights = rounded(np.exp(scores - scores.max(axis=-1, keepdims=True)))
    weights = rounded(weights / weights.sum(axis=-1, keepdims=True))
    out = rounded(np.einsum("sgrtu,suge->stgre", weights, v))
    heads = out.reshape(*x.shape[:2], layer.num_heads, layer.head_dim)
    return rounded(np.einsum("sthe,hem->stm", heads, own["o_proj"]))


def _as_float64(weights):
    if isinstance(weights, dict):
        return {name: _as_float64(own) for name, own in weights.items()}
    return np.asarray(weights, np.float64)
