"""The shared start of ``profile`` and ``diagnose``: options, a pair, and prompts at one temperature."""

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
    """Adds the options of the pair, the prompts and the rounds."""
    # Prompts are decoded one at a time, so copies of the pair have no use.
    add_pair_arguments(parser, prompts=16, max_tokens=128, copies=False)
    add_round_arguments(parser)


def begin(arguments: argparse.Namespace) -> tuple[Pair, Workload, TreeSettings]:
    """Checks the command line, and loads the pair, the requests and the tree settings."""
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
