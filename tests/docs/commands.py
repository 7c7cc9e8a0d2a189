"""The commands of the pages: which are run, with which limits, and why the others are not."""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bench.__main__ import main as bench
from convert.command import main as convert
from jetspec_jax.cli.command import main as jetspec_jax
from jetspec_jax.cli.parser import Parser
from jetspec_jax.demo import DEMO_TARGET
from tests.docs.blocks import ALL, OTHERS, PAGES, ROOT, Block, prose, with_demo
from train.command import main as train
from train.head.command import choose_recipe
from train.head.recipe_file import find_table, read_head_recipe

MAKE = "make"
#: What calls a program, and the program; `make` is called as it is.
PROGRAMS = {
    "jetspec-jax": jetspec_jax,
    "python -m jetspec_jax": jetspec_jax,
    "python -m train": train,
    "python -m bench": bench,
    "python -m convert": convert,
    MAKE: None,
}
#: Why a command is not run, by what it says. A reason in front of a block is for all of its commands.
NOT_RUN = {
    r"--shapes? (?!tiny)\w": "a GPU: weights of a published shape",
    r"bench kernel\b": "a GPU: its kernels",
    r"\b(?:Qwen|JetSpec)/": "a hub: a checkpoint of 8 billion parameters",
    r"\bSET=FILE\b": "a hub: a published set of prompts",
    r"train pair\b|\bWORK/": "minutes to hours of a GPU; tests/train/pair has a tiny one",
    r"--coordinator|--distributed": "a second host",
    r"//host:": "a server on another host",
    r"bench (?:plots|page)\b": "it rewrites the checkout; tests/bench has it write elsewhere",
    r"make (?:test|test-all|lint|lint-newest)\b": "it runs this test, or what .ci/run runs beside it",
    r"make (?:demo|parity|newest-jax|\w+-check)\b": "it installs packages",
    r"make (?:fuzz|soak|soak-serve)\b": "minutes: tests/fuzz has shorter ones",
    r"^bench \w": "tests/bench runs it",
    r"--work demo-dpace\b": "docs/training.md has the same",
}
_SETS = " ".join(
    f"--set {setting}"
    for setting in (
        *("fit.steps=2", "fit.warmup=1", "fit.batch=2", "fit.micro_batch=2", "objective.anchors=2"),
        *("objective.chunk=30", "evaluation.windows=2", "evaluation.prompts=1", "evaluation.new_tokens=4"),
    )
)
#: Appended to commands: the test's limits. The last of two equal options counts.
SHORT = {
    "jetspec-jax generate": "--max-tokens 16",
    "jetspec-jax chat": "--max-tokens 16",
    "jetspec-jax tree": "--max-tokens 16",
    "python -m train data": "--limit 24 --heldout 1",
    "python -m train finetune": f"--limit 24 --heldout 4 {_SETS}",
    "python -m train head": _SETS,
}
_CALL = re.compile(
    rf"(?<![\w/.\"-])(?P<program>{'|'.join(map(re.escape, PROGRAMS))})(?![\w-])(?P<rest>[^\n]*)"
)
# What readers convert.
_SOURCE = re.compile(r"\bQwen/Qwen3-8B\b|\bSOURCE\b|\bdemo\b")
# What a block writes for its commands, and lines of a shell, joined where they go on.
_PART = re.compile(r"cat > \S+ <<'END'\n(?:.*\n)*?END$|(?:.*\\\n)*.*", re.M)
_SETUP = re.compile(r"cat > \S+ <<'END'|python \w+\.py > ")


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    where: str
    program: str
    words: list[str]
    plain: bool = True
    feeding: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        """The program with its command, if it has several."""
        return " ".join([self.program, *self.words[:1]])


def block_parts(block: Block) -> Iterator[Command | str]:
    """The commands of a block of a shell, and what its other lines write for them, in order."""
    if block.language != "sh":
        return
    for part in _PART.finditer(block.code):
        if _SETUP.match(part[0]):
            yield part[0]
            continue
        text = part[0].replace("\\\n", " ").partition(" #")[0].strip()
        feeding, _, called = text.rpartition(" | ") if " | " in text else ("", "", text)
        line = block.line + block.code.count("\n", 0, part.start())
        yield from _commands(f"{block.page}:{line}", called, feeding, block.reason)


def _commands(where, text, feeding="", reason=""):
    for found in _CALL.finditer(text):
        program, rest, plain = found["program"], found["rest"], found.start() == 0
        if not plain:  # inside of another command, up to the end of its quotes
            rest = re.split(r"['`)]", rest)[0]
        # Variables are names of options, or numbers; an ellipsis in quotes is a prompt.
        rest = re.sub(r"(?<=[ =])[NI]\b|(?<!-)\$\w+", "1", rest.replace("--$", "--").replace('"…"', "def"))
        if program == "python -m convert":
            rest = _SOURCE.sub(str(DEMO_TARGET), rest)
        words = shlex.split(rest, comments=True)
        said = " ".join([program.removeprefix("python -m "), *words])
        why = next((why for what, why in NOT_RUN.items() if re.search(what, said)), "")
        if plain or words:  # otherwise a name
            yield Command(where, program, words, plain, feeding, reason or why)


def prose_commands(page) -> Iterator[Command]:
    """The commands in the sentences of a page, in code; in other files also those in comments."""
    text = prose(page)
    spans = [(own[2], own.start()) for own in re.finditer(r"(`+)([^`]+)\1", text)]
    if page.suffix != ".md":
        spans += [(own[0], own.start()) for own in re.finditer(r"^#.*", text, re.M)]
    for span, start in spans:
        called = re.sub(r"^(?:\w+=\S+ )+", "", " ".join(with_demo(span).split()))
        if _CALL.match(called):
            where = f"{page.relative_to(ROOT).as_posix()}:{text.count(chr(10), 0, start) + 1}"
            yield from _commands(where, called)


def error_of(command: Command) -> str:
    """What the parser says against a command, and against a recipe's settings; nothing if it knows them all.

    In a sentence, or with an ellipsis, a command may be a part of one: then what is required may be missing.
    """
    if command.program == MAKE:
        return _error_of_make(command.words)
    words = [word for word in command.words if word not in ("…", "COMMAND")]
    if not words and command in IN_PROSE:
        return ""  # the program's name
    partial = len(words) < len(command.words) or command in IN_PROSE
    real, said = Parser.parse_args, io.StringIO()

    def parse_args(*given, **named):
        arguments = real(*given, **named)
        if words[:1] == ["pair"]:
            find_table(arguments.recipe or "smollm2-pair")  # the target decides on the other settings
        elif hasattr(arguments, "recipe"):
            choose_recipe(arguments)
            read_head_recipe(arguments.recipe, arguments.set).check()
        raise EOFError

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
        contextlib.suppress(EOFError),
    ):
        patch.setattr(Parser, "parse_args", parse_args)
        try:
            PROGRAMS[command.program](words)
        except SystemExit as end:
            # An unknown option is named before one that is missing.
            return "" if not end.code or (partial and " required" in said.getvalue()) else said.getvalue()
        raise AssertionError(f"{command.where}: {command.name} has not parsed its words")
    return ""


def _error_of_make(words):
    makefile = (ROOT / "Makefile").read_text("utf-8")
    unknown = [word for word in words if "=" in word and f"$({word.partition('=')[0]})" not in makefile]
    if unknown:
        return f"the Makefile reads no {unknown}"
    # Even a dry run executes the lines that call make again.
    dry = subprocess.run([MAKE, "-n", "SHELL=true", *words], cwd=ROOT, capture_output=True, text=True)
    return dry.stderr if dry.returncode else ""


def is_to_run(command: Command) -> bool:
    """Whether a command is run: nothing is against it, and in a sentence it is whole and not a block's."""
    if command.reason or command not in IN_PROSE:
        return not command.reason
    if len(command.words) < 2 or "…" in command.words or "--help" in command.words:
        return False
    alike = (other for other in IN_BLOCKS if other.name == command.name)
    return not any({*command.words} <= {*other.words} for other in alike)


#: The commands of all blocks, and all that are not in one.
IN_BLOCKS = [found for block in ALL for found in block_parts(block) if isinstance(found, Command)]
_FILES = [
    path for room in ("deploy", "examples") for path in sorted((ROOT / room).iterdir()) if path.is_file()
]
IN_PROSE = [found for page in (*PAGES, *OTHERS, *_FILES) for found in prose_commands(page)]
