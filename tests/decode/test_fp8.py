"""Targets and heads in FP8 or MXFP4: trees give plain decoding's tokens, and what is said of pairs."""

import dataclasses
import logging

import numpy as np
import pytest
from flax import nnx

from jetspec_jax import Head, SamplingParams, Target, draft_logits, load_draft_head
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_model_config
from jetspec_jax.config.quantization import COMPRESSED, FP8, PACKED, Quantization
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.models import kept_packed, quantized_blocks, with_quantization
from jetspec_jax.models.quantized import widened
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.quantized import Quantized
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import _RAW, _RAW_HEAD, TINY, TinyEngine, head_config, random_weights, serve
from tests.loading.test_gpt_oss import TINY as GPT_OSS

BLOCKS, CHANNELS = Quantization(FP8, 16, 24), Quantization(COMPRESSED, 1, None)
ROWS = {own: dataclasses.replace(own, fp8_activations=True) for own in (BLOCKS, CHANNELS)}
PROMPTS = [np.random.default_rng(size).integers(0, 64, size).tolist() for size in (5, 30)]
NEW_TOKENS = 16


#: Experts that stay packed.
EXPERTS = kept_packed(parse_model_config({**GPT_OSS, "num_local_experts": 4}))


def quantised_weights(config, seed):
    """Random weights of a config, of which it quantises some."""
    flat = dict(nnx.traversals.flatten_mapping(random_weights(with_quantization(config, None), seed)))
    for path, block in quantized_blocks(config).items():
        own = Mxfp4.of(flat.pop(path), 1) if config is EXPERTS else Quantized.of(flat.pop(path), block)
        flat[(*path, "values")], flat[(*path, "scales")] = own.values, own.scales
    return nnx.traversals.unflatten_mapping(flat)


def target_in(quantization):
    config = dataclasses.replace(TINY, quantization=quantization)
    return Target(config, quantised_weights(config, 0))


@pytest.mark.wide
@pytest.mark.parametrize(
    "stored",
    [BLOCKS, CHANNELS, EXPERTS, *ROWS.values()],
    ids=["blocks", "channels", "MXFP4", "blocks and rows", "channels and rows"],
)
def test_trees_give_plain_decoding_s_tokens(stored):
    target = Target(EXPERTS, quantised_weights(EXPERTS, 0)) if stored is EXPERTS else target_in(stored)
    oracle = OracleProposer(TINY.vocab_size)
    params = [SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=t, seed=1) for t in (0, 0.8)]
    longer = [dataclasses.replace(own, max_tokens=NEW_TOKENS + oracle.depth + 1) for own in params]
    plain = [
        own.token_ids
        for own in serve(TinyEngine(target, settings=PLAIN, slots=2, capacity=192), PROMPTS, longer)
    ]
    truth = [[*prompt, *own] for prompt, own in zip(PROMPTS, plain, strict=True)]
    engine = TinyEngine(
        target,
        settings=TreeSettings(budget=32, width=3),
        slots=2,
        capacity=192,
        proposer=oracle,
        proposer_weights=plant(truth, 192),
    )
    completions = serve(engine, PROMPTS, params)
    differ = sum(
        own.token_ids != expected[:NEW_TOKENS] for own, expected in zip(completions, plain, strict=True)
    )
    # An activation at a rounding boundary of FP8 goes either way, by the order of sums.
    assert differ <= (1 if stored in ROWS.values() else 0)
    assert max(length for own in completions for length in own.accept_lengths) > 3


def test_a_head_in_fp8_drafts_as_its_widened_weights_do():
    config = head_config(TINY)
    config = dataclasses.replace(config, layers=dataclasses.replace(config.layers, quantization=BLOCKS))
    head, target = Head(config, quantised_weights(config, 1)), Target(TINY, random_weights(TINY, 0))
    assert ("fc",) in quantized_blocks(config)
    plain = Head(with_quantization(config, None), widened(head.weights, quantized_blocks(config)))
    got, expected = (np.asarray(draft_logits(target, own, [PROMPTS[1]])) for own in (head, plain))
    # The same float32 weights, in products that may be summed in another order.
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_a_head_quantises_activations_as_its_config_says():
    config = head_config(TINY)
    target, found = Target(TINY, random_weights(TINY, 0)), []
    for own in (BLOCKS, ROWS[BLOCKS]):
        layers = dataclasses.replace(config.layers, quantization=own)
        head_s = dataclasses.replace(config, layers=layers)
        head = Head(head_s, quantised_weights(head_s, 1))
        found.append(np.asarray(draft_logits(target, head, [PROMPTS[1]])))
    apart = np.abs(found[0] - found[1]).max() / np.abs(found[0]).max()
    assert 1e-3 < apart < 0.3


class TestPairs:
    def said(self, folder, caplog, target, **dflash):
        raw = _RAW | _RAW_HEAD
        raw = {**raw, "dflash_config": {**raw["dflash_config"], **dflash}}
        save_checkpoint(folder, raw, random_weights(head_config(TINY), 1))
        with caplog.at_level(logging.WARNING):
            load_draft_head(folder, target=target)
        return caplog.text

    def test_a_target_that_the_head_was_not_trained_with_is_named(self, tmp_path, caplog):
        said = self.said(tmp_path / "head", caplog, target_in(BLOCKS))
        assert (
            "the target is FP8 in blocks of 16 x 24, and the draft head was trained with a target that is not"
            in said
        )

    def test_one_that_it_was_trained_with_is_not(self, tmp_path, caplog):
        assert not self.said(tmp_path / "head", caplog, target_in(BLOCKS), target_format=BLOCKS.format)
        said = self.said(tmp_path / "other", caplog, target_in(None), target_format=BLOCKS.format)
        assert "the target is not quantised, and the draft head was trained with a target that is FP8" in said

    def test_mxfp4_is_how_its_targets_are_published(self, tmp_path, caplog):
        target = Target(dataclasses.replace(TINY, quantization=PACKED), {})
        assert not self.said(tmp_path / "head", caplog, target)
