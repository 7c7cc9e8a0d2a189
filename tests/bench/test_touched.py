"""The floor of a round of a mixture of experts: the experts that its nodes choose, and no others."""

import dataclasses

import jax.numpy as jnp
import pytest

from bench.common.scene import random_weights
from bench.common.shapes import PairShape
from bench.round.work import EXPERTS, parameters, round_work
from bench.round.measure import RoundCase, Setup, measure
from jetspec_jax import SamplingParams
from jetspec_jax.config import Experts, LayerConfig
from jetspec_jax.decode.state import DecodeWeights
from pallas_kernels.expert_choice import Routing
from tests.decode.tiny import TINY, head_config

pytestmark = pytest.mark.usefixtures("quick_compiles")

DENSE = TINY.layers[0]
ROUTED = dataclasses.replace(DENSE, mlp_size=0, experts=Experts(16, 24, Routing(3)))
TARGET = dataclasses.replace(TINY, model_type="qwen3_moe", layers=(ROUTED, DENSE, ROUTED))
ONE_EXPERT = 3 * TINY.hidden_size * 24


@pytest.fixture(scope="module")
def touched():
    """What is counted of some cases, in dispatches of so many rounds."""
    shape = PairShape(TARGET, head_config(TARGET))
    float32 = jnp.dtype(jnp.float32)
    weights = DecodeWeights(*(random_weights(own, float32, seed) for seed, own in enumerate(shape)))

    def measured(cases, rounds):
        setup = Setup(
            SamplingParams(),
            width=3,
            rounds=rounds,
            repeats=1,
            implementation=None,
            phases=False,
            profile=False,
        )
        found = measure(cases, shape, weights, setup, lambda _: None)
        return [found[case].experts_touched for case in cases]

    return measured


def test_what_the_nodes_choose_is_counted(touched):
    anchors, trees = touched([RoundCase(4, 20, 1), RoundCase(4, 20, 16)], rounds=2)
    assert list(anchors) == list(trees) == [0, 2]
    for layer in (0, 2):
        assert 3 <= anchors[layer] <= 4 * 3
        assert anchors[layer] < trees[layer] <= 16


def test_every_round_that_is_timed_counts(touched):
    """Each goes on from other tokens than the first, and its nodes choose other experts."""
    case, before, seen = RoundCase(1, 20, 16), {0: 0.0, 2: 0.0}, set()
    for rounds in (1, 2, 3):
        [mean] = touched([case], rounds)
        total = {layer: rounds * count for layer, count in mean.items()}
        last = tuple(round(total[layer] - before[layer], 6) for layer in before)
        assert all(count in range(3, 17) for count in last)
        seen.add(last)
        before = total
    assert len(seen) > 1


def test_the_floor_reads_them_once_and_computes_those_of_every_row():
    given = {"batch": 1, "context": 10, "budget": 16, "itemsize": 2}
    assert parameters(TARGET, EXPERTS) == 2 * 16 * ONE_EXPERT
    without = round_work(TARGET, None, **given, touched={0: 0, 2: 0})["verify"]
    some = round_work(TARGET, None, **given, touched={0: 5, 2: 7})["verify"]
    assert some.bytes - without.bytes == 2 * 12 * ONE_EXPERT
    assert some.operations == without.operations
    layers = (dataclasses.replace(ROUTED, experts=dataclasses.replace(ROUTED.experts, routing=Routing(4))),)
    more = dataclasses.replace(TARGET, layers=(*layers, DENSE, ROUTED))
    assert round_work(more, None, **given, touched={0: 5, 2: 7})["verify"].operations == (
        some.operations + 2 * 16 * ONE_EXPERT
    )


def test_a_layer_that_differs_counts_as_it_is():
    wide = dataclasses.replace(DENSE, num_kv_heads=4, window=8)
    config = dataclasses.replace(TINY, layers=(DENSE, wide))
    assert isinstance(wide, LayerConfig)
    one = round_work(TINY, None, batch=1, context=100, budget=1, itemsize=1)["commit"]
    other = round_work(config, None, batch=1, context=100, budget=1, itemsize=1)["commit"]
    assert other.bytes - one.bytes == wide.kv_size - DENSE.kv_size


def test_random_biases_leave_tokens_apart():
    """Norms are 1; a bias of 1 would make all tokens alike, and they would all choose the same experts."""
    layer = dataclasses.replace(ROUTED, experts=dataclasses.replace(ROUTED.experts, biases=True))
    target = dataclasses.replace(TARGET, model_type="gpt_oss", layers=(layer,))
    weights = random_weights(target, jnp.dtype(jnp.float32), 0)["layers"][0]
    assert (weights["input_layernorm"]["weight"] == 1).all()
    attention, experts = weights["self_attn"], weights["mlp"]["experts"]
    for bias in (attention["qkv_bias"], attention["o_bias"], attention["sinks"], experts["down_bias"]):
        assert abs(bias).max() < 0.2
        assert bias.std() > 0.005
