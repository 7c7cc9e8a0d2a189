"""``python -m bench exactness``: a ledger of every token at which a tree and plain decoding part.

All prompts are decoded plainly and with trees, from the same seeds and in as many slots, at every type of the
weights and every temperature. Outputs are compared up to their first difference: behind it the contexts
differ. In float32 a difference between two tokens that were equally good but for rounding is a tie, which is
listed, and any other is a mistake: the exit code is 1 then. In bfloat16, where near-ties are frequent, all
are listed with their gaps, and nothing is judged.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

from bench.exactness_ledger import compare, notes_of, tables_of, total
from bench.exactness_plot import plot_ledger
from bench.pair import (
    Pair,
    add_pair_arguments,
    add_report_arguments,
    check_arguments,
    describe_pair,
    load_pair,
    requests_of,
    settings_of,
)
from bench.report import machine, show, write_json
from jetspec_jax import Completion, SamplingParams, enable_compilation_cache, generate, generate_tree
from jetspec_jax.engine import TreeSettings
from jetspec_jax.exactness import TIE_GAP
from jetspec_jax.tree import algorithm_names

DTYPES = ("float32", "bfloat16")


def add_command(commands: Any) -> None:
    """Adds the command line of this benchmark."""
    parser = commands.add_parser(
        "exactness", help="every token where a tree and plain decoding part", description=__doc__
    )
    parser.set_defaults(run=run)
    add_pair_arguments(parser, prompts=8, max_tokens=128)
    add = parser.add_argument
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of weights (default: both)")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="(default: 0 1)")
    add("--budgets", type=int, nargs="+", default=[64], help="of the trees (default: 64)")
    add(
        "--algorithms",
        nargs="+",
        default=["accum_logp"],
        metavar="NAME",
        help=f"of the trees: {', '.join(algorithm_names())} (default: accum_logp)",
    )
    add("--batch", type=int, default=32, help="most prompts decoded at a time (default: 32)")
    add_report_arguments(parser, "exactness")


def run(arguments: argparse.Namespace) -> int:
    """Decodes, compares, and writes the ledger; 1 if a tree made a mistake in float32."""
    check_arguments(arguments, "batch")
    trees = {
        f"{algorithm} {budget}": TreeSettings(budget, arguments.width, algorithm=algorithm)
        for algorithm in dict.fromkeys(arguments.algorithms)
        for budget in dict.fromkeys(arguments.budgets)
    }
    enable_compilation_cache(arguments.compilation_cache)
    dtypes, temperatures = dict.fromkeys(arguments.dtypes), dict.fromkeys(arguments.temperatures)
    rows, entries, about = [], [], {}
    with tqdm(total=len(dtypes) * len(temperatures) * (1 + len(trees)), desc="decode", unit="run") as bar:
        for dtype in dtypes:
            pair = load_pair(arguments, dtype, list(trees.values()))
            about = {**describe_pair(pair), "dtype": list(dtypes)}
            for temperature in temperatures:
                case = {"dtype": dtype, "T": temperature}
                params = requests_of(arguments, temperature)
                judged = dtype == "float32"
                for name, outputs, plain in _decode(arguments, pair, params, trees, bar):
                    found = compare(pair.target, pair.prompts, params, outputs, plain, judged=judged)
                    entries += [{**case, "method": name, **entry} for entry in found]
                    rows.append({**case, "method": name, **total(outputs, found, judged=judged)})
    report = {
        "benchmark": "exactness",
        **machine(),
        **about,
        "arguments": settings_of(arguments),
        "tie_gap": TIE_GAP,
        "rows": rows,
        "divergences": entries,
    }
    title = (
        f"{arguments.num_prompts} prompts x {arguments.max_tokens} tokens, batch {arguments.batch}, "
        f"attention {arguments.implementation}, {report['device']}, JAX {report['jax']}"
    )
    notes = notes_of(rows)
    *tables, (heading, table) = tables_of(title, rows, entries)
    for others in tables:
        show(*others)
    show(heading, table, notes)
    write_json(arguments.json, {**report, "notes": notes})
    plot_ledger(rows, entries, arguments.max_tokens, title, arguments.plot)
    print(f"wrote {arguments.plot}")
    return 1 if any(row["mistakes"] for row in rows) else 0


def _decode(
    arguments: argparse.Namespace,
    pair: Pair,
    params: list[SamplingParams],
    trees: Mapping[str, TreeSettings],
    bar: Any,
) -> Iterator[tuple[str, list[Completion], list[Completion]]]:
    """For every kind of tree its name, its completions, and those of plain decoding."""
    served = {"max_slots": arguments.batch, "implementation": arguments.implementation}
    plain = generate(pair.target, pair.prompts, params, **served)
    bar.update()
    for name, own in trees.items():
        outputs = generate_tree(
            pair.target,
            pair.head,
            pair.prompts,
            params,
            budget=own.budget,
            width=own.width,
            algorithm=own.algorithm,
            routing=pair.routing,
            **served,
        )
        bar.update()
        yield name, outputs, plain
