"""Judges a head on held-out prompts: tokens per round and speed over plain decoding, by budget.

One prompt decodes at a time. Plain decoding and the trees of all budgets alternate after each prompt, so that
a slow period of the machine affects all. A temperature is measured as a whole, and kept in a file.
"""

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from jetspec_jax import Completion, Head, SamplingParams, Target
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.engine.admission import make_requests
from jetspec_jax.engine.batch import Kind
from jetspec_jax.engine.engines import Engines, complete
from jetspec_jax.engine.plan import plan_engine
from jetspec_jax.engine.size import default_capacity
from jetspec_jax.progress import Progress
from train.data.holdout import hold_out
from train.data.prompt_filters import same_words
from train.data.regenerate import document_seed
from train.loop.plot import save
from train.pair.recipe import LEAST_CALIBRATED, LEAST_JUDGED, PairRecipe

#: Why a held-out prompt is not judged.
SEEN, LONG, CHOSE, CALIBRATED = (
    "has the words of a training prompt",
    "leaves no room for an answer",
    "chose the best weights",
    "calibrated the head",
)
#: A prompt: ``root``, ``text``, ``tokens`` and more.
Row = dict[str, Any]
#: The speed below which plain decoding is recommended.
_LEAST_GAIN = 1.05


class Split(NamedTuple):
    """The use of the held-out prompts, whose keys are those of ``prompts.jsonl``.

    Attributes:
        judged: The prompts of the judgement.
        calibrated: The prompts of the calibration.
        choosing: The prompts whose answers choose the best weights of the head and the selector.
        dropped: The number of other held-out prompts by reason.
    """

    judged: list[Row]
    calibrated: list[Row]
    choosing: list[Row]
    dropped: dict[str, int]


def split_prompts(rows: Sequence[Row], recipe: PairRecipe, room: int) -> tuple[list[Row], Split]:
    """Holds prompts out and divides them. All forms of a question are in one part.

    Args:
        rows: All prompts, in a random order.
        room: Most tokens of a held-out prompt.

    Returns:
        The prompts to train on, and the held-out prompts.

    Raises:
        ValueError: Too few prompts remain for a part.
    """
    held = set(hold_out([same_words(row["root"]) for row in rows], recipe.heldout))
    training = [row for place, row in enumerate(rows) if place not in held]
    seen = {words for row in training for words in _words(row)}
    questions, dropped = defaultdict[tuple[str, ...], list[Row]](list), Counter[str]()
    for row in (rows[place] for place in sorted(held)):
        reason = LONG if len(row["tokens"]) > room else ""
        if reason := reason if seen.isdisjoint(_words(row)) else SEEN:
            dropped[reason] += 1
        else:
            questions[same_words(row["root"])].append(row)
    least, left = (LEAST_JUDGED, LEAST_CALIBRATED, recipe.choosing), len(held) - dropped.total()
    judged = min(recipe.judgement.prompts, left - least[1] - least[2])
    calibrated = min(recipe.calibration.prompts, left - judged - least[2])
    parts, most = ([], [], []), (judged, calibrated, left)
    for forms in questions.values():
        part = next(part for part, size in zip(parts, most, strict=True) if len(part) + len(forms) <= size)
        part += forms
    if any(len(part) < size for part, size in zip(parts, least, strict=True)):
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise ValueError(
            f"{sum(least)} held-out prompts must be left: {least[0]} to judge, {least[1]} to calibrate and "
            f"{least[2]} to choose the best weights; {left} of {len(held)} remain, with {len(questions)} "
            f"questions ({why or 'none was dropped'}): set heldout higher, or bring more prompts"
        )
    return training, Split(*parts, dict(dropped))


def _words(row: Row) -> set[tuple[str, ...]]:
    return {same_words(row["root"]), same_words(row["text"])}


def measure(
    target: Target,
    head: Head,
    prompts: Sequence[list[int]],
    trees: Sequence[TreeSettings],
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
) -> Generator[tuple[float, list[dict[str, Any]]], None, None]:
    """Each temperature with a row per budget: tokens per round, and the speed of trees and of plain decoding.

    Raises:
        DeviceMemoryError: The device cannot hold the stores.
    """
    # Trees may overshoot the end of an answer.
    need = max(map(len, prompts)) + max_tokens + max(own.budget for own in trees)
    with contextlib.ExitStack() as opened:
        engines = []
        for each, one in ((PLAIN, None), *((own, head) for own in trees)):
            plan = plan_engine(
                target.config,
                None if one is None else one.config,
                each,
                target.dtype,
                capacity=default_capacity(target.config, need),
                live=(),
                mesh=target.mesh,
            )
            made = opened.enter_context(contextlib.closing(Engines(target, one, plan)))
            made.warm_up([Kind()])
            engines.append((made, each))
        for temperature in temperatures:
            runs: list[list[tuple[Completion, float]]] = [[] for _ in engines]
            name = f"judge T = {temperature:g}"
            with Progress(total=len(prompts) + 1, desc=name, unit=" prompts", mininterval=1) as bar:
                # The first answers compile what a warm-up does not, and are not counted.
                for number, ids in enumerate([prompts[0], *prompts]):
                    params = SamplingParams(
                        temperature=temperature, seed=document_seed((seed,), number), max_tokens=max_tokens
                    )
                    for (made, each), kept in zip(engines, runs, strict=True):
                        begun = time.perf_counter()
                        requests = make_requests(target, made.plan, each, [ids], [params])
                        [completion] = complete(made, requests, target.tokenizer, bar=None)
                        kept.append((completion, time.perf_counter() - begun))
                    bar.update()
            plain, *others = (kept[1:] for kept in runs)
            yield (
                temperature,
                [
                    {"temperature": temperature, **_row(own.budget, plain, kept)}
                    for own, kept in zip(trees, others, strict=True)
                ],
            )


def _row(
    budget: int, plain: Sequence[tuple[Completion, float]], trees: Sequence[tuple[Completion, float]]
) -> dict[str, Any]:
    def speed(runs: Sequence[tuple[Completion, float]]) -> float:
        return sum(len(answer.token_ids) for answer, _ in runs) / sum(seconds for _, seconds in runs)

    lengths = [length for answer, _ in trees for length in answer.accept_lengths]
    equal = sum(one.token_ids == other.token_ids for (one, _), (other, _) in zip(plain, trees, strict=True))
    return {
        "budget": budget,
        "tau": round(sum(lengths) / len(lengths), 4),
        "rounds": len(lengths),
        "tokens": sum(len(answer.token_ids) for answer, _ in trees),
        "equal_outputs": equal,
        "tokens_per_second": round(speed(trees), 2),
        "plain_tokens_per_second": round(speed(plain), 2),
        "times_plain": round(speed(trees) / speed(plain), 4),
    }


def judgement_of(rows: Sequence[Mapping[str, Any]], split: Split, target: Target) -> dict[str, Any]:
    """The content of ``judge.json``; `recommended_budget` is 1 if plain decoding is as fast."""
    gains = {
        budget: statistics.geometric_mean(row["times_plain"] for row in rows if row["budget"] == budget)
        for budget in sorted({row["budget"] for row in rows})
    }
    best = max(gains, key=lambda budget: gains[budget])
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": str(target.dtype),
        "prompts": len(split.judged),
        "prompts_not_judged": {
            **split.dropped,
            CHOSE: len(split.choosing),
            CALIBRATED: len(split.calibrated),
        },
        "recommended_budget": best if gains[best] >= _LEAST_GAIN else 1,
        "rows": [dict(row) for row in rows],
    }


def table_of(report: Mapping[str, Any]) -> list[str]:
    """The figures as lines of a Markdown table."""
    lines = [
        "| T | nodes | tokens per round (τ) | tokens/s | plain tokens/s | times plain | equal outputs |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows = sorted(report["rows"], key=lambda row: (row["temperature"], row["budget"]))
    for row in rows:
        numbers = row["tokens_per_second"], row["plain_tokens_per_second"], row["times_plain"]
        figures = " | ".join(
            f"{number:.{digits}f}" for number, digits in zip(numbers, (0, 0, 2), strict=True)
        )
        equal = f"{row['equal_outputs']} of {report['prompts']}"
        lines.append(f"| {row['temperature']:g} | {row['budget']} | {row['tau']:.2f} | {figures} | {equal} |")
    return lines


def draw_judgement(report: Mapping[str, Any], name: str, path: Path) -> None:
    """Writes an SVG: tokens per round and times plain, by budget, with a curve per temperature."""
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    figure.suptitle(f"{name}: {report['prompts']} held-out prompts, one at a time, {report['device']}")
    labels = {"tau": "tokens per round (τ)", "times_plain": "speed relative to plain decoding"}
    for axis, (key, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        for temperature in sorted({row["temperature"] for row in report["rows"]}):
            rows = sorted(
                (row for row in report["rows"] if row["temperature"] == temperature),
                key=lambda row: row["budget"],
            )
            budgets = [row["budget"] for row in rows]
            axis.plot(budgets, [row[key] for row in rows], marker="o", label=f"T = {temperature:g}")
        axis.axhline(1.0, color="#666666", linestyle="dotted", label="plain decoding")
        axis.set_xscale("log", base=2)
        budgets = sorted({row["budget"] for row in report["rows"]})
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("budget (most nodes of a tree)")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    save(figure, path)
