import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
    ROOT / "bench/results/NOTES.md",
    ROOT / "jetspec_jax/demo/README.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page, text):
    found = []
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        goal = page.parent / path if path else page
        # Nothing above the checkout is there for a reader.
        there = goal.resolve().is_relative_to(ROOT) and goal.exists()
        if not there or (anchor and (goal.suffix != ".md" or anchor not in anchors(goal))):
            found.append(link)
    return found


@names
def test_links_and_anchors_lead_somewhere(page):
    assert broken(page, page.read_text(encoding="utf-8")) == []


@names
def test_python_blocks_compile(page):
    for language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(code, str(page), "exec")


def test_broken_links_are_found():
    text = "[a](nowhere.md) [b](README.md#nothing) [c](#install) [d](docs/usage.md) [e](https://x.org) [f](/)"
    assert broken(ROOT / "README.md", text) == ["nowhere.md", "README.md#nothing", "/"]


def test_every_page_is_reached_from_the_readme():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(PAGES[0].read_text("utf-8"))}
    assert set((ROOT / "docs").glob("*.md")) <= linked  # docs/api is for the site alone
