"""Work folders of recipes: stages that run once, time limits, and fixed settings."""

import contextlib
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
    """A wall-clock limit. Work in progress is finished, which may take a minute more."""

    def __init__(self, minutes: float | None = None):
        """Starts the clock; None is no limit."""
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    def passed(self) -> bool:
        """Whether the limit was reached."""
        return self.end is not None and time.monotonic() >= self.end

    def check(self, where: str) -> None:
        """Ends the run if the limit was reached.

        Raises:
            OutOfTime: The limit was reached.
        """
        if self.passed():
            raise OutOfTime(where)


Stage = Callable[[], None]


#: The seconds of each stage in all runs together, without those that were killed.
SECONDS = "seconds.json"
#: The folder of the marks of finished stages.
DONE = "done"
# Differences of recipes in an error.
_MOST_SHOWN = 10


def run_stages(work: Path, stages: dict[str, Stage], deadline: Deadline) -> None:
    """Runs the missing stages in order, marks each as done, and adds its seconds to `SECONDS`.

    Raises:
        OutOfTime: The limit was reached; the message lists the remaining stages.
    """
    marks = work / DONE
    marks.mkdir(parents=True, exist_ok=True)
    for name, stage in stages.items():
        mark = marks / name
        if mark.exists():
            print(f"{name}: done already", flush=True)
            continue
        left = [other for other in stages if not (marks / other).exists()]
        begun = time.perf_counter()
        try:
            deadline.check(f"before {name}")
            print(f"{name}: begins", flush=True)
            stage()
        except OutOfTime as stop:
            raise OutOfTime(f"stopped ({stop}); left: {', '.join(left)}") from None
        finally:
            seconds = time.perf_counter() - begun
            _add_seconds(work / SECONDS, name, seconds)
        mark.write_text(f"{seconds:.1f} seconds in its last run\n", encoding="utf-8")
        print(f"{name}: done in {seconds:.1f} s", flush=True)


def _add_seconds(path: Path, name: str, seconds: float) -> None:
    known = read_json(path) if path.exists() else {}
    with contextlib.suppress(OSError):  # a full disk is the stage's error
        write_json(path, {**known, name: round(known.get(name, 0.0) + seconds, 1)})


def claim(work: Path, settings: Mapping[str, Any], file: str = "recipe.json") -> None:
    """Claims a work folder for some settings, which are stored there in a file.

    Raises:
        ValueError: The folder has other settings (the message lists them), or its file is damaged.
    """
    path = work / file
    given = json.loads(json.dumps(settings))
    if not path.exists():
        write_json(path, given)
        return
    here, there = dotted(given), dotted(read_json(path))
    differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    if differing:
        # What holds others of them comes first.
        shown = sorted(differing, key=lambda name: name.count("."))[:_MOST_SHOWN]
        listed = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in shown)
        more = f"; {len(differing) - len(shown)} more" if len(differing) > len(shown) else ""
        raise ValueError(
            f"{work} was made with another recipe ({listed}{more}); give the same options and settings, or "
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
    """Removes the leftovers of an interrupted stage at this path, and returns the path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
