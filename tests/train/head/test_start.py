"""Where heads begin, and what does not go together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.quantizing import to_fp8
from jetspec_jax import Head, draft_logits, load_draft_head
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_draft_head_config
from jetspec_jax.config.head_dialects import causality_by_engine
from jetspec_jax.models import quantized_blocks
from jetspec_jax.models.quantized import widened
from tests.decode.test_fp8 import BLOCKS, quantised_weights
from tests.decode.tiny import TINY, random_target, with_windows, word_tokenizer
from tests.train.head.tiny import MASK
from train.head.engines import Verifier, engine_json
from train.head.recipe import HeadSettings
from train.head.start import begin_head

SHAPE = HeadSettings(layers=2, block_size=4, taps=(0, 1), mask_token=MASK)


def shape(**changes):
    return dataclasses.replace(SHAPE, **changes)


@pytest.fixture(scope="module")
def target():
    return random_target(TINY, 0, tokenizer=word_tokenizer(TINY.vocab_size))


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_a_random_head_is_its_seed_s_and_drafts(target):
    first, again, other = (begin_head(target, SHAPE, None, seed) for seed in (0, 0, 1))
    same(first.weights, again.weights)
    assert np.abs(np.asarray(first.weights["fc"]) - np.asarray(other.weights["fc"])).max() > 1e-3
    for path, leaf in jax.tree_util.tree_flatten_with_path(first.weights)[0]:
        assert leaf.dtype == jnp.float32
        if "norm" in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(leaf, 1)
        else:
            assert float(jnp.std(leaf)) == pytest.approx(0.02, rel=0.15)
    assert np.isfinite(draft_logits(target, Head(first.config, first.weights), [[1, 2, 3]])).all()


def test_what_the_recipe_leaves_open_is_the_target_s_or_the_published_heads(target):
    begun = begin_head(target, HeadSettings(layers=1, mask_token=MASK), None, 0)
    config = begun.config
    assert (config.block_size, config.causal, config.mask_token_id) == (16, True, MASK)
    assert config.layers.layers[0].mlp_size == TINY.layers[0].mlp_size
    assert config.layers.layers[0].rope == TINY.layers[0].rope
    given = begin_head(target, shape(causal=False, intermediate_size=24), None, 0).config
    assert (given.causal, given.layers.layers[0].mlp_size, given.tap_layers) == (False, 24, (0, 1))
    # An early layer, a late one, and those between: as many taps as layers, all of them the target's.
    deep = dataclasses.replace(target, config=with_windows(TINY, *(None,) * 36))
    five = begin_head(deep, HeadSettings(mask_token=MASK), None, 0).config
    assert (five.layers.num_layers, five.tap_layers) == (5, (1, 9, 17, 25, 33))


def test_a_head_turns_its_positions_as_the_target_s_full_attention_does(target):
    sliding, full = with_windows(TINY, 8, None).layers
    slow = dataclasses.replace(full, rope=dataclasses.replace(full.rope, theta=5e5))
    mixed = dataclasses.replace(target, config=dataclasses.replace(TINY, layers=(sliding, slow)))
    begun = begin_head(mixed, SHAPE, None, 0).config
    assert [layer.rope.theta for layer in begun.layers.layers] == [5e5, 5e5]


def test_how_it_meets_scales_and_caps_is_the_recipe_s_say(target):
    begun = begin_head(target, SHAPE, None, 0)
    assert (begun.config.scaled_embeddings, begun.config.capped_logits) == (True, False)
    assert begun.raw["dflash_config"].keys().isdisjoint({"scaled_embeddings", "capped_logits"})
    other = begin_head(target, shape(scaled_embeddings=False, capped_logits=True), None, 0)
    assert (other.config.scaled_embeddings, other.config.capped_logits) == (False, True)


def test_layers_of_another_family_are_no_beginning(target):
    experts = dataclasses.replace(target, weights={**target.weights, "layers": {}})
    plain = target.weights["layers"]
    for i, layer in plain.items():
        experts.weights["layers"][i] = {**layer, "mlp": {"router": layer["mlp"]["down_proj"]}}
    with pytest.raises(ValueError, match="a dense Qwen3's: ") as error:
        begin_head(experts, shape(start="target"), None, 0)
    assert "no ['layers'][0]['mlp']['down_proj']" in str(error.value)
    assert "['layers'][1]['mlp']['router'], which the head does not have" in str(error.value)
    assert "set head.start to 'random'" in str(error.value)


def test_a_head_that_begins_as_the_target_has_its_layers_and_its_norm(target):
    weights = begin_head(target, shape(start="target"), None, 0).weights
    same(weights["layers"], target.weights["layers"])
    same(weights["norm"], target.weights["norm"])
    # Fewer layers are spread and end with the last.
    one = begin_head(target, shape(start="target", layers=1), None, 0).weights
    same(one["layers"], {0: target.weights["layers"][1]})
    # The features are the mean of the taps.
    taps = np.random.default_rng(0).normal(size=(3, 2, TINY.hidden_size)).astype(np.float32)
    np.testing.assert_allclose(
        taps.reshape(3, -1) @ np.asarray(weights["fc"]), taps.mean(axis=1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("bias", [False, True])
def test_norms_that_the_target_lacks_are_ones_and_its_biases_are_left_out(bias):
    layers = tuple(dataclasses.replace(layer, qkv_bias=bias) for layer in TINY.layers)
    config = dataclasses.replace(TINY, model_type="qwen2" if bias else "llama", layers=layers)
    target = random_target(config, 0, tokenizer=word_tokenizer(TINY.vocab_size))
    begun = begin_head(target, shape(start="target"), None, 0)
    for layer, own in begun.weights["layers"].items():
        there = {**target.weights["layers"][layer]["self_attn"]}
        assert (there.pop("qkv_bias", None) is not None) == bias
        attention = {**own["self_attn"]}
        for name in ("q_norm", "k_norm"):
            np.testing.assert_array_equal(attention.pop(name)["weight"], 1)
        same(attention, there)
        same(own["mlp"], target.weights["layers"][layer]["mlp"])
    assert np.isfinite(draft_logits(target, Head(begun.config, begun.weights), [[1, 2, 3]])).all()


def test_a_quantised_target_gives_widened_layers_and_is_named_in_the_head_s_config(target, tmp_path):
    config = dataclasses.replace(TINY, quantization=BLOCKS)
    quantised = dataclasses.replace(target, config=config, weights=quantised_weights(config, 0))
    begun = begin_head(quantised, shape(start="target"), None, 0)
    expected = widened(quantised.weights, quantized_blocks(config))
    same(begun.weights["layers"], expected["layers"])
    assert begun.raw["dflash_config"]["target_format"] == begun.config.target_format == BLOCKS.format
    # A head that goes on with another target is of that.
    save_checkpoint(tmp_path / "head", begun.raw, begun.weights)
    again = begin_head(target, HeadSettings("checkpoint"), Source(tmp_path / "head"), 0)
    assert "target_format" not in again.raw["dflash_config"]
    assert again.config.target_format == ""


def test_a_quantised_head_is_not_trained(target, tmp_path):
    made = begin_head(target, SHAPE, None, 5)
    save_checkpoint(tmp_path / "head", made.raw, made.weights)
    to_fp8(tmp_path / "head", tmp_path / "fp8")
    with pytest.raises(
        ValueError, match="is FP8 in blocks of 128 x 128, and quantised weights cannot be trained"
    ):
        begin_head(target, HeadSettings("checkpoint"), Source(tmp_path / "fp8"), 0)


def test_a_target_that_does_not_fit_the_head_is_refused(target):
    with pytest.raises(ValueError, match="a head of 3 layers cannot begin as the 2 of the target"):
        begin_head(target, shape(start="target", layers=3), None, 0)
    with pytest.raises(ValueError, match="do not fit the head's") as error:
        begin_head(target, shape(start="target", intermediate_size=40), None, 0)
    # All of them, with both shapes.
    for layer in (0, 1):
        assert f"['layers'][{layer}]['mlp']['down_proj'] [48, 32] for [40, 32]" in str(error.value)
        assert f"['layers'][{layer}]['mlp']['gate_up_proj'] [32, 2, 48] for [32, 2, 40]" in str(error.value)


def test_a_head_that_begins_as_a_checkpoint_is_that(target, tmp_path):
    made = begin_head(target, SHAPE, None, 5)
    save_checkpoint(tmp_path / "head", made.raw, made.weights)
    begun = begin_head(target, HeadSettings("checkpoint"), Source(tmp_path / "head"), 0)
    assert (begun.raw, begun.config) == (made.raw, made.config)
    same(begun.weights, load_draft_head(tmp_path / "head", dtype="float32").weights)
    assert {leaf.dtype for leaf in jax.tree.leaves(begun.weights)} == {jnp.dtype(jnp.float32)}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=4e-3), begun.weights, made.weights)

    with pytest.raises(ValueError, match=r"keeps its settings; unset layers, block_size, taps, mask_token"):
        begin_head(target, shape(start="checkpoint"), Source(tmp_path / "head"), 0)
    with pytest.raises(ValueError, match=r"begins with a checkpoint: name a head with --draft-head"):
        begin_head(target, HeadSettings("checkpoint"), None, 0)
    for start in ("random", "target"):
        with pytest.raises(
            ValueError, match=f"begins '{start}', not as .*head; set head.start to 'checkpoint'"
        ):
            begin_head(target, shape(start=start), Source(tmp_path / "head"), 0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        begin_head(target, HeadSettings("checkpoint"), Source(tmp_path / "nowhere"), 0)
    other = dataclasses.replace(target, config=dataclasses.replace(TINY, vocab_size=65))
    with pytest.raises(ValueError, match="does not fit the target"):
        begin_head(other, HeadSettings("checkpoint"), Source(tmp_path / "head"), 0)


def test_a_head_of_another_dialect_goes_on_in_the_published_one(target, tmp_path):
    made = begin_head(target, SHAPE, None, 3)
    raw = engine_json("speculators", made.raw, made.config, Verifier("owner/target"))
    save_checkpoint(tmp_path / "head", raw, made.weights, config=parse_draft_head_config(raw))
    begun = begin_head(target, HeadSettings("checkpoint"), Source(tmp_path / "head"), 0)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), made.weights)
    same(begun.weights, rounded)
    assert parse_draft_head_config(begun.raw) == made.config
    assert all(causality_by_engine(begun.raw).values())


def test_a_key_of_a_checkpoint_that_is_to_be_ignored_stays(target, tmp_path):
    made = begin_head(target, SHAPE, None, 5)
    raw = {**made.raw, "zoom": 2}
    with pytest.raises(ValueError, match=r"unknown keys \['zoom'\]"):
        save_checkpoint(tmp_path / "head", raw, made.weights)
    save_checkpoint(tmp_path / "head", raw, made.weights, config=made.config)
    with pytest.raises(ValueError, match=r"unknown keys \['zoom'\]"):
        begin_head(target, HeadSettings("checkpoint"), Source(tmp_path / "head"), 0)
    begun = begin_head(
        target, HeadSettings("checkpoint"), Source(tmp_path / "head", ignore_config_keys=["zoom"]), 0
    )
    assert (begun.raw, begun.config) == (raw, made.config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": (0, 2, 5)}, r"taps \[2, 5\] lie outside the target's layers 0\.\.1"),
        ({"mask_token": None}, "the tokenizer has no mask token; set head.mask_token to the id"),
        ({"mask_token": "<mask>"}, "the tokenizer has no token '<mask>'"),
        ({"mask_token": 64}, "mask token 64 lies outside the target's vocabulary of 64"),
        ({"layers": 0}, "num_hidden_layers must be an integer of at least 1, not 0"),
        ({"intermediate_size": -3}, "intermediate_size must be an integer of at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(target, changes, message):
    with pytest.raises(ValueError, match=message):
        begin_head(target, shape(**changes), None, 0)


def test_the_mask_token_by_its_name_by_its_id_and_as_the_tokenizer_s_own(target):
    def mask(target, token):
        return begin_head(target, shape(mask_token=token), None, 0).config.mask_token_id

    name = target.tokenizer.convert_ids_to_tokens(33)
    assert mask(target, name) == mask(target, 33) == 33
    own = word_tokenizer(TINY.vocab_size)
    own.mask_token = own.convert_ids_to_tokens(40)
    assert mask(dataclasses.replace(target, tokenizer=own), None) == 40
    # A target without a tokenizer needs an id.
    bare = dataclasses.replace(target, tokenizer=None)
    assert mask(bare, 0) == 0
    for token in (None, "a"):
        with pytest.raises(ValueError, match="the tokenizer has no"):
            mask(bare, token)
