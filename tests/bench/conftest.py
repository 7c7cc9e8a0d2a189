"""A tiny random pair and two random prompts, which commands may decode instead of what they are told."""

import numpy as np
import pytest

from bench.common.pair import Pair
from bench.common.prompts import Prompt
from bench.common.workload import Workload
from jetspec_jax import SamplingParams
from tests.decode.tiny import TINY, random_head, random_target, word_tokenizer
from train.data.prompts import Entry


@pytest.fixture(scope="session")
def pair():
    """Of a vocabulary so small that a random head is right now and then."""
    return Pair(random_target(TINY, 0, tokenizer=word_tokenizer(TINY.vocab_size)), random_head(TINY, 1))


def random_workloads(arguments, target, prompts, temperatures, *, batch=1):
    """Random tokens in place of each prompt's, at each temperature."""
    count = len(prompts)
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size - 1, (count, 9)).tolist()
    return {
        temperature: Workload(
            list(prompts),
            ids,
            [SamplingParams(temperature, seed=i, max_tokens=arguments.max_tokens) for i in range(count)],
            [None] * count,
        )
        for temperature in sorted(set(temperatures))
    }


def text_prompt(name, text="x", **more):
    """A text to be continued."""
    return Prompt(name, Entry(name, "text", text), **more)
