import numpy as np
import pytest
import torch

from jetspec_jax import SamplingParams, generate, hidden_states, load_target, logits
from tests.parity.oracle import (
    SHAPES,
    TOLERANCE,
    VOCAB,
    assert_close,
    oracle_logits,
    random_ids,
    random_model,
    save_newer,
    save_older,
)

pytestmark = pytest.mark.parity


class TestLogits:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("seed", [0, 1])
    def test_both_dialects(self, tmp_path, shape, seed):
        model = random_model(shape, seed)
        ids = random_ids(seed, 2, 40)  # five times the sliding window
        theirs = oracle_logits(model, ids)
        newer = load_target(save_newer(model, tmp_path / "newer"), dtype="float32")
        older = load_target(save_older(model, tmp_path / "older"), dtype="float32")
        assert newer.config == older.config
        ours = np.asarray(logits(newer, ids))
        assert_close(ours, theirs)
        np.testing.assert_array_equal(logits(older, ids), ours)

    def test_hidden_states(self, tmp_path):
        model, ids = random_model(), random_ids(0, 2, 40)
        with torch.no_grad():
            states = model(torch.tensor(ids, dtype=torch.long), output_hidden_states=True).hidden_states
        target = load_target(save_newer(model, tmp_path / "saved"), dtype="float32")
        found = [*hidden_states(target, ids, layers=range(3)), hidden_states(target, ids)]
        for ours, theirs in zip(found, states[1:], strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize("shape", ["untied", "sliding"])
    def test_bfloat16(self, tmp_path, shape):
        """Rounding is the only difference: from float32, ours is no farther than transformers' own bf16."""
        model = random_model(shape)
        ids = random_ids(0, 2, 40)
        exact = oracle_logits(model, ids)
        target = load_target(save_newer(model, tmp_path / "saved"), dtype="bfloat16")
        ours = np.asarray(logits(target, ids))
        assert ours.dtype == np.float32
        assert np.isfinite(ours).all()
        theirs = oracle_logits(model.to(torch.bfloat16), ids)
        assert _deviation(ours, exact) < 1.5 * _deviation(theirs, exact)


def _deviation(values, exact):
    return np.sqrt(np.mean((values - exact) ** 2))


@torch.no_grad()
def _greedy(model, prompt):
    """transformers' greedy tokens, and the smallest gap between the two best logits on the way."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits).topk(2, dim=-1).values[:, 0]
    return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


class TestGreedy:
    """Our chunked prefill and cached decoding against transformers' own."""

    # Below, at and above a page (64) and a prompt chunk (128).
    PROMPTS = tuple(random_ids(length, length).tolist() for length in (1, 7, 64, 65, 127, 128, 129, 300))

    @pytest.mark.parametrize("shape", ["untied", "sliding"])
    def test_text(self, tmp_path, shape):
        model = random_model(shape, seed=2)
        target = load_target(save_newer(model, tmp_path / "saved"), dtype="float32")
        ours = generate(target, self.PROMPTS, SamplingParams(max_tokens=24))
        for prompt, completion in zip(self.PROMPTS, ours, strict=True):
            theirs, gap = _greedy(model, prompt)
            assert gap > 1e-4  # no tie excuses a difference
            assert (completion.token_ids, completion.finish_reason) == (theirs, "length")

    def test_end_of_sequence(self, tmp_path):
        model = random_model(seed=2)
        free = [_greedy(model, prompt)[0] for prompt in self.PROMPTS]
        # The most widespread token ends most of the texts; another one ends none.
        eos = max(range(VOCAB), key=lambda token: sum(token in text for text in free))
        never = next(token for token in range(VOCAB) if not any(token in text for text in free))
        model.generation_config.eos_token_id = [never, eos]
        target = load_target(save_newer(model, tmp_path / "saved"), dtype="float32")
        reasons = set()
        for prompt, completion in zip(
            self.PROMPTS, generate(target, self.PROMPTS, SamplingParams(max_tokens=24)), strict=True
        ):
            theirs, _ = _greedy(model, prompt)
            assert completion.token_ids == theirs
            assert completion.finish_reason == ("stop" if eos in theirs else "length")
            reasons.add(completion.finish_reason)
        assert reasons == {"stop", "length"}
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        assert [completion.token_ids for completion in generate(target, self.PROMPTS, params)] == free
