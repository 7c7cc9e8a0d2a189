"""An engine that computes nothing: the real scheduler and policy with recorded rounds.

Each dispatch sleeps for the recorded time of its rounds. Acceptance is drawn from published means. The tokens
are those of the demo's prompts, repeated.
"""

import itertools
import json
import time
from collections import deque
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
from jetspec_jax.engine.compiler import Compiler
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.loop import loop_for
from jetspec_jax.engine.persistent import plan_persistent
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.records import Batch, DispatchRecord
from jetspec_jax.engine.request import Request, State
from jetspec_jax.engine.round_costs import Pair, RoundCosts
from jetspec_jax.engine.runner import Decode, Flight, Runner
from jetspec_jax.engine.scheduler import Scheduler
from jetspec_jax.engine.size import chunks_for

RESULTS = Path(__file__).parents[1] / "results"
#: Rounds of one request and of eight, recorded on one H200.
RECORDED = ("round-qwen3-8b-h200.json", "round-qwen3-8b-h200-batch8.json")
#: Prompt tokens per second of the same shapes and device: see docs/benchmarks.md.
PREFILL_PER_SECOND = 20_600


class RecordedRounds:
    """Milliseconds of a round by its rows (live slots times nodes), interpolated linearly.

    Below the fewest recorded rows the time is constant; above the most the last slope continues.
    """

    def __init__(self, reports: Sequence[Mapping[str, Any]]):
        """Reads reports of ``bench round``.

        Raises:
            ValueError: There are too few rounds to interpolate.
        """
        found: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
        for row in itertools.chain.from_iterable(report["rows"] for report in reports):
            bucket = row["bucket"]
            found[bucket > 1].setdefault(row["batch"] * bucket, []).append(row["round_ms"])
        if min(map(len, found.values())) < 2:
            raise ValueError("recorded rounds must have two plain ones and two of trees, of different rows")
        self._points = {
            trees: (np.array(sorted(times)), np.array([np.mean(times[rows]) for rows in sorted(times)]))
            for trees, times in found.items()
        }

    def seconds(self, pair: Pair) -> float:
        """Seconds of a round."""
        live, bucket = pair
        rows, times = self._points[bucket > 1]
        count = live * bucket
        if count > rows[-1]:
            slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
            return 1e-3 * float(times[-1] + slope * (count - rows[-1]))
        return 1e-3 * float(np.interp(count, rows, times))

    def costs(self, pairs: Sequence[Pair]) -> RoundCosts:
        """The costs that an engine would measure; rounds include the cost of a dispatch."""
        each = {pair: (self.seconds(pair), self.seconds(pair)) for pair in pairs}
        return RoundCosts((64, 1024), each, dict.fromkeys(pairs, 0.0))


class ReplayedEngine(Engine):
    """An `Engine` without a device.

    Attributes:
        thread_seconds: Processor time of its steps.
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
        """Makes the scheduler with the slots, pages and trees of a GPU's engine.

        Args:
            plan: The engine's plan.
            weights: The models' weights, which are not used.
            rounds: The recorded rounds.
            task: The prompt set whose acceptance is drawn.
            ids: The emitted tokens.
            chains: Whether the trees are chains.
        """
        self.plan, self.planned, self.weights = plan, plan, weights
        self.broken, self.record = False, None
        self.compiler = Compiler(lambda program: None)
        self.runner = cast(Runner, SimpleNamespace(in_flight=deque(), overlapped=False))
        self._measurement = None
        many = plan.for_many()
        buckets = tuple(decoder.bucket for decoder in many.decoders)
        size = replace(many.size, chunks=chunks_for(many.size.slots, gpu=True))
        self._costs = rounds.costs(size.rounds(buckets))
        policy: BudgetPolicy = FixedBudget(buckets[-1], self._costs)
        if many.auto is not None:
            policy = AutoBudget(buckets, self._costs, many.auto.probing, sliced=True)
        self.scheduler = Scheduler(size, policy, 1 + DEPTH)
        trees = tuple(bucket for bucket in buckets if bucket > 1)
        self._acceptance = Acceptance(task, trees, chains=chains) if trees else None
        self._rng, self._ids, self._place = np.random.default_rng(0), np.asarray(ids, np.int32), 0
        self.thread_seconds = 0.0

    def admit(self, request: Request) -> Request:
        """Queues a request. Raises ValueError if it can never be served."""
        self.scheduler.add(request)
        return request

    def prepare(self, requests: Sequence[Request]) -> None:
        """Does nothing: there are no programs."""

    def compile(self, kinds: Sequence[Any], **options: Any) -> None:
        """Does nothing: there are no programs."""

    def close(self) -> None:
        """Does nothing: there are no stores."""

    def launch(self, most_rounds: int | None = None, decode: Decode | None = None) -> bool:
        """Decides on a dispatch; ``decode`` is not called."""
        worked = time.thread_time()
        batch = self.scheduler.next_batch(most_rounds)
        assert batch is not None, "one batch is in flight at most"
        self._batch = batch
        self.runner.in_flight.append(cast(Flight, batch))  # there is one
        self.thread_seconds += time.thread_time() - worked
        return True

    def collect(self) -> list[Request]:
        """Runs the dispatch, which takes the recorded time."""
        worked, batch = time.thread_time(), self._batch  # without the sleep
        self.runner.in_flight.clear()
        record, seconds = self._replay(batch)
        prompts = sum(int(chunk.counts.sum()) for chunk in batch.chunks)
        self.record = record if prompts else record._replace(seconds=seconds or None)
        time.sleep(seconds + prompts / PREFILL_PER_SECOND)
        served = self.scheduler.update(self.record)
        for request in served:
            request.notify()
        self.thread_seconds += time.thread_time() - worked
        return served

    def _replay(self, batch: Batch) -> tuple[DispatchRecord, float]:
        """The record of a batch's rounds, and their seconds; a slot ends when it has all of its tokens."""
        live, turns, bucket = len(batch.live), batch.rounds, batch.bucket
        requests = self.scheduler.requests
        left = {request.slot: request.remaining for request in requests if request.state is State.DECODING}
        members = np.array([left.get(slot, 0) for slot in batch.live], np.int64)
        committed = np.ones((turns, live), np.int64)
        reach: tuple[Any, ...] = ()
        if bucket > 1:
            assert self._acceptance is not None, "without trees all rounds are plain"
            last = 1 + self._acceptance.buckets.index(bucket)
            drawn = self._acceptance.draw(turns * live, self._rng)[:, :last]
            committed += drawn[:, -1].reshape(turns, live)
            means = expected(self._acceptance, turns * live)[:, :last]
            reach = tuple(array.reshape(turns, live, last).astype(np.float32) for array in (means, drawn))
        before = np.cumsum(committed, axis=0) - committed
        sizes = np.where(before < members, bucket, 0).astype(np.int32)
        depths = np.minimum(np.maximum(sizes - 1, 0), DEPTH)
        ran = int((sizes > 0).any(axis=1).sum())
        emitted = np.where(sizes[:ran, :, None] > 0, np.arange(DEPTH + 1) < committed[:ran, :, None], False)
        count = int(emitted.sum())
        tokens = np.full((ran, live, DEPTH + 1), -1, np.int32)
        tokens[emitted] = np.take(self._ids, np.arange(self._place, self._place + count), mode="wrap")
        self._place += count
        seconds = ran * self._costs.at((live, bucket), 0, np.inf) if ran else 0.0
        reach = tuple(array[:ran] for array in reach)
        record = DispatchRecord(
            bucket, batch.live, None, tokens, sizes[:ran], *reach, tree_depths=depths[:ran]
        )
        return record, seconds


def replay(llm: AsyncLLM, given: Mapping[str, Any], reports: Sequence[str], task: str) -> ReplayedEngine:
    """Replaces the engine of an `AsyncLLM` by one that replays.

    Args:
        llm: The `AsyncLLM`, which has served no request yet.
        given: The arguments that it was made with.
        reports: Reports of ``bench round``: paths, or names in bench/results.
        task: The prompt set whose acceptance is drawn.
    """
    served, head = llm.llm, llm.llm.draft_head
    names = ("max_slots", "capacity", "implementation")
    plan = plan_persistent(served.target, head, served.settings, **{name: given.get(name) for name in names})
    paths = [Path(name) if Path(name).exists() else RESULTS / name for name in reports]
    recorded = RecordedRounds([json.loads(path.read_text(encoding="utf-8")) for path in paths])
    proposer = None if plan.decoder.proposer is None or head is None else head.weights
    weights = DecodeWeights(served.target.weights, proposer)
    prompts = encode_prompts(served.target, load_prompts(DEMO), {})
    special = {*served.target.eos_token_ids, *served.target.tokenizer.all_special_ids}
    ids = [token for prompt in prompts for token in prompt if token not in special]
    engine = ReplayedEngine(plan, weights, recorded, task, ids, chains=served.settings.width == 1)
    loop_for(served.target).engine = engine
    return engine
