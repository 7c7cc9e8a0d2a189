"""Measures latency: prefill, other requests' prefill, and the host."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from bench.common.timing import median
from bench.load.arrivals import random_prompts
from bench.load.driving import Load, TimedRequest, quantiles
from jetspec_jax import SamplingParams
from jetspec_jax.engine.size import cut_prompts
from jetspec_jax.sampling.structured import StructuredOutputsParams

# The parameters of a request whose time to first token is measured.
_FEW = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
# Tokens of a short prompt, and of a prompt after its shared prefix.
_SHORT, TAIL = 128, 64
# The most rounds per dispatch while the host is timed: about as many as a slice has on a GPU.
_HOST_ROUNDS = 8
# Tokens of the request with a grammar, and of its counterpart without one.
_STRUCTURED_TOKENS = 64


def parse_prompts(text: str) -> tuple[int, int]:
    """The number and length of prompts that arrive together: "2048" is one prompt, "8x1024" are eight.

    Raises:
        ValueError: The text has another form.
    """
    count, _, length = text.rpartition("x")
    try:
        parsed = int(count or 1), int(length)
    except ValueError:
        parsed = 0, 0
    if min(parsed) < 1:
        raise ValueError(f"prompts are LENGTH or COUNTxLENGTH, for example 2048 or 8x1024, not {text!r}")
    return parsed


def measure_prefill(
    load: Load, prompts: Sequence[tuple[int, int]], repeats: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Prompt tokens per second, from the arrival of all prompts until each has its first token.

    ``forwards_tokens_per_second`` counts only the forwards, launched without waiting for the host.
    """
    rows = []
    for count, length in prompts:
        whole, forwards = [], []
        for turn in range(1 + repeats):
            forward = _forward_seconds(load, count, length, rng)
            requests = [
                load.request(prompt, _FEW, due=0.0)
                for prompt in random_prompts([length] * count, load.pair.target.config.vocab_size, rng)
            ]
            load.begin()
            load.submit(requests)
            load.until(lambda requests=requests: all(timed.deliveries for timed in requests))
            last = max(timed.deliveries[0][0] for timed in requests)
            load.clear()
            if turn:  # the first turn may compile
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
    """Seconds of the prompts' forwards in free slots, so that the forwards write nothing."""
    runner, size = load.engine.runner, load.engine.plan.size
    remaining = {slot: rng.integers(0, 2, length, np.int32) for slot in range(count)}
    chunks = cut_prompts(remaining, size.chunks, size.slots)

    def forwards() -> float:
        for slot in remaining:  # the engine releases a slot with its next batch
            runner.state = runner.decoder.release(runner.state, np.int32(slot))
        jax.block_until_ready(runner.state.active)
        started = time.perf_counter()
        for chunk in chunks:
            runner._prefill(chunk._replace(ready=np.zeros_like(chunk.ready)))
        jax.block_until_ready(runner.state)
        return time.perf_counter() - started

    return load.engine.run(forwards)


def fill(load: Load, count: int, rng: np.random.Generator, length: int = _SHORT) -> list[TimedRequest]:
    """Starts ``count`` requests that decode until their slots are full."""
    vocab_size, capacity = load.pair.target.config.vocab_size, load.engine.plan.size.capacity
    endless = SamplingParams(max_tokens=capacity - length, ignore_eos=True, seed=0)
    requests = [load.request(prompt, endless) for prompt in random_prompts([length] * count, vocab_size, rng)]
    load.engine.most_rounds = _HOST_ROUNDS
    load.submit(requests)
    load.until(lambda: all(timed.deliveries for timed in requests))
    load.dispatches(3, _HOST_ROUNDS)
    return requests


def measure_first_tokens(load: Load, beside: int, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Time to first token of short prompts, which arrive one at a time beside decoding requests."""
    load.begin()
    others = fill(load, beside, rng)
    started, waits = load.now, []
    for prompt in random_prompts([_SHORT] * count, load.pair.target.config.vocab_size, rng):
        time.sleep(rng.uniform(0, 0.1))  # the request arrives during a dispatch
        timed = load.admit(prompt, _FEW)
        load.until(lambda timed=timed: not timed.request.open)
        waits.append(timed.first_token or 0.0)
    ended, gaps = load.now, [gap for other in others for gap in other.gaps(started)]
    load.clear()
    return {
        "beside": beside,
        "length": _SHORT,
        "count": count,
        "seconds": ended - started,
        "first_token": quantiles(waits),
        "gaps_of_others": quantiles(gaps),
    }


def measure_gaps(
    load: Load, beside: int, length: int, repeats: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Gaps between tokens of decoding requests, before and while a long prompt arrives."""
    load.begin()
    others, before, during, waits = fill(load, beside, rng), [], [], []
    for prompt in random_prompts([length] * repeats, load.pair.target.config.vocab_size, rng):
        started = load.now
        load.dispatches(10)
        before += [gap for other in others for gap in other.gaps(started)]
        timed = load.admit(prompt, _FEW)
        load.until(lambda timed=timed: not timed.request.open)
        during += [gap for other in others for gap in other.gaps(timed.due)]
        waits.append(timed.first_token or 0.0)
    load.clear()
    return {
        "beside": beside,
        "length": length,
        "repeats": repeats,
        "gaps_before": quantiles(before),
        "gaps": quantiles(during),
        "first_token_of_the_long": quantiles(waits),
    }


def measure_shared(load: Load, shared: int, repeats: int, rng: np.random.Generator) -> dict[str, Any]:
    """Time to first token of two requests with a shared prefix and different tails."""
    vocab_size, times, hits = load.pair.target.config.vocab_size, [], []
    for _ in range(1 + repeats):
        [prefix, *tails] = random_prompts([shared, TAIL, TAIL], vocab_size, rng)
        pair = []
        for rest in tails:
            load.begin()
            timed = load.admit(prefix + rest, _FEW, due=0.0)
            load.until(lambda timed=timed: not timed.request.open)
            pair.append(timed.first_token or 0.0)
            hits.append(timed.request.prefix_tokens)
        times.append(pair)
    load.clear()
    first, second = np.array(times[1:]).T
    return {
        "shared": shared,
        "own": TAIL,
        "prefix_tokens": max(hits),
        "first": quantiles(first),
        "second": quantiles(second),
        "ratio": float(np.median(second / first)),
    }


def measure_structured(load: Load, beside: int, count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Speed and gaps of decoding requests beside one more, without and with a grammar; needs a tokenizer.

    The grammar is a regular expression that matches until the request has all of its tokens.
    """
    rows, free = [], SamplingParams(max_tokens=_STRUCTURED_TOKENS, seed=0, ignore_eos=True)
    form = StructuredOutputsParams(regex="[a-z ]{4096}")
    kinds = {"free": free, "grammar": replace(free, structured_outputs=form, ignore_eos=False)}
    [prompt] = random_prompts([_SHORT], load.pair.target.config.vocab_size, rng)
    for name, params in kinds.items():
        rates, gaps = [], []
        for turn in range(1 + count):
            load.begin()
            others = fill(load, beside, rng)
            timed = load.admit(prompt, params)
            load.until(lambda timed=timed: bool(timed.deliveries))
            started, before = load.now, sum(len(other.request.tokens) for other in others)
            load.until(lambda timed=timed: not timed.request.open)
            if turn:  # the first turn may compile
                generated = sum(len(other.request.tokens) for other in others) - before
                rates.append(generated / (load.now - started))
                gaps += [gap for other in others for gap in other.gaps(started)]
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
    """Milliseconds of the engine's thread per dispatch, without the wait for the device.

    On a CPU a launch may compute: ``thread_ms`` counts only the thread's processor time.
    """
    rows = []
    for count in slots:
        load.begin()
        requests = fill(load, count, rng, 32)
        load.begin()
        load.dispatches(dispatches, _HOST_ROUNDS)
        spent = load.spent
        if not all(timed.request.open for timed in requests):
            raise RuntimeError(f"one of the {count} requests has ended while the host was timed")
        load.clear()
        rows.append(
            {
                "slots": count,
                "dispatches": dispatches,
                "launch_ms": 1e3 * median(spent.launch),
                "take_ms": 1e3 * median(spent.collect),
                "host_ms": 1e3 * median(spent.host),
                "thread_ms": 1e3 * median(spent.thread),
                "wait_ms": 1e3 * median(spent.wait),
                "rounds": median(spent.rounds),
            }
        )
    return rows
