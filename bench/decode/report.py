"""The rows of `python -m bench decode`, one per method and temperature, and its tables and notes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from bench.common.intervals import ratio_interval
from bench.common.methods import Method, takes_profile
from bench.common.timing import median
from bench.common.workload import Workload
from bench.decode.measure import MethodRuns
from jetspec_jax import Completion, Target
from jetspec_jax.cli.figures import token_count
from jetspec_jax.inspect.exactness import TIE_RULE, Divergence, first_divergence

# Columns of the printed table; the JSON has more.
COLUMNS = ("tau", "nodes/round", "tokens/s", "speed-up", "first token ms", "peak MiB", "exact match")
# Columns that are printed without decimals.
WHOLE = ("tokens/s", "peak MiB")
# Depths of the table of acceptance.
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
# A note names at most this many methods; it counts more.
NAMED = 8


class Rows:
    """Makes rows, with outputs compared with plain decoding's."""

    def __init__(self, target: Target, works: Mapping[float, Workload], depth: int):
        """Compares nothing yet; ``depth`` is the largest depth of a tree."""
        self._target, self._works, self._depth = target, works, depth
        # Methods that differ from plain decoding in the same token at the same place share a divergence.
        self._firsts: dict[tuple[Any, ...], Divergence] = {}

    def row(self, method: Method, temperature: float, found: MethodRuns, plain: MethodRuns) -> dict[str, Any]:
        """The row of a method at one temperature; ``plain`` has plain decoding's runs in the same group."""
        completions = found.completions
        rounds = max(sum(c.rounds for c in completions), 1)
        drafted = [length - 1 for c in completions for length in c.accept_lengths]
        equal = sum(a.token_ids == b.token_ids for a, b in zip(completions, plain.completions, strict=True))
        speed, base = _tokens_per_second(found), _tokens_per_second(plain)
        return {
            "temperature": temperature,
            "method": method.name,
            "algorithm": method.algorithm,
            "budget": method.settings.budget,
            **method.settings.breadth._asdict(),
            # tau: tokens committed per round, over all rounds, also those beyond the end of an output.
            "tau": sum(sum(c.accept_lengths) for c in completions) / rounds,
            # Only the tokens of the outputs.
            "tokens/forward": token_count(completions) / rounds,
            # The share of rounds that accepted at least 1, 2, ... drafted tokens.
            "acceptance": [sum(n >= d for n in drafted) / rounds for d in range(1, self._depth + 1)],
            "nodes/round": sum(sum(c.tree_sizes) for c in completions) / rounds,
            "tokens/s": speed,
            "speed-up": speed / base,
            "plain tokens/s": base,
            "first token ms": 1e3 * median(found.first_token_seconds),
            "peak MiB": None if found.peak_bytes is None else found.peak_bytes / 2**20,
            "exact match": equal / len(completions),
            **_over_prompts(found, plain),
            "seconds": found.seconds,
            "tokens": found.tokens,
            # The first difference of every output that is not plain decoding's, with the gap there.
            "divergences": self._divergences(temperature, completions, plain.completions),
        }

    def _divergences(
        self, temperature: float, completions: Sequence[Completion], plain: Sequence[Completion]
    ) -> list[dict[str, Any]]:
        found = []
        for i, (ours, theirs) in enumerate(zip(completions, plain, strict=True)):
            if ours.token_ids != theirs.token_ids:
                divergence = self._first(temperature, i, ours.token_ids, theirs.token_ids)
                found.append({"prompt": self._works[temperature].prompts[i].id, **asdict(divergence)})
        return found

    def _first(self, temperature: float, i: int, ours: list[int], theirs: list[int]) -> Divergence:
        both = min(len(ours), len(theirs))
        position = next((k for k in range(both) if ours[k] != theirs[k]), both)
        key = temperature, i, *(tuple(tokens[: position + 1]) for tokens in (ours, theirs))
        if key not in self._firsts:
            work = self._works[temperature]
            divergence = first_divergence(self._target, work.ids[i], work.params[i], ours, theirs)
            assert divergence is not None, "they differ"
            self._firsts[key] = divergence
        return self._firsts[key]


def tables_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Two titled tables per temperature: all methods, and acceptance by depth at the largest budget."""
    tables = []
    for temperature in temperatures_of(rows):
        at_temperature = [row for row in rows if row["temperature"] == temperature]
        shown = [
            {
                "method": row["method"],
                **{key: round(row[key]) if key in WHOLE and row[key] else row[key] for key in COLUMNS},
            }
            for row in at_temperature
        ]
        tables.append((f"T = {temperature:g}", shown))
        depths = [d for d in DEPTHS if d <= len(at_temperature[0]["acceptance"])]
        by_depth = [
            {"method": row["method"], **{str(d): row["acceptance"][d - 1] for d in depths}}
            for row in at_largest_budget(at_temperature)
        ]
        title = f"T = {temperature:g}: share of rounds that accepted at least this many drafted tokens"
        tables.append((title, by_depth))
    return tables


def at_largest_budget(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of all algorithms with the largest budget, and the chain's."""
    budget = max(row["budget"] for row in rows if row["algorithm"])
    return [row for row in rows if row["method"] == "chain" or (row["algorithm"] and row["budget"] == budget)]


def temperatures_of(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """All temperatures in ascending order."""
    return sorted({row["temperature"] for row in rows})


def best_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each temperature the fastest method, and the method with the most tokens per round."""
    found = []
    for temperature in temperatures_of(rows):
        at_temperature = [row for row in rows if row["temperature"] == temperature]
        entry: dict[str, Any] = {"temperature": temperature}
        for figure in ("speed-up", "tau"):
            best = max(at_temperature, key=lambda row: row[figure])
            entry[figure] = {key: best[key] for key in ("method", "tau", "tokens/s", "speed-up")}
        found.append(entry)
    return found


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """The notes below the tables."""
    rows, notes = report["rows"], []
    for best in report["best"]:
        fast, deep = best["speed-up"], best["tau"]
        notes.append(
            f"T = {best['temperature']:g}: fastest is {fast['method']} ({fast['speed-up']:.2f} times plain "
            f"decoding); most tokens per round: {deep['method']} ({deep['tau']:.2f})."
        )
    if len({row["plain tokens/s"] for row in rows}) > len(temperatures_of(rows)):
        notes.append(
            "The speed-up of each budget is over plain decoding in the same group, not over the row shown."
        )
    repeats = report["arguments"]["repeats"]
    runs = {row["method"]: len(row["seconds"]) for row in rows if len(row["seconds"]) < repeats}
    if runs:
        stopped = ", ".join(f"{name} ({count} of {repeats})" for name, count in runs.items())
        notes.append(f"Stopped before all timed runs; --resume measures these again: {stopped}.")
    slower = []
    for temperature in temperatures_of(rows):
        others = [row for row in rows if row["temperature"] == temperature and row["method"] != "plain"]
        names = [row["method"] for row in others if row["speed-up"] < 1]
        if names:
            few = ", ".join(names) if len(names) <= NAMED else f"{len(names)} of {len(others)} methods"
            slower.append(f"{few} at T = {temperature:g}")
    if slower:
        notes.append(
            f"Slower than plain decoding: {'; '.join(slower)}. A tree saves forwards and costs arithmetic. "
            "This does not pay if arithmetic is slow, as on a CPU, or if few drafts are accepted."
        )
    names = [field.name for field in fields(Divergence)]
    parted = [
        Divergence(**{name: found[name] for name in names}) for row in rows for found in row["divergences"]
    ]
    if parted:
        note = (
            f"Outputs that differ from plain decoding's: {len(parted)}; at the first difference the two "
            f"likeliest choices were at most {max(found.gap for found in parted):.1e} apart."
        )
        if report["dtype"] == "float32":
            mistakes = sum(not found.is_tie for found in parted)
            note += f" Mistakes among them: {mistakes}; the others are ties ({TIE_RULE})."
        notes.append(note)
    unread = sorted(
        {row["algorithm"] for row in rows if row["algorithm"] and takes_profile(row["algorithm"])}
    )
    if unread and report["arguments"]["profile"] is None:
        notes.append(f"No profile was given, so these ran without their tables: {', '.join(unread)}.")
    if any(row["peak MiB"] is None for row in rows):
        notes.append("This device does not report its memory in use.")
    else:
        notes.append("Peak memory is the process's so far, with all methods that ran before.")
    return notes


def _over_prompts(found: MethodRuns, plain: MethodRuns) -> dict[str, Any]:
    """Figures of each prompt, and intervals; those of times only if prompts decode one at a time."""
    completions = found.completions
    each = {
        "rounds": [completion.rounds for completion in completions],
        "committed": [sum(completion.accept_lengths) for completion in completions],
        "tokens": [len(completion.token_ids) for completion in completions],
    }
    figures = {"prompts": each, "tau interval": ratio_interval(each["committed"], each["rounds"])}
    if found.prompt_seconds and plain.prompt_seconds:
        each["seconds"] = np.median(found.prompt_seconds, axis=0).tolist()
        speed = each["tokens"], each["seconds"]
        base = (
            [len(completion.token_ids) for completion in plain.completions],
            np.median(plain.prompt_seconds, axis=0).tolist(),
        )
        figures |= {
            "tokens/s interval": ratio_interval(*speed),
            "speed-up interval": ratio_interval(*speed, *base),
        }
    return figures


def _tokens_per_second(measured: MethodRuns) -> float:
    speeds = [tokens / seconds for tokens, seconds in zip(measured.tokens, measured.seconds, strict=True)]
    return median(speeds)
