"""The blocks of the pages: their Python and their commands, and which of them are not run, and why.

A line `<!-- not run: REASON -->` in front of a block says that one CPU cannot run it, or not in the time of
a test.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
#: Pages that are not of the documentation; the change log tells of the past.
OTHERS = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")),
    *(page for room in ("bench", "train", "jetspec_jax") for page in sorted((ROOT / room).glob("**/*.md"))),
]
#: The languages of blocks: commands are looked for in those of a shell.
LANGUAGES = {"sh", "python", "text", "json", "nginx", "bibtex"}
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"^<!-- not run:", re.M)
# Readers put checkpoints of their own in these places; here they are the embedded pair.
_PLACEHOLDER = re.compile(r"path/or/hub-id|\bPATH(?:_OR_ID)?\b|\bMODEL\b|\bHEAD\b")


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: str
    line: int
    language: str
    code: str
    reason: str


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page."""
    text, name = page.read_text("utf-8"), page.relative_to(ROOT).as_posix()
    found = list(_BLOCK.finditer(text))
    marks = sum(own["reason"] is not None for own in found)
    if marks != len(_MARK.findall(text)):
        raise ValueError(f"{name} has a mark that is in front of no block")
    if unknown := {own["language"] for own in found} - LANGUAGES:
        raise ValueError(f"{name} has blocks of {unknown}; say {LANGUAGES}")
    if len(re.findall("^ *```", text, re.M)) != 2 * len(found):
        raise ValueError(f"{name} has a block that is indented or has no language")
    for own in found:
        line = text.count("\n", 0, own.start("code")) + 1
        yield Block(name, line, own["language"], with_demo(own["code"]), own["reason"] or "")


def prose(page: Path) -> str:
    """The text of a page with its blocks blank, so that lines keep their numbers."""
    return _BLOCK.sub(lambda own: "\n" * own[0].count("\n"), page.read_text("utf-8"))


def with_demo(code: str) -> str:
    """Code with the embedded pair in the places for a reader's own."""
    return _PLACEHOLDER.sub("demo", code)


ALL = [block for page in (*PAGES, *OTHERS) for block in blocks(page)]
