"""Models of Qwen3.5 and Qwen3-Next in float64, a token after the other, from a file's tensors.

Written from the published maths, with none of the library's code: neither its key tables nor its chunks.
``rounded`` is `tests.float64.exact`, or a `Rounding`, with which every array has a leading axis of samples.

Shapes: T tokens, M model, K key heads of size D, V value heads of size E; any axes may lead them, with a
`Rounding` samples and then sequences.
"""

import numpy as np

from tests.float64 import exact


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Tensors:
    """A model's or a block's tensors by their names in the file, in float64."""

    def __init__(self, tensors, prefix=""):
        self.own = {
            name.removeprefix(prefix): np.asarray(tensor).astype(np.float64)
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }

    def __getitem__(self, name):
        return self.own[name]

    def __contains__(self, name):
        return name in self.own

    def product(self, name, x):
        return x @ self.own[f"{name}.weight"].T


def logits(raw, tensors, ids, rounded=exact, parents=None):
    """Logits of whole sequences ``[..., T]``, and with a `Rounding` of each sample of them.

    ``parents`` makes a tree of all of them: of each token the one before it, -1 for none.
    """
    whole = Tensors(tensors)
    parents = range(-1, np.shape(ids)[-1] - 1) if parents is None else parents
    x = whole["model.embed_tokens.weight"][ids]
    if rounded is not exact:
        x = rounded.sampled(x)
    for number, kind in enumerate(raw["layer_types"]):
        layer = Tensors(tensors, f"model.layers.{number}.")
        normed = centered_norm(raw, layer["input_layernorm.weight"], x, rounded)
        if kind == "full_attention":
            mixed = attention(raw, Tensors(layer.own, "self_attn."), normed, parents, rounded)
        else:
            block = Tensors(layer.own, "linear_attn.")
            mixed, _ = recurrent(raw, block, normed, parents, None, None, rounded)
        x = rounded(x + mixed)
        normed = centered_norm(raw, layer["post_attention_layernorm.weight"], x, rounded)
        block = Tensors(layer.own, "mlp.")
        mlp = (
            experts(raw, block, normed, rounded) if "gate.weight" in block else gated(block, normed, rounded)
        )
        x = rounded(x + mlp)
    return rounded(whole.product("lm_head", centered_norm(raw, whole["model.norm.weight"], x, rounded)))


def normalised(raw, x, rounded):
    return rounded(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + raw["rms_norm_eps"]))


def centered_norm(raw, weight, x, rounded):
    return rounded(normalised(raw, x, rounded) * (1 + weight))


def gated(tensors, x, rounded, prefix=""):
    gate, up = (rounded(tensors.product(f"{prefix}{name}_proj", x)) for name in ("gate", "up"))
    return rounded(tensors.product(f"{prefix}down_proj", rounded(silu(gate) * up)))


def sizes_of(raw):
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
    return tuple(raw[f"linear_{name}"] for name in names)


def project(raw, tensors, x):
    """Rows before the convolution, gates, and b and a of every value head."""
    key_heads, value_heads, d, e = sizes_of(raw)
    ratio = value_heads // key_heads
    if "in_proj_qkv.weight" in tensors:
        rows, z, b, a = (tensors.product(f"in_proj_{name}", x) for name in ("qkv", "z", "b", "a"))
        return rows, z.reshape(*x.shape[:-1], value_heads, e), b, a
    # Of each key head its query, its key, and the values and gates that go with it; b and a likewise.
    rows = tensors.product("in_proj_qkvz", x).reshape(*x.shape[:-1], key_heads, -1)
    pairs = tensors.product("in_proj_ba", x).reshape(*x.shape[:-1], key_heads, 2, ratio)
    q, k, v, z = np.split(rows, np.cumsum([d, d, ratio * e]), axis=-1)
    joined = [own.reshape(*x.shape[:-1], -1) for own in (q, k, v)]
    b, a = (pairs[..., n, :].reshape(*x.shape[:-1], value_heads) for n in (0, 1))
    return np.concatenate(joined, axis=-1), z.reshape(*x.shape[:-1], value_heads, e), b, a


def recurrent(raw, tensors, x, parents, before, state, rounded=exact):
    """What a recurrent layer adds to the stream, and the state after each token."""
    key_heads, value_heads, d, e = sizes_of(raw)
    lead, ratio = x.shape[:-2], value_heads // key_heads
    rows, z, b, a = map(rounded, project(raw, tensors, x))
    kernel = tensors["conv1d.weight"][:, 0].T
    taps = len(kernel) - 1
    before = np.zeros((taps, rows.shape[-1])) if before is None else before
    extended = np.concatenate([np.broadcast_to(before, (*lead, *before.shape)), rows], axis=-2)
    state = np.zeros((value_heads, d, e)) if state is None else state
    first = np.broadcast_to(state, (*lead, *state.shape))
    rates = np.exp(tensors["A_log"])
    kept = rounded(np.exp(-rounded(rates * rounded(np.logaddexp(0, rounded(a + tensors["dt_bias"]))))))
    beta, gates = rounded(sigmoid(b)), rounded(silu(z))
    weight = tensors["norm.weight"]

    def unit(own):
        own = own.reshape(*lead, key_heads, d)
        own = rounded(own / np.sqrt((own**2).sum(axis=-1, keepdims=True) + 1e-6))
        return np.repeat(own, ratio, axis=-2)[..., None]

    states, out = [], np.zeros((*x.shape[:-1], value_heads, e))
    for i, parent in enumerate(parents):
        path = [taps + i]
        while len(path) <= taps:
            above = parents[path[0] - taps] if path[0] >= taps else -1
            path.insert(0, taps + above if above >= 0 else min(path[0], taps) - 1)
        mixed = rounded(silu(rounded((extended[..., path, :] * kernel).sum(axis=-2))))
        q, k, v = np.split(mixed, [key_heads * d, 2 * key_heads * d], axis=-1)
        query, key = unit(q), unit(k)
        held = rounded(kept[..., i, :, None, None] * (first if parent < 0 else states[parent]))
        missing = v.reshape(*lead, value_heads, e) - rounded((held * key).sum(axis=-2))
        delta = rounded(beta[..., i, :, None] * rounded(missing))
        held = rounded(held + rounded(key * delta[..., None, :]))
        read = rounded((held * query).sum(axis=-2) * d**-0.5)
        normed = rounded(normalised(raw, read, rounded) * weight)
        out[..., i, :, :] = rounded(normed * gates[..., i, :, :])
        states.append(held)
    return rounded(tensors.product("out_proj", out.reshape(*x.shape[:-1], -1))), states


def attention(raw, tensors, x, parents, rounded=exact):
    """What a layer of attention adds to the stream of sequences or trees from their start."""
    heads, kv_heads, e = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    rope, count = raw["rope_parameters"], x.shape[-2]
    seen = np.eye(count, dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    turning = int(e * rope["partial_rotary_factor"])
    frequencies = rope["rope_theta"] ** (-np.arange(0, turning, 2) / turning)
    angles = (seen.sum(axis=1) - 1)[:, None, None] * frequencies
    if rounded is not exact:
        # Programs round the frequency, and then the angle: far along, these are the largest roundings.
        angles = rounded(rounded(rounded.sampled(angles)))[:, None]
    cos, sin = np.cos(angles), np.sin(angles)

    def rotated(own):
        first, second = own[..., : turning // 2], own[..., turning // 2 : turning]
        turned = first * cos - second * sin, second * cos + first * sin, own[..., turning:]
        return rounded(np.concatenate(turned, axis=-1))

    def normed(own, name):
        return centered_norm(raw, tensors[f"{name}.weight"], own, rounded)

    q = rounded(tensors.product("q_proj", x)).reshape(*x.shape[:-1], heads, 2, e)
    k, v = (rounded(tensors.product(f"{name}_proj", x)).reshape(*x.shape[:-1], kv_heads, e) for name in "kv")
    query, key = rotated(normed(q[..., 0, :], "q_norm")), rotated(normed(k, "k_norm"))
    query, key, value = (
        np.swapaxes(np.repeat(own, heads // own.shape[-2], axis=-2), -2, -3) for own in (query, key, v)
    )
    scores = rounded(query @ np.swapaxes(key, -1, -2) * e**-0.5)
    scores = np.where(seen, scores, -np.inf)
    weights = rounded(np.exp(scores - scores.max(axis=-1, keepdims=True)))
    out = rounded(weights @ value / weights.sum(axis=-1, keepdims=True))
    out = rounded(np.swapaxes(out, -2, -3) * rounded(sigmoid(q[..., 1, :])))
    return rounded(tensors.product("o_proj", out.reshape(*x.shape[:-1], -1)))


def experts(raw, tensors, x, rounded=exact):
    """What a mixture makes of each row: its experts, and the shared one."""
    scores = rounded(tensors.product("gate", x))
    chosen = np.argsort(-scores, axis=-1)[..., : raw["num_experts_per_tok"]]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    if raw.get("norm_topk_prob", True):
        total = np.take_along_axis(weights, chosen, axis=-1).sum(axis=-1, keepdims=True)
    else:
        total = weights.sum(axis=-1, keepdims=True)
    weights = rounded(weights / total)
    out = rounded(
        gated(tensors, x, rounded, "shared_expert.") * sigmoid(tensors.product("shared_expert_gate", x))
    )
    for expert in range(raw["num_experts"]):
        weight = np.where((chosen == expert).any(axis=-1), weights[..., expert], 0)[..., None]
        out = rounded(out + weight * gated(tensors, x, rounded, f"experts.{expert}."))
    return out
