"""Command-line options that several commands have, and checks of their values."""

import argparse
from collections.abc import Collection, Iterable

from jetspec_jax.cli.options import MODELS
from pallas_kernels.dispatch import gpu_problem


def add_switch(
    parser: argparse.ArgumentParser, option: str, text: str, *, default: bool | None = False
) -> None:
    """Adds ``--option`` and ``--no-option``."""
    parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=text)


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the type of random weights, the profiler and the compilation cache."""
    add = parser.add_argument
    MODELS.add(parser, ["dtype"], dtype="auto")
    add_switch(parser, "--profile", "also record the GPU's kernels by class")
    add("--compilation-cache", default="off", help='folder, "auto" or "off" (default: off, to compile cold)')


def best_attention() -> str:
    """The default implementation of tree attention, by name, so that every report names it."""
    return "xla" if gpu_problem() else "pallas_triton"


def check_known(option: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError if a name is unknown."""
    for name in given:
        if name not in known:
            raise ValueError(f"--{option} must be one of {', '.join(known)}, not {name!r}")


def check_least(arguments: argparse.Namespace, smallest: int, *names: str) -> None:
    """Raises ValueError if a number, or one of a list, is smaller than ``smallest``; None is allowed."""
    for name in names:
        given = getattr(arguments, name)
        values = given if isinstance(given, list) else [] if given is None else [given]
        if values and min(values) < smallest:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {smallest}, not {min(values)}")
