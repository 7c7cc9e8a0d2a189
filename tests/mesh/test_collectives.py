"""What devices tell each other in a greedy round: counted in the lowered program."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from bench.common.collectives import collectives
from jetspec_jax import DecodeWeights, DraftHeadProposer, TreeDecoder
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.decode.scoring import SCORED_CHUNK, empty_scoring_state, score_chunk
from jetspec_jax.device.mesh import WHOLE, everywhere
from jetspec_jax.device.partition import spread
from jetspec_jax.models import abstract, weights_of
from pallas_kernels import shards
from tests.mesh.collectives import unordered
from tests.mesh.tiny import config_of, head_config
from tests.meshes import mesh_of

SLOTS, NODES = 2, 16


def lowered(config, head, mesh, *, prompt=False, **settings):
    """A dispatch of trees, whose rounds are one loop's body; or a chunk of a prompt."""
    proposer = DraftHeadProposer(head)
    decoder = TreeDecoder(config, proposer, bucket=NODES, width=3, mesh=mesh, **settings)
    weights = DecodeWeights(*(weights_of(abstract(spread(own, mesh))) for own in (config, head)))
    state = jax.eval_shape(
        lambda: decoder.empty_state(
            SLOTS, num_pages=8, pages_per_slot=4, page_size=16, dtype=jnp.dtype(jnp.float32)
        )
    )
    if not prompt:
        return decoder.program.lower(decoder, weights, state, jax.ShapeDtypeStruct((), jnp.int32))
    chunk, numbers, flags = (
        jax.ShapeDtypeStruct(*own) for own in (((2, 8), jnp.int32), ((2,), jnp.int32), ((2,), bool))
    )
    return prefill.lower(decoder.models, weights, state, numbers, chunk, numbers, flags)


# A dense family, a mixture, one whose layers add two terms at once, one with recurrent layers.
@pytest.mark.parametrize(
    ("family", "mesh"),
    [("qwen3", (1, 2)), ("qwen3_moe", (2, 4)), ("gemma4", (2, 4)), ("qwen3_5_moe", (8, 1))],
)
def test_of_a_greedy_round(family, mesh):
    config = config_of(family)
    head = head_config(config)
    found = collectives(lowered(config, head, mesh_of(*mesh)))
    always = Counter(own.kind for own in found if not own.on_condition)
    # Two for each layer, and one for each model's embeddings. Choices, candidates, and the head's features.
    assert always == {"sum": 2 * config.num_layers + 1 + 2 * head.layers.num_layers + 1, "gather": 3}
    # The filters', which greedy rounds leave out: the highest, all that top-p weighs, a turn of each search.
    assert Counter(own.kind for own in found if own.on_condition) == {"gather": 4}
    assert max(own.bytes for own in found) < 4 * SLOTS * NODES * config.vocab_size


def test_a_head_that_cannot_be_split_adds_none():
    """It stays whole on every device, but for the vocabulary: its slots are embedded by the target's part."""
    config = config_of("qwen3")
    found = collectives(lowered(config, head_config(config, splits=False), mesh_of(1, 2)))
    always = Counter(own.kind for own in found if not own.on_condition)
    assert always == {"sum": 2 * config.num_layers + 2, "gather": 2}


def test_conditions_loops_and_bytes_of_a_program():
    def own(x):
        both = jax.lax.psum(x, shards.ALL)
        x = jax.lax.cond(x[0] > 0, lambda: both, lambda: jax.lax.psum(x + both, shards.ALL))
        turn = jax.jit(lambda x: jax.lax.psum(x, shards.ALL))
        x = jax.lax.fori_loop(0, 3, lambda _, x: turn(x), x)
        return jax.lax.all_gather(x.astype(jnp.bfloat16), shards.ALL)

    run = jax.jit(everywhere(mesh_of(2, 4), own, [WHOLE], WHOLE))
    assert collectives(run.lower(jax.ShapeDtypeStruct((5,), jnp.float32))) == [
        ("sum", 20, False, 0),
        ("sum", 20, True, 0),
        ("sum", 20, False, 1),
        ("gather", 80, False, 0),
    ]


def test_other_collectives_are_named():
    def own(x):
        return jax.lax.ppermute(x, shards.TENSOR, [(0, 1), (1, 0)])

    run = jax.jit(everywhere(mesh_of(1, 2), own, [WHOLE], WHOLE))
    with pytest.raises(NotImplementedError, match=r"collective_permute is not counted: only .*all_reduce"):
        collectives(run.lower(jax.ShapeDtypeStruct((5,), jnp.float32)))


def test_what_is_wanted_of_logits_adds_none_and_what_is_told_of_tokens_three():
    config = config_of("qwen3")
    plain, adjusting, telling = (
        Counter(own.kind for own in collectives(lowered(config, head_config(config), mesh_of(1, 2), **wants)))
        for wants in ({}, {"adjusts": True}, {"logprobs": True})
    )
    assert adjusting == plain
    assert telling - plain == {"gather": 3}


@pytest.mark.parametrize(
    "settings", [{}, {"prompt": True}, {"adjusts": True, "logprobs": True}], ids=["rounds", "prompt", "told"]
)
def test_each_waits_for_the_one_before(settings):
    """Otherwise devices might come to them in different orders, and wait for each other for ever."""
    config = config_of("gpt_oss")
    assert unordered(lowered(config, head_config(config), mesh_of(2, 4), **settings)) == []


def test_each_waits_for_the_one_before_where_a_prompt_is_scored():
    config, mesh = config_of("gpt_oss"), mesh_of(2, 4)
    models = Models(config, mesh=mesh)
    weights = DecodeWeights(weights_of(abstract(spread(config, mesh))))
    state = jax.eval_shape(lambda: empty_scoring_state(models, SCORED_CHUNK, jnp.dtype(jnp.float32)))
    row, number = jax.ShapeDtypeStruct((SCORED_CHUNK,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    assert unordered(score_chunk.lower(models, weights, state, row, row, number)) == []
