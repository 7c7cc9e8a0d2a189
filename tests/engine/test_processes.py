"""Two processes with two devices each, which share one model: what they decode, and how they end."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams, generate, logits
from jetspec_jax.cli.command import main
from tests.decode.tiny import TINY, with_windows
from tests.engine.processes_worker import GREEDY, PROMPT, SAMPLED, asked, decoded, pair, stopping, tree_llm
from tests.events import PATIENCE

#: The worker's cases after which its processes can run another case.
RETURNING = ["together", "served", "forms", "unlike", "memory_verdict", "recovering", "looking"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A returning case's results in both processes, by its name; raises the error of a case that failed.

    One group of processes runs all cases. A failing case ends its group, and another runs the cases after it.
    """
    outcomes, left = {}, RETURNING
    while left:
        folder, failure = tmp_path_factory.mktemp("found"), None
        with starting() as start:
            try:
                end_well(start(cases(folder, *left)))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failure = error
        outcomes |= {
            case: results(folder, case) for case in left if all(map(Path.exists, files(folder, case)))
        }
        missing = [case for case in left if case not in outcomes]
        if failure or missing:
            failed = (missing or left[-1:])[0]
            outcomes[failed] = failure or AssertionError(
                f"the processes ended well without results of {failed}"
            )
        left = missing[1:]

    def of(case):
        if isinstance(outcomes[case], Exception):
            raise outcomes[case]
        return outcomes[case]

    return of


@pytest.fixture
def start():
    with starting() as begin:
        yield begin


@contextlib.contextmanager
def starting():
    """Starts two processes, each with the arguments that a function of its number and a port gives."""
    started = []

    def begin(arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for index in range(2):
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments(index, port)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # Commands compile without optimisations, as the tests do.
                env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
            )
            started.append(process)
        return started[-2:]

    try:
        yield begin
    finally:
        for process in started:
            process.kill()
            process.communicate()


def cases(folder, *names):
    """Arguments of the worker's processes for cases; they write ``CASE-0.json`` and ``CASE-1.json``."""

    def arguments(index, port):
        settings = {"process": [index, 2, port], "cases": names, "out": str(folder)}
        return ["tests.engine.processes_worker", json.dumps(settings)]

    return arguments


@pytest.fixture
def run(start, tmp_path):
    """Starts processes of one case of the worker."""
    return lambda case: start(cases(tmp_path, case))


@pytest.fixture
def command(start):
    """Starts processes of the command."""

    def begin(*arguments):
        def own(index, port):
            place = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process", str(index)]
            return ["jetspec_jax", *arguments, "--tensor-parallel-size", "4", *place]

        return start(own)

    return begin


def files(folder, case):
    return [folder / f"{case}-{index}.json" for index in range(2)]


def results(folder, case):
    """The results that both processes wrote."""
    return [json.loads(file.read_text()) for file in files(folder, case)]


def endings(processes):
    """Exit codes and standard errors."""
    errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    return [process.returncode for process in processes], errors


def end_well(processes):
    codes, errors = endings(processes)
    assert codes == [0, 0], "\n".join(error[-3000:] for error in errors)


def listed(found):
    return json.loads(json.dumps(found))


@pytest.mark.wide
def test_processes_decode_as_one_device_does(found):
    """Tokens, budgets that clocks choose, stop strings, streams of which one is closed."""
    with tree_llm(None) as llm:
        greedy, sizes = listed(decoded(llm, GREEDY))
        sampled, _ = decoded(llm, SAMPLED)
        stop, _ = decoded(llm, stopping(llm.target.tokenizer.decode(greedy)))
        texts = [llm.generate([prompt], GREEDY)[0].text for prompt in (PROMPT, [*PROMPT, 1])]
    first, other = found("together")
    assert other == {}
    assert first["greedy"] == [greedy, sizes]
    assert first["auto"][0] == greedy
    assert first["sampled"][0] == first["again"][0] == sampled != greedy
    assert first["stop"][0] == stop
    assert len(stop) < len(greedy)
    assert sorted("".join(first["pieces"])) == sorted("".join(texts))
    assert first["scored"] == len(PROMPT)


@pytest.mark.wide
def test_the_first_process_serves_what_comes(found):
    """Requests of all kinds, some cancelled."""
    target, _ = pair(config=with_windows(TINY, None))
    alone = [generate(target, [prompt], params)[0].token_ids for prompt, params, _ in asked()]
    first, other = found("served")
    assert other["refused"].startswith("requests go to process 0")
    assert first["hits"] > 0
    for tokens, expected, (_, _, leaves) in zip(first["got"], alone, asked(), strict=True):
        assert tokens == (expected[: len(tokens)] if leaves else expected)
        assert tokens


@pytest.mark.wide
def test_grammars_need_a_model_of_one_process(found):
    error = "structured_outputs need a model that one process has; several share this one"
    assert found("forms") == [{"error": error}, {}]


@pytest.mark.wide
def test_what_differs_or_cannot_be_called_is_named(found):
    first, other = found("unlike")
    assert "the target's config of process 0 and process 1" in first["config"]
    assert "the trees of process 0 and process 1" in first["settings"]
    for name in ("config", "settings", "function", "trace"):
        assert first[name] == other[name]
    assert first["function"].startswith("several processes share the target: use LLM")
    assert first["trace"].startswith("several processes share the target: trace in one process")
    assert first["follow"].startswith("process 0 serves requests")
    assert other["call"].startswith("requests go to process 0; this process is a worker: call follow()")


@pytest.mark.wide
def test_the_fullest_process_decides(found):
    first, other = found("memory_verdict")
    assert first == other
    assert re.match(r"too little memory on each of 4 x cpu: .* needed, 0\.00 GiB free on the fullest", first)


@pytest.mark.wide
def test_after_an_error_of_the_first_process_the_next_call_works(found):
    with tree_llm(None) as llm:
        tokens, _ = listed(decoded(llm, GREEDY))
    first, other = found("recovering")
    assert first == [["ZeroDivisionError: a mistake", tokens], ["OSError: a device", tokens]]
    assert other == {}


@pytest.mark.wide
def test_all_processes_look_inside(found):
    target, _ = pair()
    whole = np.asarray(logits(target, [PROMPT]))
    for own in found("looking"):
        np.testing.assert_allclose(own["logits"], whole, atol=1e-4)
        np.testing.assert_allclose(own["last"], whole[:, -1:], atol=1e-4)


@pytest.mark.wide
def test_those_that_follow_end_with_the_first_process(run, tmp_path):
    """It closes nothing, and a stream is open."""
    end_well(run("leaving"))
    with tree_llm(None) as llm:
        assert results(tmp_path, "leaving") == [listed(decoded(llm, GREEDY)), "the end"]


@pytest.mark.wide
def test_those_that_follow_end_when_the_first_process_is_killed(run):
    codes, errors = endings(run("first_killed"))
    assert codes[0] == -signal.SIGKILL
    assert codes[1] not in (0, None), errors[1]


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
        ("waiting", [-signal.SIGABRT, -signal.SIGKILL], "process 1 has said nothing for"),
    ],
)
def test_all_end_with_one(run, case, codes, sentence):
    processes = run(case)
    processes[1].wait(PATIENCE)
    found, errors = endings(processes)
    assert found == codes
    assert sentence in errors[0]


@pytest.mark.wide
def test_the_first_process_ends_with_one_that_is_killed(run):
    """Its devices find out, or the coordinator does."""
    processes = run("killed")
    processes[1].wait(PATIENCE)
    codes, errors = endings(processes)
    assert codes[0] in (1, -signal.SIGABRT)
    assert codes[1] == -signal.SIGKILL
    assert re.search("process 1 has said nothing for|the devices of 2 processes stopped", errors[0])


@pytest.mark.wide
def test_only_the_first_process_of_a_command_prints(command):
    drawn = "--max-tokens", "12", "--budget", "16", "--temperature", "1", "--json", "--check"
    processes = command("generate", "def read_lines(path):", *drawn)
    (output, errors), other = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert len(json.loads(output)["token_ids"]) == 12
    assert "check: all 12 tokens equal plain decoding's" in errors
    assert other == ("", "")


@pytest.mark.wide
def test_the_first_process_of_a_server_listens_and_all_end_with_it(command):
    own = "--port", "0", "--warm-up", "none", "--budget", "16", "--max-num-seqs", "2"
    processes = command("serve", *own, "--dtype", "float32")
    lines = iter(processes[0].stderr.readline, "")
    address = next(found[1] for line in lines if (found := re.search(r"served at (http://\S+)/v1", line)))
    asked = {"prompt": "def read_lines(path):", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=address, timeout=PATIENCE) as http:
        texts = [
            http.post("/v1/completions", json={**asked, "budget": budget}).json()["choices"][0]["text"]
            for budget in (16, 1)
        ]
        watched = http.post("/playground/rounds", json={"prompt": "a"})
        assert (watched.status_code, watched.json()["error"]["code"]) == (400, "unsupported")
    llm = LLM(budget=1, dtype="float32")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    assert texts == [llm.generate([asked["prompt"]], params)[0].text] * 2
    # As a cluster does, which tells all of them.
    for process in processes[::-1]:
        process.send_signal(signal.SIGTERM)
    codes, errors = endings(processes)
    assert codes == [0, 0], errors
    assert errors[1] == ""


@pytest.mark.wide
def test_an_interrupt_ends_a_command_in_all_processes(command):
    processes = command("generate", "def f(x):", "--max-tokens", "none", "--ignore-eos", "--budget", "16")
    assert processes[0].stdout.read(20)  # it decodes
    processes[1].send_signal(signal.SIGINT)
    codes, errors = endings(processes)
    assert codes == [130, 130]
    assert "process 1 has ended: it was interrupted; this process ends too" in errors[0]
    assert "jetspec-jax: interrupted" in errors[1]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--process", "0"], "add --coordinator, --processes"),
        (["--distributed", "--process", "0"], "--distributed takes the place of --coordinator"),
        (["--coordinator", "here", "--processes", "2", "--process", "0"], "must be HOST:PORT, not 'here'"),
        (
            ["--coordinator", "here:1", "--processes", "2", "--process", "2"],
            "must lie in 0..1, not 2",
        ),
    ],
)
def test_options_that_do_not_go_together(capsys, options, sentence):
    assert main(["generate", "text", *options]) == 2
    assert sentence in capsys.readouterr().err
