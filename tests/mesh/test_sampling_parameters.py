"""On a mesh requests of every kind get what they get on one device, and are told the same of it."""

import pytest

from jetspec_jax import Head, SamplingParams, Target, generate, generate_tree
from jetspec_jax.inspect.exactness import first_divergence
from tests.decode.tiny import random_weights, word_tokenizer
from tests.marks import wide
from tests.mesh.tiny import VOCAB, config_of, head_config, on_mesh
from tests.meshes import mesh_of

ALL = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "min_tokens": 6,
    "stop_token_ids": list(range(0, VOCAB, 3)),
    "logit_bias": {token: (-1.5) ** (token % 5) for token in range(20, VOCAB)},
    "allowed_token_ids": list(range(2, VOCAB)),
    "bad_words": ["d", "ef", "ghi", *(f"{letter}{letter}" for letter in "jklmnopqrstuvwxyz")],
    "max_tokens": 20,
    "logprobs": 20,
    "prompt_logprobs": 3,
}
PROMPTS = [[5, 9, 2, 7], [3] * 30, [11, 66]]
PARAMS = [
    SamplingParams(**ALL),
    SamplingParams(**ALL, temperature=1.0, seed=1, top_p=0.95),
    SamplingParams(max_tokens=20, temperature=1.0, seed=2),
]


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 2), wide((1, 4))], ids=str)
def test_requests_of_every_kind(mesh):
    config = config_of("qwen3")
    own = head_config(config)
    whole = Target(config, random_weights(config, 0), (4,), word_tokenizer(VOCAB))
    target, head = on_mesh((whole, Head(own, random_weights(own, 1))), mesh_of(*mesh))
    plain = generate(whole, PROMPTS, PARAMS)
    tree = generate_tree(target, head, PROMPTS, PARAMS, budget=16, width=3)
    for prompt, params, ours, theirs in zip(PROMPTS, PARAMS, tree, plain, strict=True):
        parted = first_divergence(whole, prompt, params, ours.token_ids, theirs.token_ids)
        assert parted is None, (params, parted)
        same_told(ours.logprobs, theirs.logprobs, params.logprobs)
        same_told(ours.prompt_logprobs, theirs.prompt_logprobs, params.prompt_logprobs)


def same_told(found, expected, count):
    """Rounding may swap the last of the likeliest with the first that is not told of."""
    if count is None:
        assert found is None
        assert expected is None
        return
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert len(mine.keys() ^ other.keys()) <= 2
            for token in mine.keys() & other.keys():
                assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
