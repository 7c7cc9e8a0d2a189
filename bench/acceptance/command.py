"""``python -m bench acceptance``: tokens per round by tree algorithm, candidates and budget.

Nothing is timed. The prompts are decoded once by plain decoding, and rounds are replayed along these texts.
Except for near-ties they are the rounds of decoding with these trees (see `bench.acceptance.replay`). All
candidates may be children of one node.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

from bench.acceptance.rejections import anchors_of, rejection_tables, rejections
from bench.acceptance.replay import accepted_along, rounds_along
from bench.common.given_profile import describe_profile, profile_notes
from bench.common.intervals import ratio_interval
from bench.common.methods import check_fixed_budgets, choose_algorithms
from bench.common.pair import (
    add_pair_arguments,
    add_trees_arguments,
    check_numbers,
    check_trees,
    describe_pair,
    load_pair,
    read_head,
    read_prompts,
)
from bench.common.report import add_report_arguments, check_report, measured_on, opening_of, publish
from bench.common.workload import make_workloads
from jetspec_jax import enable_compilation_cache
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.progress import Progress
from jetspec_jax.tree import algorithm_of
from train.head.calibration import chosen_along, curves_of, draw_calibration, table_of
from train.head.replay import Drafts, draft_along, write_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_pair_arguments(parser, prompts=40, max_tokens=256)
    add_trees_arguments(parser, temperatures=[0.0, 1.0], budgets=[16, 32, 64, 128, 256])
    add = parser.add_argument
    usual = [7, 16, 32]
    add(
        "--candidates", type=int, nargs="+", default=usual, help="candidates per draft row (default: 7 16 32)"
    )
    add("--batch", type=int, default=32, help="most prompts decoded at a time (default: 32)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16")
    add(
        "--without-noise",
        action="store_true",
        help="also with drafts that know neither the samples' noise nor the head's scales, on the same texts",
    )
    add(
        "--other-head",
        action="append",
        default=[],
        metavar="HEAD",
        help="also with this head, compared with the pair's on the same texts: folder, hub id or a pair's "
        "name; repeatable",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="also compare the probabilities that the head says with what the target chose, by depth, and "
        "draw both to this file",
    )
    add_report_arguments(parser, "acceptance")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables, and writes the JSON and the plot."""
    check_numbers(arguments, "candidates", "batch")
    check_trees(arguments)
    check_report(arguments)
    check_fixed_budgets("--algorithms", arguments.algorithms)
    named = choose_algorithms(arguments.algorithms, arguments.algorithm_option, arguments.profile)
    trees = {
        (name, count): TreeSettings(max(arguments.budgets), None, None, algorithm, count)
        for count, (name, algorithm) in itertools.product(sorted(set(arguments.candidates)), named.items())
    }
    prompts = read_prompts(arguments)
    enable_compilation_cache(arguments.compilation_cache)
    pair = load_pair(arguments, arguments.dtype, trees.values())
    works = make_workloads(arguments, pair.target, prompts, arguments.temperatures, batch=arguments.batch)
    implementation, budgets = arguments.implementation, sorted(set(arguments.budgets))
    rows, curves = [], {}
    # Heads, and whether drafts know the noise. The pair's head with noise is compared with itself without,
    # other heads with the pair's.
    knowing = [False, True] if arguments.without_noise else [True]
    kinds = [("", pair.head, noise) for noise in knowing]
    kinds += [
        (name, read_head(arguments, name, arguments.dtype, pair.target, trees.values()), True)
        for name in arguments.other_head
    ]
    deepest = max(head.config.depth for _, head, _ in kinds)
    with Progress(total=len(works) * (1 + len(kinds) * (1 + len(trees))), unit="step") as bar:
        for temperature, work in works.items():
            bar.set_description(f"T = {temperature:g}: decode")
            requests = work.ids, work.params, work.routing
            how = {"batch": arguments.batch, "implementation": implementation}
            texts = write_texts(pair.target, deepest, *requests, **how)
            bar.update()
            bar.set_description(f"T = {temperature:g}: draft")
            # Fewer candidates are the first of more, unless a selector puts them in order.
            counts = sorted({*arguments.candidates})
            base: dict[tuple[str, int], list[_Rounds]] = {}
            for other, head, noise in kinds:
                alone = head.config.selector is not None
                drafts = {
                    count: draft_along(
                        pair.target, head, texts, count, noise=noise, implementation=implementation
                    )
                    for count in (counts if alone else counts[-1:])
                }
                if arguments.calibration and noise and not other:
                    curves[f"T = {temperature:g}"] = curves_of(chosen_along(drafts[counts[-1]]))
                bar.update()
                for (name, count), settings in trees.items():
                    bar.set_description(f"T = {temperature:g}: {name}, {count} candidates")
                    shown = f"{name}, {other}" if other else name
                    shown += "" if noise else ", without noise and scales"
                    about = {"temperature": temperature, "algorithm": shown, "candidates": count}
                    drafted = drafts[count if alone else counts[-1]]
                    found, rounds = _rows(drafted, settings, budgets, base.get((name, count)))
                    rows += [{**about, **row} for row in found]
                    if not other:
                        base[name, count] = rounds
                    bar.update()
    report = {
        **opening_of("acceptance", arguments),
        **describe_pair(pair, works.values()),
        **describe_profile(arguments.profile),
        "rows": rows,
    }
    if arguments.calibration:
        report["calibration"] = {name: table_of(of_depths) for name, of_depths in curves.items()}
        draw_calibration(curves, arguments.calibration, "What the head says, and what the target chose")
    title = f"{arguments.num_prompts} prompts x {arguments.max_tokens} tokens, {measured_on(report)}"
    tables = _tables(rows, title) + rejection_tables(rows)
    for name, found in report.get("calibration", {}).items():
        tables.append((f"{name}: candidates that were said to be chosen, and that were", found))
    publish(arguments, report, tables, profile_notes(report))
    return 0


# Tokens and rounds of each text.
_Rounds = tuple[list[int], list[int]]


def _rows(
    drafts: Drafts, settings: TreeSettings, budgets: list[int], base: list[_Rounds] | None
) -> tuple[list[dict[str, Any]], list[_Rounds]]:
    """Tokens per round over all rounds of all texts, and where rounds ended: a row per budget.

    With a ``base``, the rounds of the same texts with other drafts, rows have the gain over it. Also returns
    the rounds.
    """
    algorithm, count = algorithm_of(settings.algorithm), settings.breadth.candidates
    accepted = accepted_along(drafts, algorithm, count, budgets)
    rows, found = [], []
    for place, (budget, column) in enumerate(zip(budgets, accepted.T, strict=True)):
        rounds = rounds_along(column, drafts.counts)
        anchors = anchors_of(rounds, drafts.counts)
        tokens, counts = list(map(sum, rounds)), list(map(len, rounds))
        found.append((tokens, counts))
        row = {
            "budget": budget,
            "tau": sum(tokens) / sum(counts),
            "tau interval": ratio_interval(tokens, counts),
            "rounds": len(anchors),
            "rejected": rejections(drafts, count, column[anchors], anchors),
        }
        if base is not None:
            before = base[place]
            row["gain"] = row["tau"] / (sum(before[0]) / sum(before[1]))
            row["gain interval"] = ratio_interval(tokens, counts, *before)
        rows.append(row)
    return rows, found


def _tables(rows: list[dict[str, Any]], title: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """A table per temperature: a row per algorithm and number of candidates, a column per budget."""
    tables = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        cells: dict[tuple[str, int], dict[str, Any]] = {}
        for row in rows:
            if row["temperature"] == temperature:
                key = row["algorithm"], row["candidates"]
                shown = cells.setdefault(key, {"algorithm": key[0], "candidates": key[1]})
                shown[str(row["budget"])] = row["tau"]
        heading = f"{title}\nT = {temperature:g}: tokens per round, by budget"
        tables.append((heading, list(cells.values())))
    return tables
