"""Tiny models that meshes of up to eight devices can split, and the same models on a mesh."""

import dataclasses
import functools
import json

from jetspec_jax import Head, Target
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.config import DraftHeadConfig, parse_model_config
from tests.decode.tiny import TINY
from tests.families.goldens import FOLDER

# No number of parts divides it.
VOCAB = 67
# Three KV heads, which neither two nor eight parts divide.
QWEN3 = dataclasses.replace(TINY.layers[0], num_heads=24, num_kv_heads=3)
DENSE = ("qwen3", "gemma3", "gemma4_dense", "qwen3_5", "llama")
MIXTURES = ("qwen3_moe", "gpt_oss", "gemma4", "step3p7", "qwen3_5_moe", "qwen3_next")


@functools.cache
def config_of(family):
    """A family's golden, one layer of each kind, with as many heads as eight parts need.

    KV heads stay fewer than those: of Gemma 4 two in sliding layers and one in full ones. Step's layers have
    8 query heads, or 24.
    """
    if family == "qwen3":
        return dataclasses.replace(TINY, vocab_size=VOCAB, layers=(QWEN3, QWEN3))
    golden = family.removesuffix("_dense")
    config = parse_model_config(json.loads((FOLDER / golden / "config.json").read_text()))
    layers = tuple(more_heads(layer) for layer in dict.fromkeys(config.layers))
    if family == "gemma4_dense":
        layers = tuple(dataclasses.replace(layer, experts=None) for layer in layers)
    return dataclasses.replace(config, vocab_size=VOCAB, layers=layers)


def more_heads(layer):
    rec = layer.recurrence
    if rec is None:
        return dataclasses.replace(layer, num_heads={4: 8, 6: 24}[layer.num_heads])
    values = 8 * rec.num_value_heads // rec.num_key_heads
    rec = dataclasses.replace(rec, num_key_heads=8, num_value_heads=values, key_dim=8, value_dim=4)
    return dataclasses.replace(layer, recurrence=rec)


def head_config(target, *, splits=True):
    """A head of the target's width: of 8 query heads, or of 3, which no mesh splits."""
    heads, kv_heads = (8, 2) if splits else (3, 1)
    layer = dataclasses.replace(TINY.layers[0], num_heads=heads, num_kv_heads=kv_heads)
    layers = dataclasses.replace(TINY, vocab_size=target.vocab_size, layers=(layer,))
    taps = 0, target.num_layers - 1
    return DraftHeadConfig(layers, 4, target.num_layers, taps, target.vocab_size - 1, causal=True)


def on_mesh(pair, mesh):
    target, head = pair
    weights = place(target.weights, target.config, mesh)
    split = Target(target.config, weights, target.eos_token_ids, target.tokenizer, mesh)
    return split, Head(head.config, place(head.weights, head.config, mesh), mesh)
