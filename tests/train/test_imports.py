"""No room of `train` imports one above it."""

import ast
from pathlib import Path

import pytest

import train

FOLDER = Path(train.__file__).parent
#: From the bottom to the top; ``__main__`` stands above all rooms.
ROOMS = ("loss", "loop", "data", "head", "demo", "ablations", "__main__")


def imported(path):
    """The rooms that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("train."))


def test_every_room_has_its_place():
    rooms = {path.relative_to(FOLDER).parts[0].removesuffix(".py") for path in FOLDER.rglob("*.py")}
    assert rooms - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room):
    above = set(ROOMS[ROOMS.index(room) + 1 :])
    files = [FOLDER / "__main__.py"] if room == "__main__" else (FOLDER / room).rglob("*.py")
    found = {path.relative_to(FOLDER).as_posix(): set(imported(path)) for path in files}
    assert any(found.values())
    assert {name: rooms & above for name, rooms in found.items() if rooms & above} == {}
