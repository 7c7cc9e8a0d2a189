"""``python -m train head``, ``finetune`` and ``export``: train draft heads and write them."""

import argparse
import logging
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.loading import read_target
from jetspec_jax.checkpoint.pairs import PAIR_NAMES, draft_head_at
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.cli.options import PROCESSES, add_ignore_option, add_target_option
from jetspec_jax.config import IGNORE_OPTION
from jetspec_jax.decode.settings import DEFAULT_BUDGET
from jetspec_jax.device.processes import is_first
from jetspec_jax.smollm2 import SMOLLM2
from train.data.command import add_generation_arguments, generation_settings, summary
from train.data.make_data import make_data
from train.data.manifest import CORPUS, DocumentsManifest
from train.head.engines import ENGINES
from train.head.export import HEAD_FOLDER, export_best, export_head
from train.head.frozen import decoding_mesh, mesh_to_load
from train.head.recipe import HeadRecipe
from train.head.recipe_file import HEAD_RECIPES, add_set_option, read_head_recipe
from train.head.start import check_start
from train.head.target_states import check_bound
from train.head.training import train_head
from train.head.verdict import read_verdict
from train.loop.mesh import make_mesh
from train.loop.stages import Deadline
from train.trackers.opening import PROJECT, TRACKERS, Tracking

_log = logging.getLogger("jetspec_jax.train")
#: The exit code of a finished run whose head did not improve; its initial weights are kept.
NOT_IMPROVED = 3
#: The recipe of `finetune` for the pair "smollm2", whose head has a selector.
OF_SMOLLM2 = "smollm2-finetune"


def add_command(commands: Any) -> None:
    """Adds the three commands."""
    known = ", ".join(HEAD_RECIPES)
    head = commands.add_parser("head", help="train a draft head on documents", description=_head.__doc__)
    head.set_defaults(run=_head)
    head.add_argument("--data", type=Path, required=True, help="folder of documents, see the command data")
    head.add_argument("--recipe", required=True, help=f"a TOML file, or one of {known}")
    PROCESSES.add(head)
    export = commands.add_parser("export", help="write a head for an engine", description=_export.__doc__)
    export.set_defaults(run=_export)
    source = export.add_mutually_exclusive_group(required=True)
    source.add_argument("--work", type=Path, help="a run's folder, whose best head so far is written")
    source.add_argument("--from", dest="head", metavar="HEAD", help="a head: folder, hub id or a pair's name")
    export.add_argument("--out", type=Path, required=True, help="folder of the head, which must not exist")
    export.add_argument(
        "--for",
        dest="engine",
        choices=ENGINES,
        default="jetspec",
        help="the engine that loads the head (default: jetspec; vllm and sglang read its format too)",
    )
    export.add_argument(
        "--without-selector",
        action="store_true",
        help="omits the selector, for engines without support for it",
    )
    add_target_option(export, "the head's target, for configs with its name or its number of layers")
    tune = commands.add_parser(
        "finetune", help="documents from prompts, then a draft head on them", description=_finetune.__doc__
    )
    tune.set_defaults(run=_finetune)
    tune.add_argument(
        "--recipe",
        help=f"a TOML file, or one of {known} (default: {OF_SMOLLM2} for the pair {SMOLLM2}, else finetune)",
    )
    add_generation_arguments(tune)
    for parser in (head, export, tune):
        add_ignore_option(parser)
    for parser in (head, tune):
        add_target_option(parser, f"folder or hub id, or a pair: {PAIR_NAMES}", required=True)
        parser.add_argument(
            "--draft-head",
            help="the initial head, for recipes that start from one: folder, hub id or a pair's name",
        )
        parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
        add_set_option(parser, "fit.steps=100")
        parser.add_argument(
            "--minutes", type=float, help="stop cleanly after so many minutes; run again to resume"
        )
        parser.add_argument(
            "--cache-target-states",
            dest="states_gib",
            type=float,
            metavar="GIB",
            help="computes the target's states once and keeps them in the work folder, at most GIB GiB",
        )
        parser.add_argument(
            "--track",
            action="append",
            default=[],
            choices=TRACKERS,
            help="also logs the run to this tracker; needs the extra of that name; repeatable",
        )
        parser.add_argument(
            "--track-project",
            default=PROJECT,
            metavar="NAME",
            help=f"the project or experiment of trackers (default: {PROJECT})",
        )


def _export(arguments: argparse.Namespace) -> int:
    """Writes a draft head as an engine reads it, in Hugging Face layout.

    The head is an existing head, or the best head so far of a run, finished or not.
    """
    out, engine = arguments.out, arguments.engine
    more = {
        "target": arguments.target,
        "without_selector": arguments.without_selector,
        "ignore_config_keys": arguments.ignore_config_key,
    }
    if arguments.head is not None:
        export_head(arguments.head, out, engine, **more)
        written = "the head"
    else:
        written = f"the head of step {export_best(arguments.work, out, engine, **more)}"
    print(f"{written} is in {out}, for {engine}")
    return 0


def _head(arguments: argparse.Namespace) -> int:
    """Trains a draft head, or resumes a run; the finished head is in the work folder.

    The last line says whether the head improved on its initial weights. If it did not, the initial weights
    are kept and the exit code is 3.
    """
    recipe = read_head_recipe(arguments.recipe, arguments.set)
    _check(arguments)
    return _train(arguments, recipe, arguments.data, arguments.work, Deadline(arguments.minutes))


def _finetune(arguments: argparse.Namespace) -> int:
    """Makes documents from prompts or conversations and trains a head on them; each part is done once.

    The last line says whether the head improved on its initial weights. If it did not, the initial weights
    are kept and the exit code is 3.
    """
    choose_recipe(arguments)
    recipe = read_head_recipe(arguments.recipe, arguments.set)
    deadline = Deadline(arguments.minutes)
    _check(arguments)
    # Documents may take hours.
    recipe.check()
    check_start(recipe.head, _checkpoint(arguments), recipe.selector)
    made = make_data(
        arguments.target,
        arguments.prompts,
        arguments.work / "data",
        draft_head=None if arguments.mode == CORPUS else arguments.draft_head,
        seed=recipe.seed,
        dtype=recipe.dtype,
        need_heldout=True,
        ignore_config_keys=arguments.ignore_config_key,
        deadline=deadline,
        mesh=decoding_mesh(make_mesh(recipe.mesh)),
        **generation_settings(arguments),
    )
    print(summary(made))
    return _train(arguments, recipe, made.folder, arguments.work / HEAD_FOLDER, deadline)


def choose_recipe(arguments: argparse.Namespace) -> None:
    """Chooses the recipe, and for the pair "smollm2" the head, if the options name none."""
    if arguments.recipe is None and (arguments.target, arguments.draft_head or SMOLLM2) == (SMOLLM2, SMOLLM2):
        arguments.recipe, arguments.draft_head = OF_SMOLLM2, SMOLLM2
    arguments.recipe = arguments.recipe or "finetune"


def _tracking(arguments: argparse.Namespace) -> Tracking:
    return Tracking(tuple(arguments.track), arguments.track_project)


def _check(arguments: argparse.Namespace) -> None:
    """Checks options before anything is loaded or made."""
    _tracking(arguments).check()
    if arguments.states_gib is not None:
        check_bound(arguments.states_gib)


def _checkpoint(arguments: argparse.Namespace) -> Source | None:
    """The initial head, if the options name one."""
    if arguments.draft_head is None:
        return None
    return Source(draft_head_at(arguments.draft_head), ignore_config_keys=arguments.ignore_config_key)


def _train(
    arguments: argparse.Namespace, recipe: HeadRecipe, data: Path, work: Path, deadline: Deadline
) -> int:
    if risk := recipe.risk_of(DocumentsManifest.read(data).settings.mode):
        _log.warning("%s", risk)
    checkpoint, ignored = _checkpoint(arguments), arguments.ignore_config_key
    target = read_target(Source(arguments.target, recipe.dtype, ignored), mesh_to_load(recipe.mesh))
    folder = train_head(
        work,
        recipe,
        target,
        data,
        deadline,
        checkpoint=checkpoint,
        tracking=_tracking(arguments),
        states_gib=arguments.states_gib,
    )
    result = read_verdict(work)
    if is_first():
        print(f"the head is in {folder}, curves of its training in {work / 'training.png'}")
        options = "".join(f" {IGNORE_OPTION} {key}" for key in ignored)
        pair = f"--model {arguments.target} --draft-head {folder}{options}"
        # Without --budget, a CPU decodes without the head.
        budget = max(recipe.evaluation.budgets, default=DEFAULT_BUDGET)
        print(f"to use it: jetspec-jax generate {pair} --budget {budget} PROMPT")
        print(f"{result.message}; {risk}" if risk and not result.improved else result.message)
    return 0 if result.improved else NOT_IMPROVED
