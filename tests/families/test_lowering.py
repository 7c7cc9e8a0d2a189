"""At published sizes, a forward pass of two or three layers is made of kernels on a GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from bench.common.shapes import GEMMA4_26B_A4B
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import empty_stores
from jetspec_jax.config import parse_model_config
from jetspec_jax.models import abstract, bind, weights_of
from pallas_kernels import dispatch
from tests.kernels.lowering import launches, lower_for_gpu
from tests.loading.test_gpt_oss import GPT_OSS_20B
from tests.loading.test_step import HUB_TEXT
from tests.marks import wide

LAUNCHES = {
    "gpt_oss": {
        "rms_norm": 5,
        "qkv_rotary": 2,
        "tree_attention": 2,
        "expert_choice": 2,
        "expert_mlp_output": 2,
    },
    "gemma4_text": {
        "rms_norm": 17,
        "qkv_rotary": 2,
        "tree_attention": 2,
        "gated_activation": 2,
        "expert_choice": 2,
        "expert_mlp_output": 2,
    },
    "step3p5": {
        "rms_norm": 7,
        "qkv_rotary": 3,
        "tree_attention": 3,
        "gated_activation": 3,
        "expert_choice": 2,
        "expert_mlp_output": 2,
    },
}


# A tree, the largest chunks of prompts, and small trees of many slots. A sliding and a full layer; a dense
# one, and two with experts and their bounds.
@pytest.mark.parametrize("block", [(1, 64), wide((8, 2))], ids=str)
@pytest.mark.parametrize(
    ("raw", "layers"), [wide(GPT_OSS_20B, (0, 1)), (GEMMA4_26B_A4B, (4, 5)), wide(HUB_TEXT, (0, 43, 44))]
)
def test_kernels(monkeypatch, raw, layers, block):
    """As many as there should be, and norms hand them their weights as they are stored."""
    monkeypatch.setattr(dispatch, "gpu_problem", lambda: None)
    config = parse_model_config(raw)
    config = dataclasses.replace(config, layers=tuple(config.layers[i] for i in layers))
    weights = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), weights_of(abstract(config))
    )
    stores = jax.eval_shape(lambda: empty_stores(config, 32, 64, jnp.dtype(jnp.bfloat16)))
    batch = block[0]
    slots = jax.eval_shape(lambda: Slots.of(jnp.zeros((batch, 32), jnp.int32), jnp.zeros(batch, jnp.int32)))

    def forward(weights, stores, slots, tokens):
        model, block = bind(config, weights), Block.chain(tokens)
        positions = block.positions(slots.lengths)
        return model.logits(model(tokens, positions, attend_over(stores, slots, block)).hidden)

    program = lower_for_gpu(forward, weights, stores, slots, jax.ShapeDtypeStruct(block, jnp.int32))
    found, expected = launches(program), LAUNCHES[config.model_type]
    assert {name: found[name] for name in expected} == expected
    widened = {int(size) for size in re.findall(r"convert .*\(tensor<(\d+)xbf16>\) -> .*xf32>", program)}
    assert widened.isdisjoint(norm_sizes(weights))


def norm_sizes(weights):
    """How long the weights of norms are, and of what is multiplied like one."""
    sizes = {
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
        if re.search(r"norm\W+weight|router\W+scale", jax.tree_util.keystr(path))
    }
    assert sizes
    return sizes
