"""Small modules with experts, and how others publish such models, to hold key tables against.

Not whole models: parameters, their key tables, and files written by hand from the published layouts.
"""

import numpy as np
from flax import nnx

from jetspec_jax.models.key_table import Key, Skip
from jetspec_jax.models.layers import param
from jetspec_jax.models.transformer import Transformer

EXPERTS = 3
GATE_UP = "layers.{}.mlp.experts.gate_up_proj"
DOWN = "layers.{}.mlp.experts.down_proj"
ENDS = (Key("model.embed_tokens.weight", "embed_tokens"), Key("lm_head.weight", "lm_head"))


class Experts(nnx.Module):
    def __init__(self, config, rngs, dtype, experts):
        m, i = config.hidden_size, config.layers[0].mlp_size
        self.gate_up_proj = param(rngs, (experts, m, 2, i), ("experts", "embed", "gate_up", "mlp"), dtype)
        self.down_proj = param(rngs, (experts, i, m), ("experts", "mlp", "embed"), dtype)


class Layer(nnx.Module):
    def __init__(self, config, rngs, dtype, experts):
        self.mlp = nnx.Dict(experts=Experts(config, rngs, dtype, experts))


class Family(Transformer):
    """No Qwen3: embedding, layers of experts and the matrix of logits."""

    EXPERTS = EXPERTS

    def __init__(self, config, *, rngs, dtype):
        vocab = (config.vocab_size, config.hidden_size)
        self.embed_tokens = param(rngs, vocab, ("vocab", "embed"), dtype)
        self.layers = nnx.List([Layer(config, rngs, dtype, self.EXPERTS) for _ in range(config.num_layers)])
        self.lm_head = param(rngs, vocab, ("vocab", "embed"), dtype)


class OneByOne(Family):
    """Experts in tensors of their own, as Qwen3-MoE has them, or fused, as larger models of its line do."""

    PREFIXES = ("model.", "model.language_model.", "language_model.model.")
    SKIPPED = (
        Skip(r"(model\.)?visual\..*", "vision tower"),
        Skip(r".*\blayers\.(\d+)\..*", "layers that predict further tokens", further_layers=True),
    )
    KEYS = (
        *ENDS,
        *(
            Key(f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight", path, layout, part, expert=True)
            for name, path, layout, part in (
                ("gate_proj", GATE_UP, "m i -> i m", np.s_[:, 0]),
                ("up_proj", GATE_UP, "m i -> i m", np.s_[:, 1]),
                ("down_proj", DOWN, "i m -> m i", ...),
            )
        ),
        Key(f"model.{GATE_UP}", GATE_UP, "e m two i -> e (two i) m", form="fused"),
        Key(f"model.{DOWN}", DOWN, "e i m -> e m i", form="fused"),
    )


class Packed(Family):
    """Gate and up in turns, input first, or in MXFP4, output first: as GPT-OSS has them."""

    KEYS = (
        *ENDS,
        Key(f"model.{GATE_UP}", GATE_UP, "e m two i -> e m (i two)"),
        Key(f"model.{DOWN}", DOWN),
        Key(
            f"model.{GATE_UP}_blocks",
            GATE_UP,
            "e m two i -> e (i two) m",
            form="mxfp4",
            scales=f"model.{GATE_UP}_scales",
        ),
        Key(f"model.{DOWN}_blocks", DOWN, "e i m -> e m i", form="mxfp4", scales=f"model.{DOWN}_scales"),
    )


def random_experts(raw, seed=0):
    """Gate, up and down ``[L, E, out, in]`` of all layers, and the two ends of the model."""
    rng = np.random.default_rng(seed)
    m, i, count = raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"]

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    gate, up, down = draw(count, EXPERTS, i, m), draw(count, EXPERTS, i, m), draw(count, EXPERTS, m, i)
    vocab = (raw["vocab_size"], m)
    return gate, up, down, {"model.embed_tokens.weight": draw(*vocab), "lm_head.weight": draw(*vocab)}


def one_by_one(gate, up, down, ends):
    """As Qwen3-MoE is published."""
    return ends | {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": matrix[layer, expert].copy()
        for layer in range(len(gate))
        for expert in range(EXPERTS)
        for name, matrix in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
    }


def fused(gate, up, down, ends):
    """The rows of gate, then those of up; no ``.weight``."""
    tensors = dict(ends)
    for layer in range(len(gate)):
        both = np.concatenate([gate[layer], up[layer]], axis=1)
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = both
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = down[layer].copy()
    return tensors


def in_turns(gate, up, down, ends):
    """As transformers holds GPT-OSS: input first, a column of gate, one of up, and so on."""
    tensors = dict(ends)
    for layer in range(len(gate)):
        both = np.empty((EXPERTS, gate.shape[3], 2 * gate.shape[2]), np.float32)
        both[:, :, 0::2] = gate[layer].swapaxes(1, 2)
        both[:, :, 1::2] = up[layer].swapaxes(1, 2)
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = both
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = down[layer].swapaxes(1, 2).copy()
    return tensors
