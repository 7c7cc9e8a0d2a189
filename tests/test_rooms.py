"""Imports between rooms run one way, and what is installed imports no program."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: From the bottom to the top: a room imports rooms before its own entry; those of one entry know nothing of
#: each other.
ROOMS = {
    "jetspec_jax": [
        ("arguments", "version", "vllm_names"),
        ("config", "sampling", "tree", "demo", "smollm2", "progress"),
        ("models", "sampling_params"),
        ("device",),
        ("checkpoint", "cache"),
        ("decode",),
        ("engine",),
        ("request_output",),
        ("inspect", "llm", "generation"),
        ("async_llm",),
        ("view",),
        ("serve",),
        ("cli",),
        ("__main__",),
    ],
    "train": [
        ("loss", "trackers"),
        ("loop",),
        ("data",),
        ("head",),
        ("pair",),
        ("command",),
        ("__main__",),
    ],
    "bench": [
        ("common",),
        (
            "acceptance",
            "decode",
            "exactness",
            "experts",
            "matmul",
            "round",
            "startup",
            "train_step",
        ),
        ("kernel", "load"),
        ("serve",),
        ("plots",),
        ("page",),
        ("__main__",),
    ],
}
PACKAGES = {
    "pallas_kernels": set(),
    "jetspec_jax": {"pallas_kernels"},
    "convert": {"pallas_kernels", "jetspec_jax"},
    "train": {"pallas_kernels", "jetspec_jax", "convert"},
    "bench": {"pallas_kernels", "jetspec_jax", "convert", "train"},
}


def imported(path):
    """Full names of what a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(path, package):
    return path.relative_to(ROOT / package).parts[0].removesuffix(".py")


@pytest.mark.parametrize("package", ROOMS)
def test_imports_run_one_way(package):
    heights = {room: height for height, rooms in enumerate(ROOMS[package]) for room in rooms}
    files = [path for path in (ROOT / package).rglob("*.py") if room_of(path, package) != "__init__"]
    assert {room_of(path, package) for path in files} == heights.keys()
    found = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in files
        for name in imported(path)
        if name.split(".")[0] == package
        # The package itself is its face, which stands above all rooms.
        and (room := f"{name}.".split(".")[1]) != room_of(path, package)
        and heights.get(room, len(heights)) >= heights[room_of(path, package)]
    ]
    assert found == []


def test_nothing_that_the_scheduler_imports_imports_jax():
    program = "import sys; sys.modules.update(jax=None, jaxlib=None, flax=None); import jetspec_jax.engine.{}"
    for module in ("scheduler", "policy", "stats"):
        ran = subprocess.run([sys.executable, "-c", program.format(module)], cwd=ROOT, capture_output=True)
        assert ran.returncode == 0, ran.stderr.decode()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_those_below(package):
    others = PACKAGES.keys() - PACKAGES[package] - {package}
    files = list((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    assert [
        (path.name, name) for path in files for name in imported(path) if name.split(".")[0] in others
    ] == []
