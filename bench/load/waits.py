"""What requests wait for: their prompts, others' prompts, and the host."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from bench.common.timing import median
from bench.load.arrivals import random_prompts
from bench.load.driving import Followed, Load, quantiles
from jetspec_jax import SamplingParams
from jetspec_jax.engine.chunks import cut_prompts
from jetspec_jax.sampling.structured import StructuredOutputsParams

# Of a request that comes to see how long it waits.
_FEW = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
# Most rounds of a dispatch that the host is timed with: about as many as fit a slice on a GPU.
_HOST_ROUNDS = 8
# Of a request with a grammar, and of one without in its place.
_STRUCTURED_TOKENS = 64


def parse_prompts(text: str) -> tuple[int, int]:
    """How many prompts come together, and their length: "2048" is one of so many tokens, "8x1024" eight.

    Raises:
        ValueError: It is neither.
    """
    count, _, length = text.rpartition("x")
    try:
        parsed = int(count or 1), int(length)
    except ValueError:
        parsed = 0, 0
    if min(parsed) < 1:
        raise ValueError(f"prompts are LENGTH or COUNTxLENGTH, as 2048 or 8x1024, not {text!r}")
    return parsed


def measure_prefill(
    load: Load, prompts: Sequence[tuple[int, int]], repeats: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Tokens of prompts that come together per second, by when all have their first token.

    ``forwards_tokens_per_second`` counts their forwards alone, one after another without a look of the host.
    """
    rows = []
    for count, length in prompts:
        whole, forwards = [], []
        for turn in range(1 + repeats):
            forward = _forward_seconds(load, count, length, rng)
            load.begin()
            own = [
                load.admit(prompt, _FEW, due=0.0)
                for prompt in random_prompts([length] * count, load.pair.target.config.vocab_size, rng)
            ]
            load.until(lambda own=own: all(one.news for one in own))
            last = max(one.news[0][0] for one in own)
            load.clear()
            if turn:  # the first may compile
                whole.append(last)
                forwards.append(forward)
        tokens = count * length
        rows.append(
            {
                "prompts": count,
                "length": length,
                "seconds": median(whole),
                "tokens_per_second": tokens / median(whole),
                "forwards_tokens_per_second": tokens / median(forwards),
                "runs": whole,
            }
        )
    return rows


def _forward_seconds(load: Load, count: int, length: int, rng: np.random.Generator) -> float:
    """Seconds of the forwards of prompts; slots are free, so that they write nothing."""
    runner, size = load.engine.runner, load.engine.plan.size
    left = {slot: rng.integers(0, 2, length, np.int32) for slot in range(count)}
    chunks = cut_prompts(left, size.chunks, size.slots)
    jax.block_until_ready(runner.state.active)
    load.begin()
    for chunk in chunks:
        runner._prefill(chunk._replace(ready=np.zeros_like(chunk.ready)))
    jax.block_until_ready(runner.state)
    return load.now


def fill(load: Load, count: int, rng: np.random.Generator, length: int = 128) -> list[Followed]:
    """So many requests that decode for as long as they can."""
    vocab_size, capacity = load.pair.target.config.vocab_size, load.engine.plan.size.capacity
    endless = SamplingParams(max_tokens=capacity - length, ignore_eos=True, seed=0)
    own = [load.admit(prompt, endless) for prompt in random_prompts([length] * count, vocab_size, rng)]
    load.until(lambda: all(one.news for one in own))
    for _ in range(3):
        load.step(_HOST_ROUNDS)
    return own


def measure_first_tokens(
    load: Load, beside: int, length: int, count: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Time to first token of short prompts that come at any moment, one by one, beside some that decode."""
    load.begin()
    others = fill(load, beside, rng, length)
    started, waits = load.now, []
    for prompt in random_prompts([length] * count, load.pair.target.config.vocab_size, rng):
        due = load.now + rng.uniform(0, 0.1)
        while load.now < due:  # it comes in the middle of a dispatch
            load.step()
        one = load.admit(prompt, _FEW, due)
        load.until(lambda one=one: not one.request.open)
        waits.append(one.first_token or 0.0)
    ended, gaps = load.now, [gap for one in others for gap in one.gaps(started)]
    load.clear()
    return {
        "beside": beside,
        "length": length,
        "count": count,
        "seconds": ended - started,
        "first_token": quantiles(waits),
        "gaps_of_others": quantiles(gaps),
    }


def measure_gaps(
    load: Load, beside: int, length: int, repeats: int, rng: np.random.Generator
) -> dict[str, Any]:
    """The longest gap of some that decode while a long prompt arrives."""
    load.begin()
    others, before, during, waits = fill(load, beside, rng), [], [], []
    for prompt in random_prompts([length] * repeats, load.pair.target.config.vocab_size, rng):
        started = load.now
        for _ in range(10):
            load.step()
        before += [gap for one in others for gap in one.gaps(started)]
        one = load.admit(prompt, _FEW)
        load.until(lambda one=one: not one.request.open)
        during += [gap for own in others for gap in own.gaps(one.due)]
        waits.append(one.first_token or 0.0)
    load.clear()
    return {
        "beside": beside,
        "length": length,
        "repeats": repeats,
        "gaps_before": quantiles(before),
        "gaps": quantiles(during),
        "first_token_of_the_long": quantiles(waits),
    }


def measure_shared(
    load: Load, shared: int, own: int, repeats: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Time to first token of a request, and of a second one that begins like it."""
    vocab_size, times, hits = load.pair.target.config.vocab_size, [], []
    for _ in range(1 + repeats):
        [begin, *ends] = random_prompts([shared, own, own], vocab_size, rng)
        pair = []
        for end in ends:
            load.begin()
            one = load.admit(begin + end, _FEW, due=0.0)
            load.until(lambda one=one: not one.request.open)
            pair.append(one.first_token or 0.0)
            hits.append(one.request.prefix_tokens)
        times.append(pair)
    load.clear()
    first, second = np.array(times[1:]).T
    return {
        "shared": shared,
        "own": own,
        "prefix_tokens": max(hits),
        "first": quantiles(first),
        "second": quantiles(second),
        "ratio": float(np.median(second / first)),
    }


def measure_structured(load: Load, beside: int, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """What some that decode get beside one more request, without a grammar and with one; needs a tokenizer.

    The grammar is a regular expression that goes on until the request has all its tokens.
    """
    rows, free = [], SamplingParams(max_tokens=_STRUCTURED_TOKENS, seed=0, ignore_eos=True)
    form = StructuredOutputsParams(regex="[a-z ]{4096}")
    wants = {"free": free, "grammar": replace(free, structured_outputs=form, ignore_eos=False)}
    [prompt] = random_prompts([128], load.pair.target.config.vocab_size, rng)
    for name, params in wants.items():
        rates, gaps = [], []
        for turn in range(1 + count):
            load.begin()
            others = fill(load, beside, rng)
            one = load.admit(prompt, params)
            load.until(lambda one=one: bool(one.news))
            started, before = load.now, sum(len(own.request.tokens) for own in others)
            load.until(lambda one=one: not one.request.open)
            if turn:  # the first may compile
                got = sum(len(own.request.tokens) for own in others) - before
                rates.append(got / (load.now - started))
                gaps += [gap for own in others for gap in own.gaps(started)]
            load.clear()
        rows.append(
            {
                "one more is": name,
                "others": beside,
                "others_tokens_per_second": median(rates),
                **{f"gap_{key}": value for key, value in quantiles(gaps).items()},
            }
        )
    return rows


def measure_host(
    load: Load, slots: Sequence[int], dispatches: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Milliseconds of the engine's thread in a dispatch, without the wait for the device.

    Where the device is the CPU, to launch may be to compute: ``thread_ms`` counts what the thread itself did.
    """
    rows = []
    for count in slots:
        load.begin()
        own = fill(load, count, rng, 32)
        load.begin()
        for _ in range(dispatches):
            load.step(_HOST_ROUNDS)
        spent = load.spent
        if not all(one.request.open for one in own):
            raise RuntimeError(f"a request of the {count} that the host was timed with has ended too early")
        load.clear()
        rows.append(
            {
                "slots": count,
                "dispatches": dispatches,
                "launch_ms": 1e3 * median(spent.launch),
                "take_ms": 1e3 * median(spent.take),
                "host_ms": 1e3 * median(spent.host),
                "thread_ms": 1e3 * median(spent.thread),
                "wait_ms": 1e3 * median(spent.wait),
                "rounds": median(spent.rounds),
            }
        )
    return rows
