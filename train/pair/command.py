"""``python -m train pair``: a draft head for any target, from prompts to a folder to serve, stage by stage.

The work folder holds ``recipe.toml`` (every choice), ``prompts.jsonl`` and ``prompts.json`` (the prompts, and
the numbers kept and dropped), ``answers/`` (the training documents), ``head/``, ``selector/`` and
``calibrate/`` (the training), ``judge.json`` and ``judge.svg``, and ``export/``, the head to serve. The same
command resumes.
"""

import argparse
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.pairs import PAIR_NAMES
from jetspec_jax.cli.options import add_ignore_option, add_target_option
from jetspec_jax.config import read_json
from train.data.command import weights
from train.head.recipe_file import PAIR_RECIPES, add_set_option, find_table
from train.loop.stages import SECONDS
from train.pair.stages import RECIPE, Options, make_pair


def add_command(commands: Any) -> None:
    """Adds the command line."""
    parser = commands.add_parser("pair", help="make a draft head for any target", description=__doc__)
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add_target_option(parser, f"folder, GGUF file or hub id, or a pair: {PAIR_NAMES}", required=True)
    add("--work", type=Path, required=True, help="folder for everything made")
    add("--draft-head", help="start from this head: folder, hub id or a pair's name (default: a new head)")
    add(
        "--recipe",
        help=f"a TOML file, {' or '.join(PAIR_RECIPES)}, with settings that replace the default ones; "
        f"{RECIPE} of the work folder has all",
    )
    add_set_option(parser, "head.fit.steps=100")
    add(
        "--prompts",
        action="append",
        metavar="FILE",
        help="prompts or request logs, as for the command data, besides those that the target writes; "
        "SET=FILE is the training split of a published set; repeatable",
    )
    add(
        "--documents",
        action="append",
        metavar="FILE",
        help="texts, whose beginnings the target continues: for a base model, which then writes no prompts "
        "unless --prompts brings some; repeatable",
    )
    add(
        "--weights",
        type=weights,
        metavar="W,W",
        help="shares: of the prompts that the target writes, if it does, then of each of --prompts, then of "
        "--documents (default: all of each)",
    )
    add(
        "--evaluated",
        nargs="+",
        metavar="SET=FILE",
        help="sets on which the head will be evaluated: prompts that share words with them are dropped",
    )
    add("--template-arguments", metavar="JSON", help="object passed to the chat template")
    add("--total-minutes", type=float, metavar="N", help="scale all stages to about so many minutes")
    add("--minutes", type=float, help="stop cleanly after so many minutes; run again to resume")
    add("--yes", action="store_true", help="do not ask before hours of work on a CPU")
    add_ignore_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    target, work = arguments.target, arguments.work
    names = ("prompts", "documents", "weights", "evaluated", "template_arguments")
    options = Options(
        target,
        work,
        arguments.draft_head,
        None if arguments.recipe is None else find_table(arguments.recipe, PAIR_RECIPES)[0],
        tuple(arguments.set),
        {name: value for name in names if (value := getattr(arguments, name))},
        arguments.total_minutes,
        arguments.yes,
        tuple(arguments.ignore_config_key),
    )
    folder = make_pair(options, arguments.minutes)
    seconds, budget = read_json(work / SECONDS), read_json(work / "judge.json")["recommended_budget"]
    print("seconds by stage: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    print(f"the head is in {folder}, and its figures are in README.md there and in {work / 'judge.svg'}")
    if budget == 1:
        print("on this device plain decoding is as fast or faster for one prompt at a time")
    else:
        print(f"to serve it: jetspec-jax serve --model {target} --draft-head {folder} --budget {budget}")
    return 0
