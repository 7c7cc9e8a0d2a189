"""Exceptions at random moments of a call, wherever Python looks for signals: see ``--help``."""

import argparse
import collections
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tqdm import tqdm

import jetspec_jax
from tests.fuzz.scenes import Scene

_OURS = str(Path(jetspec_jax.__file__).parent)
_KINDS = (KeyboardInterrupt, MemoryError, RuntimeError)
# Python runs the handlers of signals when it enters a function and when a call returns.
_EVENTS = ("call", "return", "c_return")


class Injected(BaseException):
    """What all exceptions are that this program injects, beside what they look like."""


class Moments:
    """Counts the moments of a call, and raises at one of them."""

    def __init__(self, strike: int | None, kind: type[BaseException], *, ours: bool):
        """Raises at the moment of that number; None only counts. ``ours`` skips other libraries' moments."""
        self.seen, self.where = 0, ""
        self._strike, self._kind, self._ours = strike, kind, ours

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watches what this thread does in the context."""
        sys.setprofile(self._moment)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _moment(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event not in _EVENTS or (self._ours and not name.startswith(_OURS)):
            return
        if frame.f_code.co_name == "__del__" or name == __file__:
            return  # what is raised in a finaliser is not passed on
        self.seen += 1
        if self.seen - 1 == self._strike:
            sys.setprofile(None)
            self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name} ({event})"
            raise type(self._kind.__name__, (Injected, self._kind), {})("injected")


def run(scene: Scene, rng: random.Random, count: int) -> dict[str, int]:
    """Injects exceptions; how many ended in which way."""
    for act in scene.acts:  # compiles what they need
        for seed in range(4):
            act(random.Random(seed))
    scene.check(rng)
    outcomes: collections.Counter[str] = collections.Counter()
    before = scene.bytes_held()
    for _ in tqdm(range(count), disable=None):
        act, seed, ours = rng.choice(scene.acts), rng.randrange(2**32), rng.random() < 0.7
        counting = Moments(None, BaseException, ours=ours)
        with counting.watched():
            act(random.Random(seed))
        kind = rng.choice(_KINDS)
        striking = Moments(rng.randrange(counting.seen), kind, ours=ours)
        try:
            try:
                with striking.watched():
                    act(random.Random(seed))
                outcomes["swallowed" if striking.where else "not reached"] += 1
            except BaseException as error:
                if not _is_injected(error):
                    raise
                outcomes[kind.__name__] += 1
            scene.check(rng)
        except Exception as error:
            raise AssertionError(f"{kind.__name__} in {act.__name__} at {striking.where}") from error
    grown = scene.bytes_held() - before
    assert grown <= 0, f"{grown} bytes of arrays are left over"
    return dict(outcomes)


def _is_injected(error: BaseException | None) -> bool:
    """Whether this is an injected exception, or was raised while one was handled."""
    while error is not None:
        if isinstance(error, Injected):
            return True
        error = error.__cause__ or error.__context__
    return False


def report(what: "sys.UnraisableHookArgs") -> None:
    """Python reports what a finaliser or a callback raised, unless it was injected."""
    if not _is_injected(what.exc_value):
        sys.__unraisablehook__(what)


def main() -> None:
    """Prints one JSON object; raises at the first failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.interrupts", description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="exceptions (default: 400)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.unraisablehook = report
    outcomes = run(Scene(options.seed), random.Random(options.seed), options.count)
    print(json.dumps({"exceptions": options.count, "seed": options.seed, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
