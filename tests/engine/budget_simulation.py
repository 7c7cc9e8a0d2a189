"""A simulated machine for budget policies: rounds of Qwen3-8B on an H200, acceptance of the demo pair.

`python -m tests.engine.budget_simulation` prints what each bucket and "auto" take.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from jetspec_jax.engine.batch import Batch, BatchResult, Chunk
from jetspec_jax.engine.policy import AutoBudget, FixedBudget, LiveSlot
from jetspec_jax.tree import tree_buckets
from jetspec_jax.tree.auto import Auto

ACCEPTANCE = Path(__file__).with_name("acceptance.npz")
BUCKETS = (1, *tree_buckets(256, 16))
NONE = np.zeros((0, 0), np.int32)
ROUNDS = Path(__file__).with_name("qwen3_8b_rounds.json")
KINDS = ("easy", "hard", "noise", "mixed", "changing")
SEEDS, PROMPT_TOKENS, UNCOUNTED = 10, 64, 64
#: Seconds of a dispatch beside its rounds, of which the measured rounds hold a 16th already.
DISPATCH = 0.5e-3
#: What a plain round takes more where it shows a draft head its context.
BESIDE_A_HEAD = 1.015
#: Standard deviation of a dispatch's time.
NOISE = 0.02


class Text(NamedTuple):
    """Drafted tokens accepted below each of T tokens with trees of each bucket: as expected, and really."""

    expected: Float32[np.ndarray, "T K"]
    accepted: Float32[np.ndarray, "T K"]


@functools.cache
def texts(kind):
    """Texts that are easy or hard to draft; "noise" is harder still."""
    with np.load(ACCEPTANCE) as arrays:
        pairs = zip(arrays[f"{kind}_expected"], arrays[f"{kind}_accepted"], strict=True)
        return [Text(expected.astype(np.float32), hits.astype(np.float32)) for expected, hits in pairs]


def session(kind, seed):
    """The texts of one engine, one after another."""
    if kind not in ("mixed", "changing"):
        return [texts(kind)[seed]]
    first, second = texts("easy")[seed], texts(("hard", "noise")[seed // 2 % 2])[seed]
    if seed % 2:
        first, second = second, first
    if kind == "mixed":
        return [first, second, first, second]
    half = len(first.expected) // 2
    return [Text(*(np.concatenate([a[:half], b[half:]]) for a, b in zip(first, second, strict=True)))]


@functools.cache
def qwen3_8b():
    """Measured seconds of rounds by bucket: without a context, and per token of it.

    16 and 32 nodes lie between 1 and 64.
    """
    measured = json.loads(ROUNDS.read_text())
    ms = {row["bucket"]: row["round_ms"] for row in measured["rows"]}
    verify = {row["bucket"]: row["verify_ms"] for row in measured["rows"]}
    for bucket in (16, 32):
        # Drafting takes the same for all; verifying lies between one node and 64.
        ms[bucket] = ms[64] - (verify[64] - verify[1]) * (64 - bucket) / 63
    far = {(row["bucket"], row["context"]): row["round_ms"] for row in measured["far"]}
    slope = {bucket: (far[bucket, 8192] - far[bucket, 1024]) / (8192 - 1024) for bucket in (1, 128)}
    seconds = {}
    for bucket in BUCKETS:
        own = slope[1] + (slope[128] - slope[1]) * (bucket - 1) / 127
        seconds[bucket] = 1e-3 * (ms[bucket] - own * 1024), 1e-3 * own
    return seconds


def beside_a_head(seconds):
    """The rounds of an engine that has a draft head."""
    return {**seconds, 1: tuple(BESIDE_A_HEAD * own for own in seconds[1])}


def run_dispatch(text, start, bucket, rounds, rng, costs, timed=True):
    """One dispatch from a position of a text: its record, and its seconds."""
    index, at, rows = BUCKETS.index(bucket), start, []
    (alone, token), seconds = costs[bucket], DISPATCH
    while at < len(text.accepted) and len(rows) < rounds:
        rows.append(at)
        seconds += alone + token * (PROMPT_TOKENS + at)
        at += 1 + (int(text.accepted[at, index - 1]) if index else 0)
    seconds *= np.exp(rng.normal(0, NOISE))
    # Rows after the end did not decode.
    sizes = np.zeros((rounds, 1), np.int32)
    sizes[: len(rows)] = bucket
    tokens = np.full((rounds, 1, 16), -1, np.int32)
    for row, (here, there) in enumerate(zip(rows, [*rows[1:], at], strict=True)):
        tokens[row, 0, : min(there, len(text.accepted)) - here] = 7
    reach = [None, None]
    if index:
        reach = [np.zeros((rounds, 1, index), np.float32) for _ in range(2)]
        for filled, source in zip(reach, (text.expected, text.accepted), strict=True):
            filled[: len(rows), 0] = source[rows, :index]
    return dispatch(bucket, (0,), seconds if timed else None, (), tokens, sizes, *reach), seconds


def dispatch(bucket, live, seconds=None, forwards=(), tokens=NONE[..., None], sizes=NONE, *reach):
    """The result of a dispatch after prefill forwards of some shapes."""
    chunks = [Chunk(np.zeros(0), np.zeros(shape), np.zeros(0), np.zeros(0)) for shape in forwards]
    batch = Batch(chunks=tuple(chunks), live=live, bucket=bucket)
    return BatchResult(batch, seconds, tokens, sizes, np.zeros_like(sizes), *reach)


def serve(policy, requests, rng, costs, uncounted=UNCOUNTED):
    """Seconds of a token when a policy serves texts one after another."""
    taken, done, counted = 0.0, 0, 0
    for text in requests:
        at, length = 0, len(text.accepted)
        while at < length:
            live = [LiveSlot(length - at, sampled=False)]
            (_, bucket), rounds = policy.choose(live, 0, (), lambda *shape: shape)
            record, seconds = run_dispatch(text, at, bucket, rounds, rng, costs, timed=at > 0)
            policy.observe(record)
            new = int((record.tokens >= 0).sum())
            late = min(max(done + new - uncounted, 0), new)
            taken, counted = taken + seconds * late / new, counted + late
            at, done = at + new, done + new
    return taken / counted


def seconds_per_token(kind, make_policy, costs):
    """Of each seed's session, which a policy of its own serves."""
    return np.array(
        [
            serve(
                make_policy(np.random.default_rng(seed)),
                session(kind, seed),
                np.random.default_rng(100 + seed),
                costs,
            )
            for seed in range(SEEDS)
        ]
    )


def fixed(kind):
    """Seconds of a token with each bucket, on average; plain decoding alone has no head beside it."""
    return {
        b: seconds_per_token(kind, lambda _, b=b: FixedBudget([(1, b)]), qwen3_8b()).mean() for b in BUCKETS
    }


def auto(kind):
    """Seconds of a token with "auto", on average."""
    shapes = [(1, bucket) for bucket in BUCKETS]
    costs = beside_a_head(qwen3_8b())
    return seconds_per_token(kind, lambda _: AutoBudget(shapes, Auto().probing), costs).mean()


def main():
    """Prints milliseconds of a token."""
    print("ms a token", *(f"{bucket:>6}" for bucket in BUCKETS), "  auto  of best  of plain")
    for kind in KINDS:
        alone, own = fixed(kind), auto(kind)
        shown = [f"{1e3 * each:6.3f}" for each in [*alone.values(), own]]
        best = min(alone.values())
        print(f"{kind:10}", *shown, f"{best / own:8.1%} {alone[1] / own:9.1%}")


if __name__ == "__main__":
    main()
