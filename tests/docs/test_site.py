"""The site of the documentation: what is on it, and that it builds and needs nothing from elsewhere."""

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import jetspec_jax

ROOT = Path(__file__).parents[2]
SITE = (ROOT / "mkdocs.yml").read_text("utf-8")
#: Pages of the site by the hook that adds them; it imports MkDocs, which most tests do without.
FROM_ELSEWHERE = re.findall(
    r'^    "(.+)": "(.+)",$', (ROOT / "docs/site/repository.py").read_text("utf-8"), re.M
)
DOCUMENTED = [
    name
    for page in sorted((ROOT / "docs/api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.M)
]


def test_every_page_is_in_the_menu_once():
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md")]
    made = [page for _, page in FROM_ELSEWHERE]
    assert len(made) > 5
    assert Counter(re.findall(r": (\S+\.md)$", SITE, re.M)) == Counter([*pages, *made])


def test_pages_from_elsewhere_are_there():
    assert all((ROOT / path).is_file() for path, _ in FROM_ELSEWHERE)


def test_the_api_pages_have_all_public_names_once():
    names = [f"jetspec_jax.{name}" for name in jetspec_jax.__all__ if name != "tree"]
    names += [f"jetspec_jax.tree.{name}" for name in jetspec_jax.tree.__all__]
    written = Counter(name.replace("jetspec_jax.generation.", "jetspec_jax.") for name in DOCUMENTED)
    assert not [name for name, count in written.items() if count > 1]
    assert not set(names) - set(written)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_names_exist(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.wide
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.glob("**/*.html"))
    assert len(pages) > 25
    loaded = r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?(https?:[^\s\">]*)"
    for page in pages:
        text = page.read_text("utf-8")
        assert re.findall(loaded, text) == [], page
        assert 'data-md-component="source"' not in text, "it asks GitHub for numbers"
    text = (tmp_path / "usage.html").read_text("utf-8")
    assert 'href="notes.html#grammars"' in text
    text = (tmp_path / "benchmarks.html").read_text("utf-8")
    assert 'href="https://github.com/jetspec/jetspec_jax/tree/main/bench/results"' in text
    assert (tmp_path / "bench/results/rounds/qwen3-8b-h200.svg").is_file()
    assert "Loads the models" in (tmp_path / "api/text.html").read_text("utf-8")
