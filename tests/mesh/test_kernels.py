"""Kernels of a program whose devices each have a part."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jetspec_jax import DecodeWeights, DraftHeadProposer, TreeDecoder
from jetspec_jax.config import parse_model_config
from jetspec_jax.device.partition import spread
from jetspec_jax.models import abstract, weights_of
from pallas_kernels import dispatch
from tests.kernels.lowering import gpu_mesh, launches, lower_for_gpu
from tests.loading.test_gpt_oss import GPT_OSS_20B
from tests.mesh.tiny import head_config


@pytest.mark.wide
@pytest.mark.usefixtures("no_type_checks")
def test_the_loop_lowers_for_cuda(monkeypatch):
    """As many launches as on one device, but for the filters, which have no kernel for parts.

    Only to lower a program a mesh needs no devices: what runs has some, and so the types say.
    """
    monkeypatch.setattr(dispatch, "gpu_problem", lambda: None)
    config = parse_model_config(GPT_OSS_20B)
    config = dataclasses.replace(config, layers=config.layers[:2])
    tiny = head_config(config)
    layer = dataclasses.replace(tiny.layers.layers[0], num_heads=8, num_kv_heads=4, head_dim=64, mlp_size=256)
    layers = dataclasses.replace(tiny.layers, hidden_size=config.hidden_size, layers=(layer,))
    head = dataclasses.replace(tiny, layers=layers)
    whole, parts = (launches_of(config, head, mesh) for mesh in (None, gpu_mesh(2, 2)))
    assert whole.pop("token_filter") == 1
    assert parts == whole
    assert set(whole) >= {"tree_attention", "expert_mlp_output", "gated_activation", "tree_growth"}


def launches_of(config, head, mesh):
    """Kernels of a dispatch in bfloat16, by name, but for the merge of keys that attention has split."""
    decoder = TreeDecoder(config, DraftHeadProposer(head), bucket=64, width=4, mesh=mesh)
    shapes = [weights_of(abstract(spread(own, mesh), jnp.dtype(jnp.bfloat16))) for own in (config, head)]
    size = {"num_pages": 32, "pages_per_slot": 16, "page_size": 64, "dtype": jnp.dtype(jnp.bfloat16)}
    state = jax.eval_shape(lambda: decoder.empty_state(2, **size))
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    text = lower_for_gpu(decoder.decode, DecodeWeights(*shapes), state, rounds, mesh=mesh)
    names = launches(text)
    del names["tree_attention_merge"]  # fewer heads are split into more parts
    return names
