"""The rows of ``python -m bench round``, one per case, and its tables and notes."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from bench.common.collectives import LATENCY, LINK, exchanges
from bench.common.floors import Ceilings
from bench.common.kernel_trace import kernel_tables, summarise
from bench.common.methods import CHAIN
from bench.common.shapes import PairShape
from bench.common.timing import median
from bench.round.measure import CaseRuns, RoundCase, Setup
from bench.round.work import round_work
from jetspec_jax.device.mesh import size_of
from jetspec_jax.tree import bucket_for


def row_of(
    case: RoundCase,
    found: CaseRuns,
    measured: Mapping[RoundCase, CaseRuns],
    shape: PairShape,
    itemsize: int,
    setup: Setup,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """The row of a case, with times in milliseconds.

    Args:
        found: The case's measurements.
        measured: The measurements of all cases, with the plain step of the same slots.
        itemsize: Bytes per parameter.
    """
    milliseconds, single = (
        1e3 * median(seconds) / setup.rounds for seconds in (found.seconds, found.single_seconds)
    )
    chain = measured.get(case._replace(budget=shape.head.block_size, algorithm=CHAIN))
    works = round_work(
        shape.target,
        None if case.budget == 1 else shape.head,
        batch=case.batch,
        context=case.context,
        budget=case.budget,
        itemsize=itemsize,
        touched=found.experts_touched,
        mesh=setup.mesh,
    )
    floors = {phase: {**work._asdict(), "ms": 1e3 * ceilings.seconds(work)} for phase, work in works.items()}
    floor = sum(part["ms"] for part in floors.values())
    phases = {phase: 1e3 * seconds for phase, seconds in found.phase_seconds.items()}
    profile = None
    if found.kernels is not None:
        profile = summarise(found.kernels, setup.rounds) if found.kernels else {}
    return {
        **case._asdict(),
        "algorithm": case.tree,
        "bucket": bucket_for(case.budget),
        "capacity": setup.scene(case, shape).capacity,
        "round_ms": milliseconds,
        "single_ms": single,
        "single_over_loop": single / milliseconds,
        "phases_ms": phases,
        "phases_sum_ms": sum(phases.values()),
        "floor_ms": floor,
        "floors": floors,
        "times_floor": milliseconds / floor,
        # A round is in a loop on the device, unless the loop would have one turn.
        "exchanges": exchanges(found.collectives, size_of(setup.mesh), int(setup.rounds > 1)),
        # Not the profile's, which has the profiler's own pauses.
        "idle_ms": milliseconds - profile["busy_us"] / 1e3 if profile else None,
        # The acceptance length above which a tree is faster than plain decoding.
        "times_plain": median(found.seconds) / median(measured[case.plain].seconds),
        # A tree is faster than the chain if its acceptance length exceeds the chain's by this factor.
        "times_chain": None if chain is None else median(found.seconds) / median(chain.seconds),
        "tokens_per_round": found.tokens_per_round,
        "experts_touched": mean(found.experts_touched.values()) if found.experts_touched else None,
        "compile_seconds": found.compile_seconds,
        "dispatch_seconds": found.seconds,
        "single_seconds": found.single_seconds,
        "profile": profile,
    }


def tables_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Titled tables of rounds, and of phases and kernels if they were measured."""
    names = [{name: row[name] for name in ("batch", "context", "budget", "algorithm")} for row in rows]
    yield (
        "Whole rounds",
        [
            {
                **name,
                "ms": row["round_ms"],
                "singly": row["single_ms"],
                "floor ms": row["floor_ms"],
                "x floor": row["times_floor"],
                "x plain": row["times_plain"],
                **({} if row["times_chain"] is None else {"x chain": row["times_chain"]}),
                "tokens": row["tokens_per_round"],
                "compile s": row["compile_seconds"]["decode"],
            }
            for name, row in zip(names, rows, strict=True)
        ],
    )
    if rows[0]["phases_ms"]:
        yield (
            "Phases, each alone, in ms",
            [
                {**name, **row["phases_ms"], "sum": row["phases_sum_ms"], "whole round": row["round_ms"]}
                for name, row in zip(names, rows, strict=True)
            ],
        )
    if any(row["exchanges"]["floor_ms"] for row in rows):
        yield (
            "What each device exchanges in a round",
            [{**name, **_exchange_columns(row)} for name, row in zip(names, rows, strict=True)],
        )
    for name, row in zip(names, rows, strict=True):
        if row["profile"]:
            of_case = ", ".join(f"{key} {value}" for key, value in name.items())
            yield from kernel_tables(row["profile"], f"a round, {of_case}")


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """The meaning of the figures, and what was not measured."""
    ceilings = report["ceilings"]
    notes = [
        f"Floor: parameters and context read once at {ceilings['bandwidth'] / 1e9:,.0f} GB/s (sum "
        f"{ceilings['reduction'] / 1e9:,.0f}, copy {ceilings['copy'] / 1e9:,.0f}), or computed at "
        f"{ceilings['matmul'] / 1e12:,.2f} TFLOP/s, whichever takes longer; both measured here.",
        "Singly, ms: each round is a program of its own, launched while the one before runs, and fetched "
        "while the next one runs, as by engines on a GPU; all other times are of loops on the device.",
        "Compile: tracing and compiling the program of the rounds, "
        + ("with a persistent cache." if report["compilation_cache"] else "without a persistent cache."),
    ]
    if report["devices"] > 1:
        notes.append(
            "Exchanges: sums and gathers of every round in its program as lowered, but none in conditions or "
            "inner loops, and the fewest bytes that a device must send. Their floor: "
            f"{1e6 * LATENCY:g} us for each, and the bytes at {LINK / 1e9:g} GB/s, assumed for NVLink. Idle: "
            "a round's time without the profiler, less that in which kernels ran under it; its floor is 0."
        )
    if report["peak_memory_bytes"] is not None:
        notes.append(f"Peak device memory: {report['peak_memory_bytes'] / 2**30:.2f} GiB.")
    if any(row["profile"] == {} for row in report["rows"]):
        notes.append(f"No profile: a trace of this device ({report['platform']}) has no GPU streams.")
    return notes


def _exchange_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A case's collectives and their floor; with a profile also their time, and the idle time."""
    parts = row["exchanges"]
    columns = {
        "sums": parts["sums"]["count"],
        "sums KiB": parts["sums"]["bytes"] / 2**10,
        "gathers": parts["gathers"]["count"],
        "gathers KiB": parts["gathers"]["bytes"] / 2**10,
        "floor us": 1e3 * parts["floor_ms"],
    }
    if row["profile"]:
        ran = row["profile"]["classes"].get("collectives", {"us": 0.0, "launches": 0.0})
        columns |= {"us": ran["us"], "launches": ran["launches"], "idle us": 1e3 * row["idle_ms"]}
    return columns
