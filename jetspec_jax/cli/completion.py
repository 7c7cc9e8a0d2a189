"""Shell completion of the command, as a script for the shell."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from jetspec_jax.cli.options import GROUPS
from jetspec_jax.cli.server_options import SERVING

# Values with these names in the help are completed with files or folders.
_FILES, _FOLDERS = ("FILE",), ("PATH_OR_ID", "MODEL", "DIR|auto|off")


def add_completion_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--print-completion`` to the command."""
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        metavar="SHELL",
        help="print a script that completes this command in bash, zsh, fish, tcsh or powershell, and stop",
    )


class _PrintCompletion(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(completion_script(parser, str(values)))
        parser.exit()


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of a shell."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError('completion needs shtab: pip install "jetspec-jax[completion]"') from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ValueError(f"completion is for {', '.join(shtab.SUPPORTED_SHELLS)}, not {shell!r}")
    words = {option.dest: option.words for group in (*GROUPS, *SERVING) for option in group.options}
    for action in _actions(parser):
        values: Any = action  # shtab reads an attribute that argparse does not declare
        if action.metavar in _FILES:
            values.complete = shtab.FILE
        elif action.metavar in _FOLDERS:
            values.complete = shtab.DIRECTORY
        elif known := words.get(action.dest):
            action.choices = list(known)
    return shtab.complete(parser, shell=shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a parser and of all its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
