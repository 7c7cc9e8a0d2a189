"""The blocks of README and docs: their Python and their commands, and which of them are not run, and why.

A line `<!-- not run: REASON -->` in front of a block says that one CPU cannot run it, or not in the time of
a test.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"^<!-- not run:", re.M)
# Readers put checkpoints of their own in these places; here they are the embedded pair.
_PLACEHOLDER = re.compile(r"path/or/hub-id|\bPATH(?:_OR_ID)?\b|\bMODEL\b")
_COMMAND = re.compile(r"(?<![\w/.\"-])jetspec-jax(?= [a-z-])")


@dataclass(frozen=True)
class Command:
    """A line of a shell that calls the command.

    Attributes:
        words: What follows the command's name; None where the line is no plain call.
        feeding: The command line whose output is its input; empty if there is none.
    """

    words: list[str] | None
    feeding: str = ""


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        page: The page's path in the repository.
        line: Of the page, of its first line of code.
        language: As the fence has it.
        code: With the embedded pair in the places for a reader's own.
        reason: Why it is not run; empty if it is.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str

    @property
    def commands(self) -> list[Command]:
        """Calls of the command, in order."""
        if self.language != "sh":
            return []
        lines = self.code.replace("\\\n", " ").splitlines()
        return [_command(line) for line in lines if _COMMAND.search(line.partition(" #")[0])]

    @property
    def runs(self) -> bool:
        """Whether there is anything in it that is to be run."""
        return not self.reason and (self.language == "python" or bool(self.commands))


def _command(line: str) -> Command:
    feeding, _, called = line.rpartition(" | ") if " | " in line else ("", "", line)
    words = shlex.split(called, comments=True)
    return Command(words[1:], feeding) if words[0] == "jetspec-jax" else Command(None)


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page.

    Raises:
        ValueError: A mark is in front of no block.
    """
    text, name = page.read_text("utf-8"), page.relative_to(ROOT).as_posix()
    found = list(_BLOCK.finditer(text))
    marks = sum(own["reason"] is not None for own in found)
    if marks != len(_MARK.findall(text)):
        raise ValueError(f"{name} has a mark that is in front of no block")
    for own in found:
        line = text.count("\n", 0, own.start("code")) + 1
        code = _PLACEHOLDER.sub("demo", own["code"])
        yield Block(name, line, own["language"], code, own["reason"] or "")


ALL = [block for page in PAGES for block in blocks(page)]
