"""Options, checks and loading of a target, its draft head and prompts, for benchmarks that decode prompts."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.common.options import add_switch, best_attention, check_least
from bench.common.prompts import Prompt, load_prompts
from bench.common.scene import random_weights
from bench.common.shapes import find_pair_shape
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
from jetspec_jax.tree import DEFAULT_ALGORITHM, algorithm_names, bucket_for
from train.data.prompt_sets import FORMS, PROMPT_SETS, PUBLISHED, Part


class Pair(NamedTuple):
    """A target and its draft head."""

    target: Target
    head: Head


def add_pair_arguments(
    parser: argparse.ArgumentParser, *, prompts: int, max_tokens: int, copies: bool = True
) -> None:
    """Adds the options of a pair, its prompts and how they are decoded.

    Args:
        prompts: The default number of prompts.
        max_tokens: The default number of tokens per prompt.
        copies: Whether several copies of the pair (data parallelism) can decode the prompts.
    """
    usual = {"target": DEMO, "implementation": best_attention(), "compilation_cache": "auto"}
    fields = [*usual, "draft_head", "ignore_config_keys", "fp8_activations"]
    fields += PARALLEL if copies else PARALLEL[:-1]
    MODELS.add(parser, fields, **usual, ignore_config_keys=[])
    add = parser.add_argument
    add("--max-tokens", type=int, default=max_tokens, help=f"tokens per prompt (default: {max_tokens})")
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
        help="how a set's questions are put: as in its published evaluation, or plain: the question alone, a "
        f"function to complete, the first of several turns (default: {PUBLISHED})",
    )
    # Too few prompts in a set are an error only if --num-prompts was given.
    parser.set_defaults(usual_prompts=prompts)
    add("--num-prompts", type=int, help=f"number of prompts (default: {prompts}, or all if there are fewer)")
    add("--skip-prompts", type=int, default=0, metavar="N", help="skip the first N prompts (default: 0)")
    add_switch(
        parser,
        "--enable-thinking",
        "for chat templates with this argument (default: no, as in published evaluations)",
        default=None,
    )
    add(
        "--task",
        help="task of the prompts, for algorithms that route by task: math, code, chat, ..., or "
        f'"{TASK_OF_SET}" for the task that the prompt set gives each prompt (default: none)',
    )


def add_trees_arguments(
    parser: argparse.ArgumentParser, *, temperatures: Sequence[float], budgets: Sequence[int]
) -> None:
    """Adds the temperatures, algorithms and budgets that are compared."""
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
        help="option of an algorithm, its value in JSON, for example top2gap_fanout.beta=2.0; repeatable",
    )
    ALGORITHM.add(parser, ["profile"])
    usual = " ".join(map(str, budgets))
    add(
        "--budgets",
        type=int,
        nargs="+",
        default=list(budgets),
        help=f"nodes of the trees, root included (default: {usual})",
    )


def check_numbers(arguments: argparse.Namespace, *numbers: str) -> None:
    """Checks `add_pair_arguments`, and ``numbers``, further options of at least 1, before anything is loaded.

    Raises:
        ValueError: A number is less than 1, or ``skip_prompts`` is negative.
    """
    check_least(arguments, 0, "skip_prompts")
    check_least(arguments, 1, "num_prompts", "max_tokens", *numbers)


def check_trees(arguments: argparse.Namespace) -> None:
    """Checks budgets and temperatures of `add_trees_arguments`, before anything is loaded.

    Raises:
        ValueError: A budget or a temperature is out of range.
    """
    for budget in arguments.budgets:
        bucket_for(budget)
    for temperature in arguments.temperatures:
        SamplingParams(temperature=temperature)


def read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """Reads the prompts of `add_pair_arguments`, and fills in a default ``num_prompts``.

    Raises:
        FileNotFoundError: A file is missing, or a set cannot be loaded.
        ValueError: A prompt is invalid, or there are fewer than ``num_prompts``.
    """
    count = arguments.num_prompts
    part = Part(arguments.skip_prompts, count or arguments.usual_prompts, fewer=count is None)
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
    """Loads the models of `add_pair_arguments`.

    Args:
        settings: Trees that the pair must be able to grow.
        one_device: Whether to ignore the numbers of devices in ``arguments``.

    Raises:
        FileNotFoundError: A checkpoint is missing.
        ValueError: A checkpoint is invalid, the target has no head, or a tree is out of range.
    """
    path = arguments.target
    head_path = arguments.draft_head or default_draft_head(path)
    if head_path is None:
        raise ValueError(f"--draft-head is missing: trees for {path} need a head that was made for it")
    source = Source(path, dtype, arguments.ignore_config_key, fp8_activations=arguments.fp8_activations)
    meshes = meshes_for(source.partition_config, **({} if one_device else parallel_sizes(arguments)))
    say_unused(meshes)
    target = read_target(source, *meshes)
    return Pair(target, read_head(arguments, head_path, dtype, target, settings))


def read_head(
    arguments: argparse.Namespace, path: str, dtype: str, target: Target, settings: Iterable[TreeSettings]
) -> Head:
    """A head of a loaded target; the other arguments and errors are those of `load_pair`."""
    ignored, fp8_activations = arguments.ignore_config_key, arguments.fp8_activations
    source = Source(draft_head_at(path), dtype, ignored, fp8_activations=fp8_activations)
    head = read_draft_head(source, target)
    for tree in settings:
        tree.for_selected(head.config.selected).check(target.config, head.config.depth)
    return head


def random_pair(name: str, dtype: jnp.dtype) -> Pair:
    """Random weights of a shape on the device, without a tokenizer or stop tokens."""
    shape = find_pair_shape(name)
    pair = Pair(
        Target(shape.target, random_weights(shape.target, dtype, 0)),
        Head(shape.head, random_weights(shape.head, dtype, 1)),
    )
    jax.block_until_ready([model.weights for model in pair])
    return pair


def describe_pair(pair: Pair, works: Iterable[Workload]) -> dict[str, Any]:
    """Number of devices (of all copies), shapes, type of the weights and range of prompt lengths."""
    lengths = [len(ids) for work in works for ids in work.ids]
    return {
        "devices": sum(map(size_of, pair.target.meshes)),
        "shapes": shapes_of(pair.target.config, pair.head.config),
        "dtype": str(pair.target.weights["embed_tokens"].dtype),
        "prompt_tokens": [min(lengths), max(lengths)],
    }


def shapes_of(target: ModelConfig, head: DraftHeadConfig) -> dict[str, Any]:
    """The sizes of a pair, for a report: models with the same name may differ in them."""
    return {
        "layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "head_layers": head.layers.num_layers,
        "block_size": head.block_size,
        "causal_head": head.causal,
    }
