"""The parser of every command line: options have their full names alone, and an error is one sentence."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jetspec_jax.arguments import printable
from jetspec_jax.vllm_names import ENGINE, SERVE, SHORT_OPTIONS

# What looks like an option and is no negative number, nor a text of several words.
_OPTION = re.compile(r"--?[^\W\d_][\w-]*")
# An argument of `LLM` in a sentence of `vllm_names`; those of other calls stand within parentheses.
_ARGUMENT = re.compile(r"(?<![(\w])(\w+)=…")


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, which could turn an option that is missing here into another one."""

    def __init__(self, *arguments: Any, **settings: Any):
        """As argparse's, which also makes the parsers of commands by it."""
        super().__init__(*arguments, allow_abbrev=False, **settings)

    def parse_known_args(self, args: Iterable[str] | None = None, *rest: Any, **named: Any) -> Any:
        """As argparse's, but an unknown option is an error that names what there is instead.

        It comes before errors about what is missing, which may be what the unknown option was meant for.
        """
        words = sys.argv[1:] if args is None else list(args)
        if unknown := self._unknown_option(words):
            self.error(f"unknown option {unknown}{self._instead(unknown)}")
        return super().parse_known_args(words, *rest, **named)

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2 and one line."""
        self.exit(2, f"{self.prog}: {printable(message)}; see {self.prog} --help\n")

    def _unknown_option(self, words: Sequence[str]) -> str | None:
        """The first word that is an option of this parser's part of a command line, and not known."""
        known = self._option_string_actions
        for word in words:
            name = word.partition("=")[0]
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return None  # the rest are texts, or the words of a command
            short = word[:2] if not word.startswith("--") else name
            if _OPTION.fullmatch(name) and name not in known and short not in known:
                return name
        return None

    def _instead(self, name: str) -> str:
        """What to do without an option: vLLM's have an answer; else an option is spelled alike."""
        name = SHORT_OPTIONS.get(name, name)
        field = name.lstrip("-").replace("-", "_").removeprefix("no_")
        if answer := ENGINE.get(field) or SERVE.get(field):
            return f"; {_ARGUMENT.sub(_as_option, answer)}"
        known = self._option_string_actions
        longer = sorted((own for own in known if own.startswith(name)), key=len)
        near = longer or difflib.get_close_matches(name, known)
        if not near:
            return ""
        # Two letters that changed places are a likelier slip than one too many.
        found = max(near, key=lambda own: sorted(own) == sorted(name))
        shown = known[found].option_strings
        return f"; the nearest is {found if found in shown else shown[0]}"


def _as_option(argument: re.Match[str]) -> str:
    return f"--{argument[1].replace('_', '-')} …"


def accept_formerly(parser: argparse.ArgumentParser, option: argparse.Action, *names: str) -> None:
    """Takes former names of an option, which neither the help nor a shell's completion shows.

    Args:
        parser: That has the option.
        option: What ``add_argument`` returned.
        *names: As they are typed.
    """
    parser._option_string_actions.update(dict.fromkeys(names, option))
