"""Layers of Qwen3.5 and Qwen3-Next in float64, a token after the other, from a file's tensors.

Written from the published maths, with none of the library's code: neither its key tables nor its chunks.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Tensors:
    """A layer's tensors by their names in the file, in float64."""

    def __init__(self, tensors, prefix):
        self.own = {
            name.removeprefix(prefix): tensor.astype(np.float64)
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }

    def __getitem__(self, name):
        return self.own[name]

    def __contains__(self, name):
        return name in self.own


def project(raw, tensors, x):
    """Rows before the convolution, gates, and b and a of every value head, of one sequence."""
    key_heads, value_heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    d, e, ratio = raw["linear_key_head_dim"], raw["linear_value_head_dim"], value_heads // key_heads
    if "in_proj_qkv.weight" in tensors:
        z = x @ tensors["in_proj_z.weight"].T
        b, a = (x @ tensors[f"in_proj_{name}.weight"].T for name in "ba")
        return x @ tensors["in_proj_qkv.weight"].T, z.reshape(len(x), value_heads, e), b, a
    parts = {"q": [], "k": [], "v": [], "z": [], "b": [], "a": []}
    sizes = {"q": d, "k": d, "v": ratio * e, "z": ratio * e}
    rows, pairs = x @ tensors["in_proj_qkvz.weight"].T, x @ tensors["in_proj_ba.weight"].T
    start = 0
    for head in range(key_heads):
        for name, size in sizes.items():
            parts[name].append(rows[:, start : start + size])
            start += size
        first = 2 * ratio * head
        parts["b"].append(pairs[:, first : first + ratio])
        parts["a"].append(pairs[:, first + ratio : first + 2 * ratio])
    q, k, v, z, b, a = (np.concatenate(own, axis=1) for own in parts.values())
    return np.concatenate([q, k, v], axis=1), z.reshape(len(x), value_heads, e), b, a


def recurrent(raw, tensors, x, parents, before, state):
    """What a recurrent layer adds to the stream of one sequence, and the state after each token.

    Args:
        raw: The ``config.json``.
        tensors: The layer's.
        x: Its input, normed.
        parents: Of each token the one before it, -1 for none.
        before: Rows before the convolution of the tokens before the block, the oldest first.
        state: After the last of those.
    """
    key_heads, value_heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    d, e, ratio = raw["linear_key_head_dim"], raw["linear_value_head_dim"], value_heads // key_heads
    rows, z, b, a = project(raw, tensors, x)
    kernel = tensors["conv1d.weight"][:, 0]
    states, out = [], np.zeros((len(x), value_heads * e))
    for i, parent in enumerate(parents):
        path = [i]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        window = np.concatenate([before, rows[path]])[-kernel.shape[1] :]
        mixed = silu((window * kernel.T).sum(axis=0))
        q, k = (mixed[n * key_heads * d :][: key_heads * d].reshape(key_heads, d) for n in (0, 1))
        v = mixed[2 * key_heads * d :].reshape(value_heads, e)
        held = (state if parent < 0 else states[parent]).copy()
        for head in range(value_heads):
            query, key = (
                own[head // ratio] / np.sqrt((own[head // ratio] ** 2).sum() + 1e-6) for own in (q, k)
            )
            rate = np.exp(tensors["A_log"][head])
            held[head] *= np.exp(-rate * np.logaddexp(0, a[i, head] + tensors["dt_bias"][head]))
            delta = sigmoid(b[i, head]) * (v[head] - held[head].T @ key)
            held[head] += np.outer(key, delta)
            read = held[head].T @ query * d**-0.5
            normed = read / np.sqrt((read**2).mean() + raw["rms_norm_eps"]) * tensors["norm.weight"]
            out[i, head * e : (head + 1) * e] = normed * silu(z[i, head])
        states.append(held)
    return out @ tensors["out_proj.weight"].T, states


def attention(raw, tensors, x):
    """What a layer of attention adds to the stream of one sequence, from its start."""
    heads, kv_heads, e = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    rope = raw["rope_parameters"]
    turning = int(e * rope["partial_rotary_factor"])
    angles = np.arange(len(x))[:, None] * rope["rope_theta"] ** (-np.arange(0, turning, 2) / turning)

    def rotated(own):
        first, second = own[:, : turning // 2], own[:, turning // 2 : turning]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate(
            [first * cos - second * sin, second * cos + first * sin, own[:, turning:]], axis=1
        )

    def normed(own, name):
        own = own / np.sqrt((own**2).mean(axis=-1, keepdims=True) + raw["rms_norm_eps"])
        return own * (1 + tensors[f"{name}.weight"])

    q = (x @ tensors["q_proj.weight"].T).reshape(len(x), heads, 2, e)
    k, v = ((x @ tensors[f"{name}_proj.weight"].T).reshape(len(x), kv_heads, e) for name in "kv")
    out = np.zeros((len(x), heads, e))
    for head in range(heads):
        own = head // (heads // kv_heads)
        query, key = rotated(normed(q[:, head, 0], "q_norm")), rotated(normed(k[:, own], "k_norm"))
        scores = np.where(np.tri(len(x), dtype=bool), query @ key.T * e**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, own]
    return (out * sigmoid(q[:, :, 1])).reshape(len(x), -1) @ tensors["o_proj.weight"].T


def experts(raw, tensors, x):
    """What a mixture makes of each row: its experts, and the shared one."""

    def block(prefix, rows):
        gate, up, down = (tensors[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return (silu(rows @ gate) * (rows @ up)) @ down

    logits = x @ tensors["gate.weight"].T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out = block("shared_expert", x) * sigmoid(x @ tensors["shared_expert_gate.weight"].T)
    for i, own in enumerate(weights):
        chosen = np.argsort(-own)[: raw["num_experts_per_tok"]]
        total = own[chosen].sum() if raw.get("norm_topk_prob", True) else 1.0
        for expert in chosen:
            out[i] += own[expert] / total * block(f"experts.{expert}", x[i])
    return out
