"""``python -m bench exactness``: a ledger of all outputs of trees that differ from plain decoding's.

All prompts are decoded by plain decoding and with trees, from the same seeds and in the same number of slots,
with every type of the weights and at every temperature. Outputs are compared up to their first difference:
after it the contexts differ. In float32 a difference is a tie if rounding decides between the two tokens.
Ties are listed. Every other difference is a mistake, and the exit code is 1. In 16 bits near-ties are
frequent: all differences are listed with their gaps, and none is judged.

On several devices the command also checks after every launch that the arrays that steer decoding have the
same bits on all of them. If not, the exit code is 1.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.common.given_profile import describe_profile, profile_notes
from bench.common.methods import choose_algorithms
from bench.common.options import add_switch
from bench.common.pair import (
    Pair,
    add_pair_arguments,
    add_trees_arguments,
    check_numbers,
    check_trees,
    describe_pair,
    load_pair,
    read_prompts,
)
from bench.common.prompts import Prompt
from bench.common.report import add_report_arguments, check_report, measured_on, opening_of, publish
from bench.common.workload import Workload, make_workloads
from bench.exactness.decoding import Agreement, decode
from bench.exactness.ledger import agreement_notes, divergences_of, notes_of, tables_of, total
from jetspec_jax import Completion, enable_compilation_cache
from jetspec_jax.cli.options import MODELS, SAMPLING, parallel_sizes
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.inspect.exactness import TIE_GAP
from jetspec_jax.progress import Progress

DTYPES = ("float32", "bfloat16", "float16")
#: Sampling filters; on several devices each device filters its shard of the vocabulary.
FILTERS = ("top_k", "top_p", "min_p")
#: The method's name in the ledger for plain decoding on one device.
ONE_DEVICE = "plain, one device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_pair_arguments(parser, prompts=8, max_tokens=128)
    add_trees_arguments(parser, temperatures=[0.0, 1.0], budgets=[64])
    MODELS.add(parser, ["width", "candidates"])
    add = parser.add_argument
    types = "types of the weights (default: the first two)"
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES[:2]), help=types)
    add("--batch", type=int, default=32, help="most prompts decoded at a time (default: 32)")
    add_switch(
        parser,
        "--one-device",
        "also compare plain decoding on several devices with that on one device, which must hold the models",
    )
    SAMPLING.add(parser, FILTERS)
    add_report_arguments(parser, "exactness")


def run(arguments: argparse.Namespace) -> int:
    """Decodes, compares, and writes the ledger; 1 for a mistake in float32 or devices that disagree."""
    check_numbers(arguments, "width", "candidates", "batch")
    check_trees(arguments)
    if arguments.one_device and not parallel_sizes(arguments):
        sizes = "--tensor-parallel-size, --expert-parallel-size or --data-parallel-size"
        raise ValueError(f"--one-device goes with {sizes}")
    check_report(arguments)
    algorithms = choose_algorithms(arguments.algorithms, arguments.algorithm_option, arguments.profile)
    trees = {
        f"{name} {budget}": TreeSettings(budget, arguments.width, None, algorithm, arguments.candidates)
        for name, algorithm in algorithms.items()
        for budget in dict.fromkeys(arguments.budgets)
    }
    prompts = read_prompts(arguments)
    enable_compilation_cache(arguments.compilation_cache)
    dtypes, temperatures = dict.fromkeys(arguments.dtypes), set(arguments.temperatures)
    rows, entries, about, agreement = [], [], {}, Agreement()
    runs = 1 + len(trees) + arguments.one_device
    with Progress(total=len(dtypes) * len(temperatures) * runs, desc="decode", unit="run") as bar:
        for dtype in dtypes:
            about, new_rows, new_entries = _ledger(arguments, dtype, prompts, trees, agreement, bar)
            rows += new_rows
            entries += new_entries
    about = {**about, "dtype": list(dtypes), **describe_profile(arguments.profile)}
    report = {
        **opening_of("exactness", arguments),
        **about,
        "tie_gap": TIE_GAP,
        "agreement": agreement.entry(),
        "rows": rows,
        "divergences": entries,
    }
    title = (
        f"{arguments.num_prompts} prompts x {arguments.max_tokens} tokens, batch {arguments.batch}, "
        f"attention {arguments.implementation}, {measured_on(report)}"
    )
    notes = [*notes_of(rows), *agreement_notes(report["agreement"]), *profile_notes(report)]
    publish(arguments, report, tables_of(title, rows, entries), notes)
    return 1 if agreement.unequal or any(row["mistakes"] for row in rows) else 0


def _ledger(
    arguments: argparse.Namespace,
    dtype: str,
    prompts: Sequence[Prompt],
    trees: Mapping[str, TreeSettings],
    agreement: Agreement,
    bar: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """A description of the pair with one type of the weights, the totals, and the differences.

    Only this function holds the pair, so that its memory is free for the next type.
    """
    pair = load_pair(arguments, dtype, trees.values())
    alone = load_pair(arguments, dtype, one_device=True) if arguments.one_device else None
    works = make_workloads(arguments, pair.target, prompts, arguments.temperatures, batch=arguments.batch)
    rows, entries = [], []
    for temperature, work in works.items():
        case = {"dtype": dtype, "T": temperature}
        judged = dtype == "float32"
        if temperature > 0:
            work = _filtered(work, arguments)
        for name, outputs, plain in _decode(arguments, pair, alone, work, trees, agreement, bar):
            found = divergences_of(pair.target, work, outputs, plain, judged=judged)
            entries += [{**case, "method": name, **entry} for entry in found]
            rows.append({**case, "method": name, **total(work, outputs, found, judged=judged)})
    return describe_pair(pair, works.values()), rows, entries


def _filtered(work: Workload, arguments: argparse.Namespace) -> Workload:
    given = {name: value for name, value in SAMPLING.given(arguments).items() if name in FILTERS}
    return replace(work, params=[replace(params, **given) for params in work.params])


def _decode(
    arguments: argparse.Namespace,
    pair: Pair,
    alone: Pair | None,
    work: Workload,
    trees: Mapping[str, TreeSettings],
    agreement: Agreement,
    bar: Any,
) -> Iterator[tuple[str, list[Completion], list[Completion]]]:
    """Each method's name, its completions, and plain decoding's; the method on one device is the first."""

    def completions(pair: Pair, settings: TreeSettings) -> list[Completion]:
        served = {"max_slots": arguments.batch, "implementation": arguments.implementation}
        head = None if settings is PLAIN else pair.head
        found = decode(pair.target, head, work, settings, agreement=agreement, **served)
        bar.update()
        return found

    plain = completions(pair, PLAIN)
    if alone is not None:
        yield ONE_DEVICE, completions(alone, PLAIN), plain
    for name, settings in trees.items():
        yield name, completions(pair, settings), plain
