"""What a release says of itself, and what the check of its wheel runs; the check itself needs an index."""

import re
import tomllib
import zipfile
from importlib.metadata import metadata

import pytest

import jetspec_jax
from tests.packaging.check_wheel import ROOT, SECTIONS, blocks, commands, wrong_wheel

README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]


def test_every_line_of_both_sections_is_run(tmp_path):
    target, head = tmp_path / "target", tmp_path / "head"
    found = commands(README, target, head)
    lines = [line for code in blocks(README, "Use from the shell", "sh") for line in code.splitlines()]
    assert len(found) == len(lines) >= 3
    assert all(words[0] == "jetspec-jax" for words in found)
    assert not any("PATH" in word for words in found for word in words)
    [both] = [words for words in found if "--draft-head" in words]
    assert both[both.index("--model") + 1] == str(target)
    assert both[both.index("--draft-head") + 1] == str(head)


@pytest.mark.parametrize(("heading", "language"), SECTIONS.items())
def test_a_section_that_is_gone_is_noticed(heading, language):
    with pytest.raises(ValueError, match=f"the README has no {language} under '{heading}'"):
        blocks(README.replace(heading, "Something else"), heading, language)


def test_a_wheel_is_held_against_the_checkout(tmp_path):
    root, wheel = tmp_path / "root", tmp_path / "x.whl"
    for name in ("jetspec_jax/py.typed", "pallas_kernels/py.typed", "jetspec_jax/a.py", "tests/b.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("jetspec_jax/a.py", "jetspec_jax/py.typed", "tests/b.py"):
            file.writestr(name, "")
    assert wrong_wheel(wheel, root) == [
        "the wheel lacks pallas_kernels/py.typed",
        "the wheel should not hold tests/b.py",
        "the wheel lacks its licence",
    ]


def test_the_readme_of_a_package_index_has_links_and_pictures_that_lead_somewhere():
    text, [own] = README, SETTINGS["tool"]["hatch"]["metadata"]["hooks"].values()
    for change in own["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    assert len(links) == len(re.findall(r"\]\(", README)) > 40
    # Each is a link to elsewhere, or one of this repository's files.
    repository = PROJECT["urls"]["Repository"]
    raw = repository.replace("github.com", "raw.githubusercontent.com")
    pictures = 0
    for picture, link in links:
        start = f"{raw}/main/" if picture else f"{repository}/blob/main/"
        pictures += bool(picture)
        assert link.startswith("https://")
        assert not link.startswith(start) or (ROOT / link.removeprefix(start).partition("#")[0]).exists()
        assert link.startswith(start) or not picture
    assert pictures >= 3


def test_the_readme_installs_what_it_describes():
    """Before a version is on the index, what is there lacks a part of these pages."""
    pages = [README, *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))]
    from_index = [
        line for page in pages for line in re.findall(r'^pip install "?jetspec-jax\b.*', page, re.M)
    ]
    from_checkout = re.findall(r"^pip install \..*|pip install \./.*", README, re.M)
    assert bool(from_index) != (".dev" in jetspec_jax.__version__) == bool(from_checkout)


def test_the_version_is_the_last_dated_one_of_the_changelog_or_one_in_development_after_it():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    [unreleased] = re.findall(r"^## \[Unreleased\]\n(.*?)^## \[", changelog, re.MULTILINE | re.DOTALL)
    last = re.search(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)[1]
    version, _, development = jetspec_jax.__version__.partition(".dev")
    numbers, released = (tuple(map(int, name.split("."))) for name in (version, last))
    assert numbers > released if development else numbers == released
    assert bool(unreleased.strip()) <= bool(development), "unreleased changes need a version in development"


def test_the_workflow_runs_what_is_there_on_every_python():
    workflow = (ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"run: make ([\w-]+)", workflow)
    assert {"test-all", "parity", "wheel-check"} == set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    [pythons] = re.findall(r"python: \[(.*)\]", workflow)
    minors = re.findall(r'"(3\.\d+)"', pythons)
    assert [f"Programming Language :: Python :: {minor}" for minor in minors] == [
        line for line in PROJECT["classifiers"] if re.search(r":: 3\.\d", line)
    ]


def test_what_is_published_beside_the_code():
    assert set(PROJECT["urls"]) == {"Homepage", "Repository", "Documentation", "Changelog", "Issues"}
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert all((ROOT / package / "py.typed").is_file() for package in ("jetspec_jax", "pallas_kernels"))
    assert metadata("jetspec-jax")["Name"] == PROJECT["name"]
