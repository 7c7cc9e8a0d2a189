"""SIGINT at random moments, to a program that goes on and to the command, which ends: see ``--help``."""

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

import jax
from tqdm import tqdm

from tests.events import PATIENCE
from tests.fuzz.scenes import Scene

# An interrupted call must end within so many seconds: what it has begun to compile takes a few.
LONGEST = PATIENCE
# The part of the calls that must compile everything first, which takes most of the time.
COMPILES = 0.1
# Before its own first line, while Python still imports it, a command ends as any Python program does.
PROGRAM = "import sys; from jetspec_jax.cli import main; print('runs', flush=True); sys.exit(main())"
COMMAND = [sys.executable, "-c", PROGRAM, "generate", "--max-tokens", "40", "def f(x):"]


class Interrupts:
    """Ctrl-C as a user sends it, from outside; what the program makes of it is Python's usual handler."""

    def __init__(self) -> None:
        """Takes over SIGINT."""
        self.arrived = 0
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.arrived += 1
        signal.default_int_handler(number, frame)

    def send_after(self, seconds: float) -> subprocess.Popen[bytes]:
        """Another process sends one to this process, later."""
        return subprocess.Popen(["sh", "-c", f"sleep {seconds:.4f}; kill -INT {os.getpid()}"])


def interrupt_calls(scene: Scene, rng: random.Random, count: int) -> dict[str, int]:
    """Interrupts calls of this process, some while they compile; how many ended in which way."""
    interrupts = Interrupts()
    outcomes: collections.Counter[str] = collections.Counter()
    scene.check(rng)
    for number in tqdm(range(count), disable=None):
        compiles = rng.random() < COMPILES
        if compiles:
            jax.clear_caches()
        before, started = interrupts.arrived, time.monotonic()
        outcome = "swallowed by another library"
        sender = None
        try:
            sender = interrupts.send_after(rng.uniform(0, 4.0 if compiles else 0.4))
            while interrupts.arrived == before:
                act = rng.choice(scene.acts)
                _past_marks(lambda act=act, number=number: act(random.Random(number)))
        except KeyboardInterrupt:
            outcome = "interrupted"
        took = time.monotonic() - started
        if sender is not None:
            sender.wait()
        outcomes[outcome] += 1
        # A call whose interrupt was swallowed goes on, and takes as long as it takes.
        if outcome == "interrupted" and took > LONGEST:
            raise TimeoutError(f"an interrupted call took {took:.0f} s")
        _past_marks(lambda: scene.check(rng))
    return dict(outcomes)


def _past_marks(call: Callable[[], None]) -> None:
    """Calls; again where JAX takes a call that a signal cut short in its caches for one that still runs."""
    try:
        call()
    except RecursionError as error:
        if "Recursively calling" not in str(error):
            raise
        jax.clear_caches()
        call()


def interrupt_command(rng: random.Random, longest: float) -> str:
    """Interrupts a command at some moment of its run; how it ended, "" where that is as it should be."""
    pipe = subprocess.PIPE
    command = subprocess.Popen(COMMAND, text=True, stdout=pipe, stderr=pipe)
    assert command.stdout is not None
    assert command.stdout.readline() == "runs\n"
    try:
        command.wait(rng.uniform(0, longest))
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGINT)
    try:
        out, err = command.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        command.kill()
        return "did not end"
    interrupted = command.returncode == 130 and err.endswith("interrupted\n")
    # Once its text is out, Python takes itself down, and no longer listens.
    done = command.returncode == 0 or (command.returncode == -signal.SIGINT and out != "")
    fine = interrupted or done
    return "" if fine and "Traceback" not in err else f"code {command.returncode}, {err[-300:]!r}"


def main() -> None:
    """Prints one JSON object; raises at the first failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.signals", description=__doc__)
    parser.add_argument("--count", type=int, default=80, help="signals to one process (default: 80)")
    parser.add_argument("--commands", type=int, default=0, help="commands that get one each (default: 0)")
    parser.add_argument("--longest", type=float, default=20.0, help="most seconds before a command's signal")
    parser.add_argument("--cases", type=int, default=12, help="requests to choose among (default: 12)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    outcomes = interrupt_calls(Scene(options.seed, options.cases), rng, options.count)
    failures = [interrupt_command(rng, options.longest) for _ in tqdm(range(options.commands), disable=None)]
    report = {"signals": options.count, "outcomes": outcomes, "commands": options.commands}
    print(json.dumps({**report, "failures": list(filter(None, failures))}), flush=True)
    # After interrupts that struck in JAX's own callbacks Python has crashed while it took itself down.
    os._exit(any(failures))


if __name__ == "__main__":
    main()
