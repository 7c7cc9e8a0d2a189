"""A target, its draft head and prompts: what the benchmarks that decode prompts have in common."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bench.common.methods import check_fixed_budgets, fixed_budget_names
from bench.common.options import add_breadth_arguments, add_switch, check_least
from bench.common.prompts import Prompt, load_prompts
from bench.common.workload import TASK_OF_SET, Workload
from jetspec_jax import Head, SamplingParams, Target
from jetspec_jax.checkpoint.loading import read_draft_head, read_target
from jetspec_jax.checkpoint.pairs import default_draft_head, draft_head_at
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.cli.options import ALGORITHM, MODELS, PARALLEL, parallel_sizes
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.demo import DEMO
from jetspec_jax.device.groups import meshes_for, say_unused
from jetspec_jax.device.mesh import size_of
from jetspec_jax.tree import BUCKETS, DEFAULT_ALGORITHM, algorithm_names, bucket_for, get_algorithm
from pallas_kernels.dispatch import gpu_problem
from train.data.prompt_sets import FORMS, PROMPT_SETS, PUBLISHED, Part


class Pair(NamedTuple):
    """What decodes.

    Attributes:
        target: The target.
        head: Its draft head.
    """

    target: Target
    head: Head


def add_pair_arguments(
    parser: argparse.ArgumentParser, *, prompts: int, max_tokens: int, copies: bool = True
) -> None:
    """Adds the arguments that name a pair, its prompts and how they are decoded, with usual numbers.

    Args:
        parser: Of the command.
        prompts: How many, usually.
        max_tokens: Of each, usually.
        copies: Whether several copies of the pair can decode them.
    """
    # Named in every report, also where nobody chose one.
    best = "xla" if gpu_problem() else "pallas_triton"
    usual = {"target": DEMO, "implementation": best, "compilation_cache": "auto"}
    fields = [*usual, "draft_head", "ignore_config_keys", *(PARALLEL if copies else PARALLEL[:-1])]
    MODELS.add(parser, fields, **usual, ignore_config_keys=[])
    add = parser.add_argument
    add("--max-tokens", type=int, default=max_tokens, help=f"for each prompt (default: {max_tokens})")
    add(
        "--prompts",
        default=DEMO,
        metavar="SET|SET=FILE|FILE",
        help=f'"demo"; {", ".join(PROMPT_SETS)}, from the hub or, as "gsm8k=test.jsonl", from a file; or '
        'JSONL with "messages", "text" or "prompt" in each line',
    )
    add(
        "--prompt-form",
        choices=FORMS,
        default=PUBLISHED,
        help="how a set is asked: as in its published evaluation, or plainly: the question alone, a function "
        f"to complete, the first of several turns (default: {PUBLISHED})",
    )
    # A set that has fewer is an error only where somebody asked for so many.
    parser.set_defaults(usual_prompts=prompts)
    add("--num-prompts", type=int, help=f"how many (default: {prompts}, or fewer if there are no more)")
    add("--skip-prompts", type=int, default=0, metavar="N", help="leave out the first N (default: 0)")
    add_switch(
        parser,
        "--enable-thinking",
        "for chat templates that know it (default: no, as in published evaluations)",
        default=None,
    )
    add(
        "--task",
        help="what algorithms that route are told of the prompts: math, code, chat, ..., or "
        f'"{TASK_OF_SET}" for what the prompt set says of each (default: nothing)',
    )


def add_trees_arguments(
    parser: argparse.ArgumentParser, *, temperatures: Sequence[float], budgets: Sequence[int]
) -> None:
    """Adds what is compared: temperatures, algorithms and budgets, with usual ones."""
    add = parser.add_argument
    add(
        "--temperatures",
        "--temperature",
        type=float,
        nargs="+",
        default=list(temperatures),
        metavar="T",
        help=f"0 is greedy; prompt i has seed i (default: {' '.join(f'{t:g}' for t in temperatures)})",
    )
    add(
        "--algorithms",
        nargs="+",
        default=[DEFAULT_ALGORITHM],
        metavar="NAME",
        help=f'of {", ".join(algorithm_names())}, or "all" (default: {DEFAULT_ALGORITHM})',
    )
    add(
        "--algorithm-option",
        action="append",
        default=[],
        metavar="[ALGORITHM.]NAME=VALUE",
        help="option of an algorithm, its value in JSON, as top2gap_fanout.beta=2.0; may recur",
    )
    ALGORITHM.add(parser, ["profile"])
    usual = " ".join(map(str, budgets))
    add("--budgets", type=int, nargs="+", default=list(budgets), help=f"of the trees (default: {usual})")


def add_round_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds how the rounds of a measurement are run: one tree, one temperature, one type."""
    names = ", ".join(fixed_budget_names())
    add = parser.add_argument
    add("--budget", type=int, default=64, help="of the trees (default: 64)")
    usual = DEFAULT_ALGORITHM
    add("--algorithm", default=usual, metavar="NAME", help=f"{names} (default: {usual})")
    add_breadth_arguments(parser)
    add("--temperature", type=float, default=0.0, help="prompt i has seed i (default: 0)")
    MODELS.add(parser, ["dtype"], dtype="auto")


def check_numbers(arguments: argparse.Namespace, *numbers: str) -> None:
    """Checks numbers before anything is loaded.

    Args:
        arguments: With those of `add_pair_arguments`.
        numbers: Further arguments that must be at least 1.

    Raises:
        ValueError: A number is less than 1, or less than 0 prompts are skipped.
    """
    check_least(arguments, 0, "skip_prompts")
    check_least(arguments, 1, "num_prompts", "max_tokens", *numbers)


def check_trees(arguments: argparse.Namespace) -> None:
    """Checks what `add_trees_arguments` added but for the algorithms, before anything is loaded.

    Raises:
        ValueError: A budget or a temperature is out of its range.
    """
    for budget in arguments.budgets:
        bucket_for(budget)
    for temperature in arguments.temperatures:
        SamplingParams(temperature=temperature)


def check_round(arguments: argparse.Namespace) -> None:
    """Checks what `add_round_arguments` added but for the type, before anything is loaded.

    Raises:
        ValueError: The algorithm is unknown or chooses budgets, or the temperature, the budget, the width or
            the number of candidates is out of its range. A tree of one node drafts nothing, so there is
            nothing to measure.
    """
    check_least(arguments, 1, "width", "candidates")
    get_algorithm(arguments.algorithm)
    check_fixed_budgets("--algorithm", [arguments.algorithm])
    SamplingParams(temperature=arguments.temperature)
    if not 2 <= arguments.budget <= BUCKETS[-1]:
        raise ValueError(
            f"--budget must be in 2..{BUCKETS[-1]} (nodes, root and a draft included), not {arguments.budget}"
        )


def read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts that the arguments name; says how many they are where nobody asked for a number.

    Args:
        arguments: With those of `add_pair_arguments`; ``num_prompts`` is filled in.

    Raises:
        FileNotFoundError: There is no such file, or a set cannot be loaded.
        ValueError: A prompt is not what it should be, or there are fewer than were asked for.
    """
    asked = arguments.num_prompts
    part = Part(arguments.skip_prompts, asked or arguments.usual_prompts, fewer=asked is None)
    prompts = load_prompts(arguments.prompts, part, arguments.prompt_form)
    arguments.num_prompts = len(prompts)
    return prompts


def load_pair(
    arguments: argparse.Namespace,
    dtype: str,
    settings: Iterable[TreeSettings] = (),
    *,
    one_device: bool = False,
) -> Pair:
    """Loads the models.

    Args:
        arguments: With ``target``, ``draft_head``, None for the demo's, and ``ignore_config_key``; how many
            devices decode, one where they do not say.
        dtype: Of the weights.
        settings: Trees that the pair must be able to grow.
        one_device: Whether one device decodes whatever the arguments say.

    Raises:
        FileNotFoundError: A checkpoint is not there.
        ValueError: It is not what it should be, there is no head for the target, or a tree is out of range.
    """
    path = arguments.target
    head_path = arguments.draft_head or default_draft_head(path)
    if head_path is None:
        raise ValueError(f"--draft-head is missing: trees for {path} need a head that was made for it")
    source = Source(path, dtype, arguments.ignore_config_key)
    meshes = meshes_for(source.target_config, **({} if one_device else parallel_sizes(arguments)))
    say_unused(meshes)
    target = read_target(source, *meshes)
    head = read_draft_head(Source(draft_head_at(head_path), dtype, arguments.ignore_config_key), target)
    for own in settings:
        own.check(target.config, head.config.depth)
    return Pair(target, head)


def describe_pair(pair: Pair, works: Iterable[Workload]) -> dict[str, Any]:
    """Devices of all copies, shapes, type of the weights and lengths of the prompts, for a report."""
    lengths = [len(ids) for work in works for ids in work.ids]
    return {
        "devices": sum(map(size_of, pair.target.meshes)),
        "shapes": shapes_of(pair.target.config, pair.head.config),
        "dtype": str(pair.target.weights["embed_tokens"].dtype),
        "prompt_tokens": [min(lengths), max(lengths)],
    }


def shapes_of(target: ModelConfig, head: DraftHeadConfig) -> dict[str, Any]:
    """What tells models apart that may have one name, for a report."""
    return {
        "layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "head_layers": head.layers.num_layers,
        "block_size": head.block_size,
        "causal_head": head.causal,
    }
