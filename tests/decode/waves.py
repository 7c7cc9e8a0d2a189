"""Batches of requests that take over the slots of those before them, with trees on deep paths."""

import dataclasses

import jax
import jax.numpy as jnp

from jetspec_jax import SamplingParams, generate
from tests.decode.compilations import compilations
from tests.decode.oracle import plant
from tests.decode.ties import TIE, choice_rows, gaps
from tests.decode.tiny import free_slots, serve


def with_nan(stores):
    return jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), stores)


def serve_waves(engine, oracle, waves, rng, *, limit, prompts=(1, 110), new=(15, 35)):
    """Serves waves of requests, checks every token, and that nothing compiles after the first wave."""
    target, runner, lengths = engine.target, engine.runner, []
    runner.compiler.compile(runner.programs([]))
    for wave, members in enumerate(waves):
        asked = [rng.integers(0, 64, rng.integers(*prompts)).tolist() for _ in range(members)]
        params = [
            SamplingParams(temperature=float(i % 2), seed=i, max_tokens=int(rng.integers(*new)))
            for i in range(members)
        ]
        free = [dataclasses.replace(own, max_tokens=own.max_tokens + oracle.depth + 1) for own in params]
        truth = [generate(target, [p], own)[0].token_ids for p, own in zip(asked, free, strict=True)]
        sequences = [[] for _ in range(4)]
        for slot, prompt, tokens in zip(free_slots(engine.scheduler), asked, truth, strict=False):
            sequences[slot] = prompt + tokens
        runner.weights = runner.weights._replace(proposer=plant(sequences, limit))
        with compilations() as seen:
            outputs = serve(engine, asked, params)
        assert wave == 0 or seen == []
        for prompt, own, output, tokens in zip(asked, params, outputs, truth, strict=True):
            assert output.token_ids == tokens[: own.max_tokens]
            rows = choice_rows(target, prompt, output.token_ids, own)
            assert not ((rows.argmax(-1) != output.token_ids) & (gaps(rows) >= TIE)).any()
            lengths += output.accept_lengths
    return lengths
