"""The parser of all command lines: options have no abbreviations, and an error is one line."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jetspec_jax.arguments import NEAR, printable
from jetspec_jax.vllm_names import ENGINE, SERVE, SHORT_OPTIONS

# Shorter names are the beginning of too many options.
_SHORTEST_NAME = 3
# A word that looks like an option, and is neither a negative number nor a text of several words.
_OPTION = re.compile(r"--?[^\W\d_][\w-]*")
# An argument of `LLM` in a sentence of `vllm_names`; arguments of other calls are in parentheses.
_ARGUMENT = re.compile(r"(?<![(\w])(\w+)=…")


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, with which an unknown option could be taken for another one."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, allow_abbrev=False, **settings)

    def parse_known_args(self, args: Iterable[str] | None = None, *rest: Any, **named: Any) -> Any:
        """Like argparse's, but the error of an unknown option names the option to use instead.

        A program of several commands shows its help if none is named.
        It comes before errors about missing options: a missing one may be the unknown one, misspelt.
        """
        words = sys.argv[1:] if args is None else list(args)
        if not words and self._subparsers is not None:
            self.exit(2, self.format_help())
        if unknown := self._unknown_option(words):
            self.error(f"unknown option {unknown}{self._instead(unknown)}")
        return super().parse_known_args(words, *rest, **named)

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2 and one line."""
        self.exit(2, f"{self.prog}: {printable(message)}; see {self.prog} --help\n")

    def refuse_replaced(self, words: Sequence[str], replaced: Mapping[str, str]) -> None:
        """Ends the program if a command line has a command or "COMMAND WORD" of an earlier version."""
        names = [*words[:1], *(f"{words[0]} {word.partition('=')[0]}" for word in words[1:])]
        if gone := next((name for name in names if name in replaced), None):
            self.error(f"{gone!r} was removed: {replaced[gone]}")

    def _unknown_option(self, words: Sequence[str]) -> str | None:
        """The first unknown option among the words that this parser reads."""
        known = self._option_string_actions
        for word in words:
            name = word.partition("=")[0]
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return None  # the rest are positional arguments, or belong to a subcommand
            short = word[:2] if not word.startswith("--") else name
            if _OPTION.fullmatch(name) and name not in known and short not in known:
                return name
        return None

    def _instead(self, name: str) -> str:
        """What to use instead of an unknown option: the equivalent of vLLM's option, or the nearest name."""
        name = SHORT_OPTIONS.get(name, name)
        field = name.lstrip("-").replace("-", "_").removeprefix("no_")
        if answer := ENGINE.get(field) or SERVE.get(field):
            return f"; {_ARGUMENT.sub(_as_option, answer)}"
        known = {option.lstrip("-"): option for option in self._option_string_actions}
        name = name.lstrip("-")
        longer = sorted((option for option in known if option.startswith(name)), key=len)
        if name in known:
            near = [name]
        elif len(name) < _SHORTEST_NAME:
            near = []
        else:
            near = longer or difflib.get_close_matches(name, known, cutoff=NEAR)
        if not near:
            return ""
        # Two swapped letters are a likelier typing error than an additional one.
        found = known[max(near, key=lambda option: sorted(option) == sorted(name))]
        shown = self._option_string_actions[found].option_strings
        return f"; the nearest is {found if found in shown else shown[0]}"


def _as_option(argument: re.Match[str]) -> str:
    return f"--{argument[1].replace('_', '-')} …"


def accept_formerly(parser: argparse.ArgumentParser, option: argparse.Action, *names: str) -> None:
    """Accepts former names of an option, which neither the help nor a shell's completion shows."""
    parser._option_string_actions.update(dict.fromkeys(names, option))
