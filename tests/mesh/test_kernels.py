"""Kernels on devices that each have a part: interpreted, they give what references make of the whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jetspec_jax import DecodeWeights, DraftHeadProposer, TreeDecoder
from jetspec_jax.config import parse_model_config
from jetspec_jax.device.mesh import WHOLE, everywhere
from jetspec_jax.device.partition import spread
from jetspec_jax.models import abstract, weights_of
from pallas_kernels import dispatch, shards
from pallas_kernels.activation import SILU
from pallas_kernels.expert_choice import RouterRule
from pallas_kernels.expert_choice import pallas_triton as choice_kernel
from pallas_kernels.expert_choice import reference as choice_reference
from pallas_kernels.expert_mlp import pallas_triton as mlp_kernel
from pallas_kernels.expert_mlp import reference as mlp_reference
from pallas_kernels.gated_activation import pallas_triton as gated_kernel
from pallas_kernels.gated_activation import reference as gated_reference
from pallas_kernels.paged_write import pallas_triton as write_kernel
from pallas_kernels.paged_write import reference as write_reference
from pallas_kernels.qkv_rotary import pallas_triton as rotary_kernel
from pallas_kernels.qkv_rotary import reference as rotary_reference
from pallas_kernels.rms_norm import pallas_triton as norm_kernel
from pallas_kernels.rms_norm import reference as norm_reference
from pallas_kernels.tree_attention import PagedPrefix
from pallas_kernels.tree_attention import pallas_triton as attention_kernel
from pallas_kernels.tree_attention import reference as attention_reference
from pallas_kernels.tree_growth import pallas_triton as growth_kernel
from pallas_kernels.tree_growth import reference as growth_reference
from tests.kernels import test_paged_write, test_tree_attention, test_tree_growth
from tests.kernels.lowering import gpu_mesh, launches, lower_for_gpu
from tests.loading.test_gpt_oss import GPT_OSS_20B
from tests.mesh.tiny import head_config
from tests.meshes import mesh_of

RNG = np.random.default_rng(0)
ALL, EXPERT, TENSOR = shards.ALL, shards.EXPERT, shards.TENSOR
# As many KV heads as parts, of two query heads each.
PARTS = 4


def split(axis, rank):
    return PartitionSpec(*(ALL if axis == each else None for each in range(rank)))


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def attention():
    case = test_tree_attention.make_case(7, kv_heads=PARTS)
    *block, prefix = case.args()
    pages = prefix.k_pages, prefix.v_pages, prefix.block_tables, prefix.lengths
    arguments = *block, *pages, jnp.asarray(case.depths), jnp.asarray(case.sinks)
    specs = *(split(2, 4),) * 3, WHOLE, *(split(2, 4),) * 2, WHOLE, WHOLE, WHOLE, split(0, 1)

    def call(function, q, k, v, mask, *prefix, **options):
        *pages, depths, sinks = prefix
        options |= {"scale": 0.4, "window": 10, "depths": depths, "sinks": sinks}
        return function(q, k, v, mask, PagedPrefix(*pages), **options)

    functions = attention_reference.tree_attention, attention_kernel.tree_attention
    return call, functions, arguments, specs, split(2, 4)


def rotary():
    arguments = normal(2, 5, PARTS, 4, 16), normal(16), normal(16), normal(2, 5, 8), normal(2, 5, 8)
    functions = rotary_reference.qkv_rotary, rotary_kernel.qkv_rotary
    specs = split(2, 5), WHOLE, WHOLE, WHOLE, WHOLE
    return with_options(eps=1e-6), functions, arguments, specs, split(2, 4)


def norm():
    arguments = normal(6, 32), normal(32), normal(6, 32)
    functions = norm_reference.rms_norm, norm_kernel.rms_norm
    return with_options(eps=1e-6), functions, arguments, (WHOLE,) * 3, WHOLE


def choice():
    functions = choice_reference.expert_choice, choice_kernel.expert_choice
    arguments = normal(6, 16), normal(16), normal(16)
    return with_options(routing=RouterRule(4)), functions, arguments, (WHOLE,) * 3, WHOLE


def experts():
    """By number and by features; what each part adds is added up, a bias of the result once."""
    chosen = np.stack([RNG.permutation(8)[:3] for _ in range(6)]).astype(np.int32)
    arguments = (
        *(normal(6, 16), normal(8, 16, 2, 32), normal(8, 32, 16)),
        *(jnp.asarray(chosen), jnp.abs(normal(6, 3)), normal(8, 2, 32), normal(8, 16)),
    )
    specs = (
        *(WHOLE, PartitionSpec(EXPERT, None, None, TENSOR), PartitionSpec(EXPERT, TENSOR)),
        *(WHOLE, WHOLE, PartitionSpec(EXPERT, None, TENSOR), PartitionSpec(EXPERT)),
    )

    def call(function, x, gate_up, down, chosen, weights, gate_up_bias, down_bias, **options):
        chosen = chosen - len(down) * shards.index(EXPERT)
        down_bias = jnp.where(shards.index(TENSOR) == 0, down_bias, 0)
        biases = gate_up_bias, down_bias
        return shards.all_sum(
            function(x, gate_up, down, chosen, weights, *biases, activation=SILU, **options)
        )

    return call, (mlp_reference.expert_mlp, mlp_kernel.expert_mlp), arguments, specs, WHOLE


def write():
    case = test_paged_write.make_case([((PARTS, 8), np.float32)] * 2)
    specs = [split(2, 4)] * 2, [split(2, 4)] * 2, WHOLE, WHOLE
    functions = write_reference.paged_write, write_kernel.paged_write
    return with_options(), functions, case.args(), specs, split(2, 4)


def gated():
    functions = gated_reference.gated_activation, gated_kernel.gated_activation
    return with_options(activation=SILU), functions, (normal(6, 2, 64),), (split(2, 3),), split(1, 2)


def growth():
    case = test_tree_growth.log_softmax_case(RNG, 2, 5, 3, 16)
    fan_out = np.pad(case.fan_out, ((0, 0), (0, 1)))
    arguments = case.log_probs, fan_out, case.budget
    functions = growth_reference.tree_growth, growth_kernel.tree_growth
    return with_options(num_nodes=16), functions, arguments, (WHOLE,) * 3, WHOLE


def with_options(**fixed):
    def call(function, *arguments, **options):
        return function(*arguments, **fixed, **options)

    return call


@pytest.mark.parametrize(
    "case", [attention, rotary, norm, choice, experts, write, gated, growth], ids=lambda case: case.__name__
)
def test_interpreted(case):
    call, (reference, kernel), arguments, in_specs, out_specs = case()
    expected = jax.jit(functools.partial(call, reference))(*arguments)
    run = everywhere(mesh_of(2, 2), functools.partial(call, kernel, interpret=True), in_specs, out_specs)
    found = jax.jit(run)(*arguments)
    for own, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert own.shape == whole.shape
        np.testing.assert_allclose(own, whole, rtol=1e-5, atol=1e-5)


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
