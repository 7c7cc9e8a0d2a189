"""What a round cannot do without: bytes and operations by hand, and the experts that its nodes choose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.common.floors import Ceilings, Work
from bench.common.scene import random_weights
from bench.common.shapes import EXPERTS, SHAPES, PairShape, parameters, stored_as
from bench.round.measure import RoundCase, Setup, measure
from bench.round.work import round_work
from jetspec_jax import SamplingParams
from jetspec_jax.config import Experts, LayerConfig, check_head_fits, parse_model_config
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.models import kept_packed
from pallas_kernels.expert_choice import RouterRule
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.quantized import FP8
from tests.decode.tiny import TINY, head_config, with_mlp, with_windows
from tests.loading.test_gpt_oss import TINY as GPT_OSS
from tests.meshes import mesh_of

SMALL = SHAPES["tiny"]
DENSE = TINY.layers[0]
ROUTED = dataclasses.replace(DENSE, mlp_size=0, experts=Experts(16, 24, RouterRule(3)))
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
            implementation="xla",
            phases=False,
            profile=False,
        )
        found = measure(cases, shape, weights, setup, lambda _: None)
        return [found[case].experts_touched for case in cases]

    return measured


@pytest.mark.wide
def test_what_the_nodes_choose_is_counted_in_every_round_that_is_timed(touched):
    plain, tree = RoundCase(4, 20, 1), RoundCase(4, 20, 16)
    anchors, trees = touched([plain, tree], rounds=2)
    assert list(anchors) == list(trees) == [0, 2]
    [first] = touched([tree], rounds=1)
    for layer in (0, 2):
        assert 3 <= anchors[layer] <= 4 * 3
        assert anchors[layer] < trees[layer] <= 16
        # The second round goes on from other tokens.
        assert 3 <= 2 * trees[layer] - first[layer] <= 16
    assert trees != first


@pytest.mark.parametrize(
    ("name", "stored", "touched", "saved"),
    [
        # Of every layer: queries, keys, values and outputs, gate and up and down, at a byte instead of two.
        ("qwen3-8b", "fp8", {}, 36 * 4096 * (4096 * 2 + 2 * 1024 + 3 * 12288)),
        # Two experts touched of the first layer: 17 bytes for 32 weights instead of 64.
        ("gpt-oss-20b", "mxfp4", {0: 2, **dict.fromkeys(range(1, 24), 0)}, 2 * 3 * 2880**2 * 47 // 32),
    ],
)
def test_quantised_weights_are_fewer_bytes_and_the_same_work(name, stored, touched, saved):
    given = {"batch": 1, "context": 100, "budget": 1, "itemsize": 2, "touched": touched}
    plain, own = (
        round_work(stored_as(SHAPES[name], word).target, None, **given)["verify"]
        for word in ("plain", stored)
    )
    assert plain.bytes - own.bytes == saved
    assert plain.operations == own.operations


def test_random_weights_are_stored_as_they_are_said_to_be():
    fp8 = random_weights(stored_as(SMALL, "fp8").target, jnp.dtype(jnp.float32), 0)
    own = fp8["layers"][0]["mlp"]["down_proj"]
    assert own["values"].dtype == FP8
    assert 0.5 < own["values"].astype(jnp.float32).std() < 2
    assert (own["scales"] == jnp.float32(0.02)).all()
    assert own["values"].format.layout.major_to_minor == (0, 1)
    rows = random_weights(stored_as(SMALL, "fp8-activations").target, jnp.dtype(jnp.float32), 0)
    assert rows["layers"][0]["mlp"]["down_proj"]["values"].format.layout.major_to_minor == (1, 0)
    packed = random_weights(kept_packed(parse_model_config(GPT_OSS)), jnp.dtype(jnp.float32), 0)
    own = packed["layers"][1]["mlp"]["experts"]["down_proj"]
    assert own["values"].dtype == own["scales"].dtype == jnp.uint8
    assert 0.01 < Mxfp4(own["values"], own["scales"], 1).widened(jnp.dtype(jnp.float32)).std() < 0.03
    plain = random_weights(parse_model_config(GPT_OSS), jnp.dtype(jnp.float32), 0)
    ours, theirs = (weights["layers"][1]["mlp"]["router"] for weights in (packed, plain))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    with pytest.raises(ValueError, match="--weights mxfp4: no parameter of a qwen3 can have that format"):
        stored_as(SMALL, "mxfp4")


def test_random_weights_in_bfloat16_have_no_mean():
    # `jax.random.normal` in bfloat16 has a mean of -0.011 deviations. The outputs of all matrices would get a
    # common part, and all tokens would choose the same experts.
    large = dataclasses.replace(SMALL.target, vocab_size=2**14)
    rows = random_weights(large, jnp.dtype(jnp.bfloat16), 0)["embed_tokens"]
    assert rows.dtype == jnp.bfloat16
    values = np.asarray(rows, np.float64)
    # The standard error of a million values is 0.001 deviations.
    assert values.size == 2**20
    assert abs(values.mean()) < 5e-3 * values.std()


def test_the_floor_reads_them_once_and_computes_those_of_every_row():
    given = {"batch": 1, "context": 10, "budget": 16, "itemsize": 2}
    assert parameters(TARGET, EXPERTS) == 2 * 16 * ONE_EXPERT
    without = round_work(TARGET, None, **given, touched={0: 0, 2: 0})["verify"]
    some = round_work(TARGET, None, **given, touched={0: 5, 2: 7})["verify"]
    assert some.bytes - without.bytes == 2 * 12 * ONE_EXPERT
    assert some.operations == without.operations
    layers = (
        dataclasses.replace(ROUTED, experts=dataclasses.replace(ROUTED.experts, routing=RouterRule(4))),
    )
    more = dataclasses.replace(TARGET, layers=(*layers, DENSE, ROUTED))
    assert round_work(more, None, **given, touched={0: 5, 2: 7})["verify"].operations == (
        some.operations + 2 * 16 * ONE_EXPERT
    )


def test_a_device_of_a_mesh_has_its_part_and_all_of_a_head_that_stays_whole():
    mesh, given = mesh_of(1, 2), {"batch": 2, "context": 10, "budget": 16, "itemsize": 2}
    head, odd = head_config(TINY), head_config(with_mlp(TINY, 47))
    whole, split = (round_work(TINY, head, **given, mesh=own) for own in (None, mesh))
    for phase, work in whole.items():
        assert split[phase] == (work.bytes / 2, work.operations / 2)
    whole, kept = (round_work(TINY, odd, **given, mesh=own) for own in (None, mesh))
    assert kept["verify"] == split["verify"]
    # Of a proposal the target's tables are split all the same, and of settling what the target commits.
    tables = TINY.vocab_size * TINY.hidden_size
    rows = 2 * odd.block_size * TINY.hidden_size
    assert whole["propose"].bytes - kept["propose"].bytes == tables + rows
    assert whole["propose"].operations - kept["propose"].operations == 2 * odd.depth * tables
    plain = round_work(TINY, None, **given)["settle"]
    assert whole["settle"].bytes - kept["settle"].bytes == plain.bytes / 2
    assert whole["settle"].operations == kept["settle"].operations


def test_a_layer_that_differs_counts_as_it_is():
    wide = dataclasses.replace(DENSE, num_kv_heads=4, window=8)
    config = dataclasses.replace(TINY, layers=(DENSE, wide))
    assert isinstance(wide, LayerConfig)
    one = round_work(TINY, None, batch=1, context=100, budget=1, itemsize=1)["settle"]
    other = round_work(config, None, batch=1, context=100, budget=1, itemsize=1)["settle"]
    assert other.bytes - one.bytes == wide.kv_size - DENSE.kv_size


class TestWork:
    # Of the tiny shape, by hand. A layer: queries and output 64 x 64 each, keys and values 64 x 32 each,
    # three of 64 x 128 for the feed-forward block, norms of 64, 64, 16 and 16.
    LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 64 + 64 + 16 + 16
    LM_HEAD = 512 * 64

    def test_a_plain_step(self):
        counted = round_work(SMALL.target, None, batch=2, context=100, budget=1, itemsize=4)
        read = 2 * self.LAYER + 64 + self.LM_HEAD
        # Two layers, keys and values, two heads of 16.
        token = 2 * 2 * 2 * 16
        scores = 2 * 4 * 4 * 16 * 101
        assert counted == {
            "verify": Work(4 * (read + 2 * 64 + 2 * 100 * token), 2 * (2 * read + scores)),
            "settle": Work(4 * 2 * token, 0),
        }

    def test_a_round(self):
        counted = round_work(SMALL.target, SMALL.head, batch=1, context=100, budget=32, itemsize=2)
        read = 2 * self.LAYER + 64 + self.LM_HEAD
        assert counted["verify"].bytes == 2 * (read + 32 * 64 + 100 * 2 * 2 * 2 * 16)
        assert counted["verify"].operations == 32 * (2 * read + 2 * 4 * 4 * 16 * 101)
        # One layer and a norm over 8 slots; logits of the 7 that draft.
        drafts = self.LAYER + 64
        assert counted["propose"].bytes == 2 * (drafts + self.LM_HEAD + 8 * 64 + 100 * 2 * 2 * 16)
        assert counted["propose"].operations == 2 * 8 * drafts + 2 * 7 * self.LM_HEAD + 8 * 4 * 4 * 16 * 101
        # One tap layer through fc, its norm, keys and values; a row in each of 3 layers.
        features = 64 * 64 + 64 + 64 * 32 * 2
        assert counted["settle"] == Work(2 * (features + 3 * 2 * 2 * 16), 2 * features)

    def test_tied_embeddings_are_read_once_and_windows_bound_the_context(self):
        target = dataclasses.replace(with_windows(SMALL.target, 8, None), tie_word_embeddings=True)
        counted = round_work(target, None, batch=1, context=100, budget=1, itemsize=4)
        read = 2 * self.LAYER + 64 + self.LM_HEAD
        assert counted["verify"].bytes == 4 * (read + 64 + (7 + 100) * 2 * 2 * 16)
        assert counted["verify"].operations == 2 * read + (8 + 101) * 4 * 4 * 16

    @pytest.mark.parametrize(("context", "window"), [(0, 8), (3, 8), (7, 8), (8, 8), (100, 8), (100, 1)])
    def test_a_window_holds_the_row_itself(self, context, window):
        """Counted by the rule of the attention: a key is seen while it lies less than the window behind."""
        target, without = (with_windows(SMALL.target, own, None) for own in (window, None))
        behind = sum(context - position < window for position in range(context))
        counted, all_seen = (
            round_work(config, None, batch=1, context=context, budget=1, itemsize=1)
            for config in (target, without)
        )
        unseen = context - behind
        assert all_seen["verify"].bytes - counted["verify"].bytes == unseen * 2 * 2 * 16
        assert all_seen["verify"].operations - counted["verify"].operations == unseen * 4 * 4 * 16
        # Whatever the window, the root's keys and values are written.
        assert all_seen["settle"] == counted["settle"]

    def test_the_longer_of_reading_and_computing_counts(self):
        ceilings = Ceilings(reduction=2, copy=1, matmul=3)
        assert ceilings.seconds(Work(bytes=10, operations=6)) == 5
        assert ceilings.seconds(Work(bytes=10, operations=60)) == 20

    @pytest.mark.parametrize(("budget", "milliseconds"), [(1, 3.56), (128, 4.36), (256, 5.90)])
    def test_qwen3_8b_on_an_h200(self, budget, milliseconds):
        """At 4.3 TB/s and 790 TFLOP/s, bfloat16, 1,024 tokens of context: 15.1 GB are read, then also 3.4."""
        target, head = SHAPES["qwen3-8b"]
        counted = round_work(
            target, None if budget == 1 else head, batch=1, context=1024, budget=budget, itemsize=2
        )
        floor = sum(map(Ceilings(4.3e12, 0, 790e12).seconds, counted.values()))
        assert 1e3 * floor == pytest.approx(milliseconds, abs=0.005)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-4b", 4.022), ("qwen3-8b", 8.191)]
)
def test_shapes_are_the_published_models(name, billions):
    target, head = SHAPES[name]
    check_head_fits(head, target)
    assert parameters(target) / 1e9 == pytest.approx(billions, abs=1e-3)
