"""Measures rounds of many slots, and projects tokens per second with published acceptance."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.common.floors import Ceilings
from bench.common.pair import Pair
from bench.common.timing import median
from bench.load.published import CHAIN, SGLANG, TAU, Acceptance, expected
from bench.round.work import round_work
from jetspec_jax.engine.budget_policy import AutoBudget, BudgetPolicy, FixedBudget, LiveSlot
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.round_costs import Pair as Shape
from jetspec_jax.engine.round_costs import RoundCosts, complete_costs, timed_pairs
from jetspec_jax.engine.runner import Runner
from jetspec_jax.tree import Auto

#: Nodes of the chain, which uses the rounds of trees with this number of nodes.
CHAIN_NODES = 16


def measure_rounds(
    runner: Runner, pair: Pair, contexts: tuple[int, int], rounds: int, repeats: int, ceilings: Ceilings
) -> dict[str, Any]:
    """Milliseconds of rounds by live slots and nodes, after a short and after a long context.

    Args:
        runner: The runner of an engine with free slots.
        pair: The models.
        contexts: Tokens of every slot: the short context gives the slope, the long one is in the table.
        rounds: Rounds per timed dispatch. A dispatch of one is timed too, which separates the cost of rounds
            from that of a dispatch.
        repeats: Timed runs of both dispatches.
        ceilings: The device's measured rates.
    """
    shapes = runner.size.rounds(tuple(runner.decoders))
    for shape in shapes:
        runner.time_dispatch(shape, contexts[0], 1)
    times: dict[tuple[Shape, int], list[float]] = {(shape, at): [] for shape in shapes for at in contexts}
    dispatches: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    for _ in range(repeats):
        for (shape, context), seconds in times.items():
            single, several = (runner.time_dispatch(shape, context, turns) for turns in (1, rounds))
            seconds.append((several - single) / (rounds - 1))
            dispatches[shape].append(single - seconds[-1])
    rows = []
    for live, bucket in shapes:
        low, high = (1e3 * max(median(times[(live, bucket), at]), 1e-6) for at in contexts)
        work = round_work(
            pair.target.config,
            None if bucket == 1 else pair.head.config,
            batch=live,
            context=contexts[1],
            budget=bucket,
            itemsize=pair.target.dtype.itemsize,
        )
        rows.append(
            {
                "live": live,
                "bucket": bucket,
                "short_ms": low,
                "round_ms": high,
                "floor_ms": 1e3 * sum(ceilings.seconds(part) for part in work.values()),
                "dispatch_ms": 1e3 * max(median(dispatches[live, bucket]), 0.0),
            }
        )
    return {"contexts": list(contexts), "overlapped": runner.overlapped, "rows": rows}


def costs_of(measured: Mapping[str, Any]) -> RoundCosts:
    """The costs of a measured table; those of dispatches are 0 if these overlap."""
    rows, (low, high) = measured["rows"], measured["contexts"]
    seconds = {(row["live"], row["bucket"]): (1e-3 * row["short_ms"], 1e-3 * row["round_ms"]) for row in rows}
    dispatches = {(row["live"], row["bucket"]): 1e-3 * row["dispatch_ms"] for row in rows}
    costs = RoundCosts((low, high), seconds, dispatches)
    return costs.overlapped() if measured["overlapped"] else costs


def estimated_by_engine(costs: RoundCosts) -> RoundCosts:
    """The costs as an engine estimates them: it times few shapes, and completes the others."""
    timed = timed_pairs(costs.seconds)
    return complete_costs(
        costs.contexts,
        {pair: costs.seconds[pair] for pair in timed},
        {pair: costs.dispatches[pair] for pair in timed},
        tuple(costs.seconds),
    )


def project(
    costs: RoundCosts,
    task: str,
    concurrency: Sequence[int],
    seconds: float,
    seed: int,
    *,
    overlapped: bool,
) -> list[dict[str, Any]]:
    """Tokens per second with a published acceptance, by concurrency and method.

    "auto" is the engine's policy on simulated dispatches. It starts with its usual estimate, and the cost of
    its trials counts.

    Args:
        costs: The costs of rounds.
        task: The prompt set whose acceptance is drawn.
        concurrency: Numbers of concurrent requests.
        seconds: Simulated seconds.
        seed: The seed of the draws.
        overlapped: Whether the engine overlaps rounds: see `choose_overlap`.
    """
    rows = []
    for count in concurrency:
        live = next(slots for slots in sorted({slots for slots, _ in costs.seconds}) if slots >= count)
        buckets = costs.buckets(live)
        every = tuple(sorted({bucket for _, bucket in costs.seconds}))
        acceptance = Acceptance(task, every[1:])
        auto = AutoBudget(
            every,
            estimated_by_engine(costs),
            Auto().probing,
            sliced=not overlapped,
            overlapped=overlapped,
        )
        methods: dict[str, BudgetPolicy] = {
            "plain" if bucket == 1 else f"tree {bucket}": FixedBudget(bucket, costs) for bucket in buckets
        }
        rates = {
            name: simulate(
                policy,
                costs,
                acceptance,
                count,
                live,
                seconds,
                np.random.default_rng(seed),
                overlapped=overlapped,
            )
            for name, policy in {**methods, "auto": auto}.items()
        }
        chain = None
        if CHAIN_NODES in buckets:  # the tree's rounds with the chain's acceptance
            tau = 1 + acceptance.means[every.index(CHAIN_NODES) - 1]
            chain = rates[f"tree {CHAIN_NODES}"] * CHAIN[task] / tau
        best = max([chain or 0.0, *(rate for name, rate in rates.items() if name != "auto")])
        rows.append(
            {
                "task": task,
                "concurrency": count,
                **{name: rate for name, rate in rates.items() if name != "auto"},
                "chain": chain,
                "auto": rates["auto"],
                "auto_over_best": rates["auto"] / best,
                "sglang_chain_b200": SGLANG.get(task, {}).get(count),
            }
        )
    return rows


def simulate(
    policy: BudgetPolicy,
    costs: RoundCosts,
    acceptance: Acceptance,
    count: int,
    live: int,
    seconds: float,
    rng: np.random.Generator,
    *,
    overlapped: bool,
) -> float:
    """Tokens per second of endless requests, all after the longer context."""
    slots = [LiveSlot(costs.contexts[1], 2**30, sampled=False, watched=False)] * count
    elapsed, tokens = 0.0, 0
    in_flight = deque([policy.choose(slots, 0)] if overlapped else [])
    while elapsed < seconds:
        in_flight.append(policy.choose(slots, 0))
        dispatch = in_flight.popleft()
        shape, rounds = (live, dispatch.bucket), dispatch.rounds
        duration = rounds * costs.at(shape, costs.contexts[1], math.inf) + costs.dispatches[shape]
        sizes = np.zeros((rounds, live), np.int32)
        sizes[:, :count] = dispatch.bucket
        committed, reach = rounds * count, []
        if dispatch.bucket > 1:
            last = acceptance.buckets.index(dispatch.bucket)
            drawn = acceptance.draw(rounds * count, rng)[:, : last + 1]
            committed += int(drawn[:, last].sum())
            for source in (expected(acceptance, rounds * count)[:, : last + 1], drawn):
                filled = np.zeros((rounds, live, last + 1), np.float32)
                filled[:, :count] = source.reshape(rounds, count, last + 1)
                reach.append(filled)
        nothing = np.zeros((rounds, live, 1), np.int32)
        policy.observe(DispatchRecord(dispatch.bucket, tuple(range(live)), duration, nothing, sizes, *reach))
        elapsed, tokens = elapsed + duration, tokens + committed
    return tokens / elapsed


TASKS = tuple(TAU)
