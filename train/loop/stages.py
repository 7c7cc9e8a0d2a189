"""Work folders of recipes: stages that are done once, time limits, and settings that must not change."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.config import read_json


class OutOfTime(Exception):
    """The time limit was reached; everything is saved."""


class Deadline:
    """A limit on the wall-clock time. Work that has begun is finished, which may take a minute more."""

    def __init__(self, minutes: float | None = None):
        """Starts the clock; None is no limit."""
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    def passed(self) -> bool:
        """Whether no new work should begin."""
        return self.end is not None and time.monotonic() >= self.end

    def stop(self, where: str) -> None:
        """Ends the run.

        Raises:
            OutOfTime: Always, saying where.
        """
        raise OutOfTime(where)

    def check(self, where: str) -> None:
        """Ends the run if the limit was reached.

        Raises:
            OutOfTime: The limit was reached.
        """
        if self.passed():
            self.stop(where)


Stage = Callable[[], None]


def run_stages(work: Path, stages: dict[str, Stage], deadline: Deadline) -> None:
    """Runs the stages that are not done, in order, and marks each as done.

    Raises:
        OutOfTime: The limit was reached; the message lists the stages left.
    """
    marks = work / "done"
    marks.mkdir(parents=True, exist_ok=True)
    for name, stage in stages.items():
        mark = marks / name
        if mark.exists():
            print(f"{name}: done already", flush=True)
            continue
        left = [other for other in stages if not (marks / other).exists()]
        try:
            deadline.check(f"before {name}")
            begun = time.perf_counter()
            print(f"{name}: begins", flush=True)
            stage()
        except OutOfTime as stop:
            raise OutOfTime(f"stopped ({stop}); left: {', '.join(left)}") from None
        seconds = time.perf_counter() - begun
        mark.write_text(f"{seconds:.1f} seconds in its last run\n", encoding="utf-8")
        print(f"{name}: done in {seconds:.1f} s", flush=True)


#: Settings that recipes of earlier versions lack, and what runs of these then did.
LATER = {
    "mesh.expert": 1,
    "mesh.tensor": 1,
    "packing": False,
    "objective.smoothing": 0.5,
    "evaluation.temperatures": [0.0],
    "stored": "bfloat16",
}


def claim(work: Path, settings: Mapping[str, Any]) -> None:
    """Takes a work folder for some settings, which are kept there as ``recipe.json``.

    Raises:
        ValueError: The folder was made with other settings, all of which are listed; or its file is damaged.
    """
    path = work / "recipe.json"
    mine = json.loads(json.dumps(settings))
    if not path.exists():
        write_json(path, mine)
        return
    here, there = dotted(mine), dotted(read_json(path))
    for name in here.keys() - there.keys():
        parts = name.split(".")
        # A head's recipe may be part of a larger one.
        if own := {parts[-1], ".".join(parts[-2:])} & LATER.keys():
            there[name] = LATER[own.pop()]
    differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    if differing:
        listed = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in differing)
        raise ValueError(
            f"{work} was made with another recipe ({listed}); give the same settings (--set NAME=VALUE) or "
            "name another folder"
        )


def dotted(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested objects by their dotted names; a list of objects counts as an object."""
    if isinstance(tree, list) and tree and all(isinstance(part, dict) for part in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {
        name: leaf for key, value in tree.items() for name, leaf in dotted(value, f"{prefix}{key}.").items()
    }


def fresh(folder: Path) -> Path:
    """Removes what an interrupted stage left at this path, and returns the path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
