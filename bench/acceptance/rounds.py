"""What both measurements of acceptance begin with: arguments, a pair, and prompts at one temperature."""

import argparse

from bench.common.pair import (
    Pair,
    add_pair_arguments,
    add_round_arguments,
    check_numbers,
    check_round,
    load_pair,
    read_prompts,
)
from bench.common.report import check_report
from bench.common.workload import Workload, make_workloads
from jetspec_jax import enable_compilation_cache
from jetspec_jax.decode.settings import TreeSettings


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds which pair decodes which prompts in which rounds."""
    # Rounds are looked at one prompt after another.
    add_pair_arguments(parser, prompts=16, max_tokens=128, copies=False)
    add_round_arguments(parser)


def begin(arguments: argparse.Namespace) -> tuple[Pair, Workload, TreeSettings]:
    """The pair, the prompts and the trees that the arguments name, checked before anything is loaded."""
    check_numbers(arguments)
    check_round(arguments)
    check_report(arguments)
    settings = TreeSettings(
        arguments.budget, arguments.width, None, arguments.algorithm, arguments.candidates
    )
    prompts = read_prompts(arguments)
    enable_compilation_cache(arguments.compilation_cache)
    pair = load_pair(arguments, arguments.dtype, [settings])
    [work] = make_workloads(arguments, pair.target, prompts, [arguments.temperature]).values()
    return pair, work, settings
