"""``python -m train head`` and ``python -m train finetune``: a draft head from documents, or from prompts."""

import argparse
import json
from pathlib import Path
from typing import Any

import jax

from jetspec_jax.checkpoint import Target, load_target
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from train.data import summary
from train.head import train_head
from train.head_recipe import HeadRecipe
from train.make_data import make_data
from train.recipe_file import CONFIGS, read_head_recipe
from train.stages import Deadline


def add_command(commands: Any) -> None:
    """Adds both command lines."""
    known = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.toml")))
    head = commands.add_parser("head", help="train a draft head on documents", description=_head.__doc__)
    head.set_defaults(run=_head)
    head.add_argument("--data", type=Path, required=True, help="folder of documents, see the command data")
    head.add_argument("--recipe", required=True, help=f"a TOML file, or one of {known}")
    tune = commands.add_parser(
        "finetune", help="documents from prompts, then a draft head on them", description=_finetune.__doc__
    )
    tune.set_defaults(run=_finetune)
    tune.add_argument("--prompts", required=True, help="JSONL or a data set, see the command data")
    tune.add_argument("--recipe", default="finetune", help=f"a TOML file, or one of {known}")
    tune.add_argument("--temperature", type=float, default=0.0, help="of the answers (default: 0)")
    tune.add_argument("--max-tokens", type=int, default=1024, help="of an answer (default: 1024)")
    tune.add_argument("--slots", type=int, default=32, help="answers generated at a time (default: 32)")
    for parser in (head, tune):
        parser.add_argument("--target", required=True, help='folder or hub id, or "demo"')
        parser.add_argument("--draft-head", help='what a head begins as, where the recipe says so, or "demo"')
        parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="replaces a setting of the recipe, as fit.steps=100; may recur",
        )
        parser.add_argument("--minutes", type=float, help="stop cleanly after this; run again to go on")


def _head(arguments: argparse.Namespace) -> int:
    """Trains a draft head, or goes on with one; the finished head is in the work folder."""
    recipe = read_head_recipe(arguments.recipe, arguments.set)
    target = load_target(_target_path(arguments), dtype=recipe.dtype)
    return _train(arguments, recipe, target, arguments.data, arguments.work, Deadline(arguments.minutes))


def _finetune(arguments: argparse.Namespace) -> int:
    """Lets the target answer prompts and trains a head on the answers; each part is done once."""
    recipe, deadline = read_head_recipe(arguments.recipe, arguments.set), Deadline(arguments.minutes)
    made = make_data(
        arguments.target,
        arguments.prompts,
        arguments.work / "data",
        draft_head=arguments.draft_head,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        seed=recipe.seed,
        slots=arguments.slots,
        dtype=recipe.dtype,
        deadline=deadline,
    )
    print(summary(made))
    target = load_target(_target_path(arguments), dtype=recipe.dtype)
    return _train(arguments, recipe, target, made.folder, arguments.work / "head", deadline)


def _train(
    arguments: argparse.Namespace,
    recipe: HeadRecipe,
    target: Target,
    data: Path,
    work: Path,
    deadline: Deadline,
) -> int:
    checkpoint = DEMO_DRAFT_HEAD if arguments.draft_head == "demo" else arguments.draft_head
    folder = train_head(work, recipe, target, data, deadline, checkpoint=checkpoint)
    if jax.process_index() == 0:
        tau = json.loads((work / "evaluation.json").read_text(encoding="utf-8"))["tau"]
        measured = ", ".join(f"{value:.2f} with budget {budget}" for budget, value in tau.items())
        print(f"the head is in {folder}: tau on held-out prompts {measured}")
        print(f"curves: {work / 'training.png'}")
        print(f"to use it: jetspec-jax generate --target {arguments.target} --draft-head {folder} PROMPT")
    return 0


def _target_path(arguments: argparse.Namespace) -> str | Path:
    return DEMO_TARGET if arguments.target == "demo" else arguments.target
