"""An engine that computes nothing: the real scheduler and policy over recorded rounds.

Each dispatch sleeps as long as its rounds took on the device that they were recorded on, with acceptance
drawn from published means. Tokens are those of the demo's prompts, over and over.
"""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from bench.common.prompts import encode_prompts, load_prompts
from bench.load.published import DEPTH, Acceptance, expected
from jetspec_jax import AsyncLLM, DecodeWeights
from jetspec_jax.demo import DEMO
from jetspec_jax.engine.budget_policy import AutoBudget, BudgetPolicy, FixedBudget
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.records import Batch, DispatchRecord
from jetspec_jax.engine.request import Request, State
from jetspec_jax.engine.round_costs import Pair, RoundCosts
from jetspec_jax.engine.runner import Decode, Runner
from jetspec_jax.engine.scheduler import Scheduler
from jetspec_jax.engine.size import chunks_for
from jetspec_jax.engine.standing import plan_standing

RESULTS = Path(__file__).parents[1] / "results"
#: Rounds of one request and of eight, recorded on one H200.
RECORDED = ("round-qwen3-8b-h200.json", "round-qwen3-8b-h200-batch8.json")
#: Prompt tokens a second in the same shapes on the same device: see docs/benchmarks.md.
PREFILL_PER_SECOND = 20_600


class RecordedRounds:
    """Milliseconds of a round by its rows, live slots times nodes: lines between what was recorded.

    Beyond the ends trees below the fewest rows cost as much as those, and lines go on above the most.
    """

    def __init__(self, reports: Sequence[Mapping[str, Any]]):
        """Takes reports of ``bench round``.

        Raises:
            ValueError: They hold too few rounds for a line.
        """
        found: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
        for row in itertools.chain.from_iterable(report["rows"] for report in reports):
            bucket = row["bucket"]
            found[bucket > 1].setdefault(row["batch"] * bucket, []).append(row["round_ms"])
        if min(map(len, found.values())) < 2:
            raise ValueError("recorded rounds must have two plain ones and two of trees, of different rows")
        self._lines = {
            trees: (np.array(sorted(own)), np.array([np.mean(own[rows]) for rows in sorted(own)]))
            for trees, own in found.items()
        }

    def seconds(self, pair: Pair) -> float:
        """Seconds of a round."""
        live, bucket = pair
        rows, times = self._lines[bucket > 1]
        count = live * bucket
        if count > rows[-1]:
            slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
            return 1e-3 * float(times[-1] + slope * (count - rows[-1]))
        return 1e-3 * float(np.interp(count, rows, times))

    def costs(self, pairs: Sequence[Pair]) -> RoundCosts:
        """What an engine would have measured; a dispatch's own time is in the rounds already."""
        each = {pair: (self.seconds(pair), self.seconds(pair)) for pair in pairs}
        return RoundCosts((64, 1024), each, dict.fromkeys(pairs, 0.0))


class ReplayedEngine(Engine):
    """Steps as an `Engine` does for a driver, without a device.

    Attributes:
        thread_seconds: Of processor time that its steps took.
    """

    def __init__(
        self,
        plan: EnginePlan,
        weights: DecodeWeights,
        rounds: RecordedRounds,
        task: str,
        ids: Sequence[int],
        *,
        chains: bool,
    ):
        """Has the slots, pages and trees that a GPU's engine of the plan would have.

        Args:
            plan: What is asked for.
            weights: Of the models, which nobody reads.
            rounds: How long they take.
            task: The prompt set whose acceptance is drawn.
            ids: Tokens that are given out.
            chains: Whether its trees are chains.
        """
        self.plan, self.weights = plan, weights
        self.broken, self.record = False, None
        self.runner = cast(Runner, SimpleNamespace(in_flight=None))  # nothing is ever on its way
        own = plan.for_many()
        buckets = tuple(decoder.bucket for decoder in own.decoders)
        size = replace(own.size, chunks=chunks_for(own.size.slots, gpu=True))
        self._costs = rounds.costs(size.rounds(buckets))
        policy: BudgetPolicy = FixedBudget(buckets[-1], self._costs, own.slices)
        if own.auto is not None:
            policy = AutoBudget(buckets, self._costs, own.auto.probing, own.slices)
        self.scheduler = Scheduler(size, policy, 1 + DEPTH)
        trees = tuple(bucket for bucket in buckets if bucket > 1)
        self._acceptance = Acceptance(task, trees, chains=chains) if trees else None
        self._rng, self._ids, self._place = np.random.default_rng(0), np.asarray(ids, np.int32), 0
        self.thread_seconds = 0.0

    def admit(self, request: Request) -> Request:
        """Queues a request. Raises ValueError if it can never be served."""
        self.scheduler.add(request)
        return request

    def compile(self, kinds: Sequence[Any], *, scores: bool = False) -> None:
        """There is nothing to compile."""

    def close(self) -> None:
        """There is nothing to free."""

    def step(self, most_rounds: int | None = None, decode: Decode | None = None) -> list[Request]:
        """One dispatch; it takes as long as on the recorded device. No ``decode`` runs."""
        worked = time.thread_time()  # without the sleep
        batch = self.scheduler.next_batch(most_rounds)
        record, seconds = self._replay(batch)
        prompts = sum(int(chunk.counts.sum()) for chunk in batch.chunks)
        self.record = record if prompts else record._replace(seconds=seconds or None)
        time.sleep(seconds + prompts / PREFILL_PER_SECOND)
        served = self.scheduler.take(self.record)
        for request in served:
            request.tell()
        self.thread_seconds += time.thread_time() - worked
        return served

    def _replay(self, batch: Batch) -> tuple[DispatchRecord, float]:
        """What the rounds of a batch did, and their seconds; a slot ends when it has all its tokens."""
        live, turns, bucket = len(batch.live), batch.rounds, batch.bucket
        left = {own.slot: own.left for own in self.scheduler.requests if own.state is State.DECODING}
        members = np.array([left.get(slot, 0) for slot in batch.live], np.int64)
        committed = np.ones((turns, live), np.int64)
        reach: tuple[Any, ...] = ()
        if bucket > 1:
            assert self._acceptance is not None, "without trees all rounds are plain"
            last = 1 + self._acceptance.buckets.index(bucket)
            drawn = self._acceptance.draw(turns * live, self._rng)[:, :last]
            committed += drawn[:, -1].reshape(turns, live)
            means = expected(self._acceptance, turns * live)[:, :last]
            reach = tuple(own.reshape(turns, live, last).astype(np.float32) for own in (means, drawn))
        before = np.cumsum(committed, axis=0) - committed
        sizes = np.where(before < members, bucket, 0).astype(np.int32)
        ran = int((sizes > 0).any(axis=1).sum())
        taken = np.where(sizes[:ran, :, None] > 0, np.arange(DEPTH + 1) < committed[:ran, :, None], False)
        count = int(taken.sum())
        tokens = np.full((ran, live, DEPTH + 1), -1, np.int32)
        tokens[taken] = np.take(self._ids, np.arange(self._place, self._place + count), mode="wrap")
        self._place += count
        seconds = ran * self._costs.at((live, bucket), 0, np.inf) if ran else 0.0
        reach = tuple(own[:ran] for own in reach)
        return DispatchRecord(bucket, batch.live, None, tokens, sizes[:ran], *reach), seconds


def replay(llm: AsyncLLM, given: Mapping[str, Any], reports: Sequence[str], task: str) -> ReplayedEngine:
    """Puts an engine that replays in the place of an `AsyncLLM`'s own.

    Args:
        llm: It has served nobody yet.
        given: What it was made with.
        reports: Of rounds; a name without a folder may be one in bench/results.
        task: The prompt set whose acceptance is drawn.
    """
    own, head = llm.llm, llm.llm.draft_head
    names = ("max_slots", "capacity", "implementation")
    plan = plan_standing(own.target, head, own.settings, **{name: given.get(name) for name in names})
    paths = [Path(name) if Path(name).exists() else RESULTS / name for name in reports]
    recorded = RecordedRounds([json.loads(path.read_text(encoding="utf-8")) for path in paths])
    proposer = None if plan.decoder.proposer is None or head is None else head.weights
    weights = DecodeWeights(own.target.weights, proposer)
    prompts = encode_prompts(own.target, load_prompts(DEMO), {})
    special = {*own.target.eos_token_ids, *own.target.tokenizer.all_special_ids}
    ids = [token for prompt in prompts for token in prompt if token not in special]
    engine = ReplayedEngine(plan, weights, recorded, task, ids, chains=own.settings.width == 1)
    own.target.keeper.engine = engine
    return engine
