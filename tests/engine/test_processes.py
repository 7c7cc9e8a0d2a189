"""Two processes with two devices each, which share one model: what they decode, and how they end."""

import json
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jetspec_jax import logits
from jetspec_jax.device.joining import HEARTBEAT_SECONDS
from tests.engine.processes_worker import (
    DRAWN,
    GREEDY,
    PROMPT,
    SAMPLED,
    decoded,
    pair,
    stopping,
    traced,
)

# They end within seconds; a busy machine takes longer for all else.
PATIENCE = 120


@pytest.fixture
def run(tmp_path):
    """Starts processes, of a case of the worker or with arguments of the command; all are gone afterwards."""
    started = []

    def start(case):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for index in range(2):
            out = tmp_path / f"{len(started)}.json"
            settings = {"process": [index, 2, port], "case": case, "out": str(out)}
            command = [sys.executable, "-m", "tests.engine.processes_worker", json.dumps(settings)]
            started.append(
                (subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), out)
            )
        return started[-2:]

    yield start
    for process, _ in started:
        process.kill()
        process.communicate()


def results(processes):
    """What the processes wrote, once they have ended as they should."""
    found = []
    for process, out in processes:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors[-3000:]
        found.append(json.loads(out.read_text()))
    return found


def endings(processes):
    """Exit codes and standard errors."""
    errors = [process.communicate(timeout=PATIENCE)[1] for process, _ in processes]
    return [process.returncode for process, _ in processes], errors


def listed(found):
    return json.loads(json.dumps(found))


def test_processes_decode_as_one_device_does(run):
    """Tokens, seeds that are drawn, budgets that clocks choose, stop strings, streams that one closes."""
    processes = run("together")
    target, head = pair()
    greedy, sizes = listed(decoded(target, head, GREEDY))
    sampled, _ = decoded(target, head, type(SAMPLED)(**{**vars(SAMPLED), "seed": DRAWN}))
    stop, _ = decoded(target, head, stopping(target.tokenizer.decode(greedy)))
    first, other = results(processes)
    # The stream of the other process ended where the first closed its own.
    assert other.pop("completion") is None
    assert first == other
    assert first["greedy"] == [greedy, sizes]
    assert first["auto"][0] == greedy
    assert first["drawn"][0] == first["again"][0] == sampled != greedy
    assert first["stop"][0] == stop
    assert len(stop) < len(greedy)
    assert len(first["pieces"]) == 1
    assert "prompts[1] of process 0 and process 1 ([5, 5] and [5, 5, 5])" in first["refused"]


@pytest.mark.wide
def test_what_differs_is_named_in_all_processes(run):
    first, other = results(run("unlike"))
    assert first == other or first | {"one": ""} == other | {"one": ""}
    assert "the target's config of process 0 and process 1" in first["config"]
    assert "the settings of the trees" in first["settings"]
    assert "sampling_params[0]" in first["params"]
    assert "process 1 refused its requests: ValueError: the prompt is empty" in first["one"]
    assert other["one"].startswith("the prompt is empty")


@pytest.mark.wide
def test_other_calls_are_an_error_and_no_hang(run):
    codes, errors = endings(run("out_of_step"))
    assert 0 not in codes
    assert "all processes must make the same calls: process 0 is at a step of engine 1" in errors[1]
    assert "process 1 has ended: OutOfStep" in errors[0]


@pytest.mark.wide
def test_the_fullest_process_decides(run):
    first, other = results(run("memory_verdict"))
    assert first == other
    assert re.match(r"too little memory on each of 4 x cpu: .* needed, 0\.00 GiB free", first)


@pytest.mark.wide
def test_what_looks_inside(run):
    processes = run("looking")
    target, head = pair()
    rounds, ids = listed(traced(target, head, GREEDY))
    whole = np.asarray(logits(target, [PROMPT]))
    for found in results(processes):
        np.testing.assert_allclose(found["logits"], whole, atol=1e-4)
        np.testing.assert_allclose(found["last"], whole[:, -1:], atol=1e-4)
        assert (found["rounds"], found["ids"]) == (rounds, ids)
        assert found["again"] == ids
        assert found["left"] == 0


@pytest.mark.wide
def test_a_process_without_a_device_is_refused(run):
    codes, errors = endings(run("no_device"))
    assert codes[1] == 1
    assert "the mesh of 2 devices has none of process 1, and every process needs one" in errors[1]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("case", "codes", "sentence"),
    [
        (
            "failing",
            [1, 1],
            "process 1 has ended: ZeroDivisionError: a mistake of process 1; this process ends",
        ),
        ("interrupted", [130, 130], "process 1 has ended: it was interrupted; this process ends too"),
        ("killed", [-signal.SIGABRT, -signal.SIGKILL], "process 1 has said nothing for"),
        ("waiting", [-signal.SIGABRT, -signal.SIGKILL], "process 1 has said nothing for"),
    ],
)
def test_all_end_with_one(run, case, codes, sentence):
    processes = run(case)
    processes[1][0].wait(PATIENCE)
    begun = time.monotonic()
    found, errors = endings(processes)
    # Generously: it is minutes if nobody misses the other.
    assert time.monotonic() - begun < HEARTBEAT_SECONDS + 20
    assert found == codes
    assert sentence in errors[0]
