"""Threads, injected exceptions and signals, on one tiny pair; the long programs beside this file do more."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jetspec_jax import cli
from tests.events import PATIENCE, until_it_sleeps
from tests.fuzz import interrupts, signals
from tests.fuzz.scenes import Scene

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scene():
    return Scene(0, cases=6)


@pytest.mark.wide
def test_threads_get_what_each_gets_alone(scene):
    scene.in_threads(4, 3, 0)
    scene.check(random.Random(0))


@pytest.mark.wide
def test_an_exception_at_any_moment_leaves_nothing_behind(scene, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", interrupts.report)
    outcomes = interrupts.run(scene, random.Random(0), 20)
    assert sum(outcomes.values()) == 20
    assert outcomes["KeyboardInterrupt"] >= 2


@pytest.mark.wide
def test_after_a_signal_the_next_call_works():
    # In a process of its own, and few: what a signal leaves half done inside of JAX must not be collected in
    # other tests, and one that strikes JAX while it compiles has crashed the process.
    command = [sys.executable, "-m", "tests.fuzz.signals", "--count", "3", "--cases", "6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert sum(json.loads(done.stdout)["outcomes"].values()) == 3


PROGRAM = """
import runpy
import sys
from concurrent.futures import Future
process = runpy.run_path(sys.argv[1])
def interrupted(*_):
    raise KeyboardInterrupt
def main():
    print("runs", flush=True)
    if sys.argv[2] == "waits":
        sys.stdin.read()
    if sys.argv[2] == "refuses":
        raise SystemExit(2)
    if sys.argv[2] == "asks":
        Future.set_result = interrupted
        try:
            process["in_main_thread"](int)
        except KeyboardInterrupt:
            return 3
    return 7
sys.exit(process["run_interruptibly"](main))
"""


@pytest.mark.parametrize(
    ("does", "code"),
    # The main thread is interrupted as it hands back what it was asked for, too.
    [("waits", 130), ("asks", 130), ("refuses", 2), ("ends", 7)],
)
def test_an_interrupt_ends_the_command_at_once(does, code):
    path = Path(cli.__file__).with_name("process.py")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, path, does],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout.readline() == "runs\n"
        if does == "waits":
            until_it_sleeps(program)
            program.send_signal(signal.SIGINT)
        # Its standard input stays open: only the signal can have ended it.
        assert program.wait(PATIENCE) == code
        assert program.stderr.read() == ("\njetspec-jax: interrupted\n" if code == 130 else "")


@pytest.mark.wide
def test_the_command_ends_wherever_it_is_interrupted():
    rng = random.Random(0)
    assert [signals.interrupt_command(rng, 15) for _ in range(6)] == [""] * 6
