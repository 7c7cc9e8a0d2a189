"""``jetspec-jax serve`` as a process, and what its command line refuses."""

import asyncio
import json
import signal
import sys
import threading
from dataclasses import fields, replace

import httpx
import pytest

from jetspec_jax.cli import command
from jetspec_jax.cli.options import MODELS
from jetspec_jax.cli.server_options import ENGINE, SERVER
from jetspec_jax.device import memory
from jetspec_jax.serve import running
from jetspec_jax.serve.running import Stopping, bind, draining_notice, log_compilations, serve_at
from jetspec_jax.serve.settings import ServeSettings
from tests.decode.tiny import random_target, save_tiny_pair
from tests.events import PATIENCE, join, until
from tests.serve.conftest import SMALL, small_target
from tests.serve.scripted import Scripted
from tests.serve.servers import Command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_pair(tmp_path_factory.mktemp("models"))[0]


def streams(command, count, tokens):
    """So many streams that have begun; their lines and threads."""
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body["return_token_ids"] = True  # the model has no tokenizer
    lines, begun = [[] for _ in range(count)], threading.Semaphore(0)

    def ask(own):
        try:
            with httpx.stream("POST", f"{command.url}/v1/completions", json=body, timeout=PATIENCE) as got:
                for line in got.iter_lines():
                    own.append(line)
                    begun.release() if len(own) == 1 else None
        except httpx.TransportError:
            own.append("gone")

    threads = [threading.Thread(target=ask, args=(own,)) for own in lines]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=PATIENCE)
    return lines, threads


def draining(command):
    return httpx.get(f"{command.url}/health", timeout=PATIENCE).status_code == 503


def tokens_of(lines):
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return tuple(token for event in events for token in event["choices"][0]["token_ids"])


@pytest.fixture
def hold(tmp_path):
    """A file: while it exists, the server's requests go on to their first tokens and no further."""
    file = tmp_path / "hold"
    file.touch()
    return file


@pytest.mark.wide
def test_sigterm_lets_eight_streams_end(folder, hold):
    words = ("--max-num-seqs", "8", "--dtype", "float32", "--warm-up", "none")
    command = Command(folder, *words, "--drain-seconds", str(PATIENCE), held=(hold, 8))
    try:
        lines, threads = streams(command, 8, 60)
        command.process.send_signal(signal.SIGTERM)
        until(lambda: draining(command))
        late = httpx.post(f"{command.url}/v1/completions", json={"prompt": "a"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert all(thread.is_alive() for thread in threads)
        hold.unlink()
        join(*threads)
        output, said = command.process.communicate(timeout=PATIENCE)
        assert command.process.returncode == 0
    finally:
        command.process.kill()
        command.process.communicate()
    assert [[line for line in own if line][-1] for own in lines] == ["data: [DONE]"] * 8
    [tokens] = {tokens_of(own) for own in lines}
    assert len(tokens) == 60
    assert f"8 running requests have {PATIENCE:g} s to end; a second Ctrl-C ends it at once\n" in said
    lines_of_log = [json.loads(line) for line in output.splitlines()]
    assert [one["message"] for one in lines_of_log if one["message"] not in ("request", "compiling")] == [
        "listening",
        "draining",
        "ended",
    ]
    asked = [one["status"] for one in lines_of_log if one.get("path") == "/v1/completions"]
    assert sorted(asked) == [200] * 8 + [503]


@pytest.mark.wide
def test_a_second_signal_ends_at_once(folder, hold):
    command = Command(folder, "--max-num-seqs", "1", "--warm-up", "none", held=(hold, 1))
    try:
        lines, threads = streams(command, 1, 200)
        command.process.send_signal(signal.SIGTERM)
        until(lambda: draining(command))
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(PATIENCE) == 128 + signal.SIGTERM
        join(*threads)
        assert lines[0][-1] == "gone", lines[0][-4:]
    finally:
        command.process.kill()
        command.process.communicate()


def test_what_compiles_for_long_is_logged_once(monkeypatch):
    looks = [{"rounds"}, {"rounds", "scores"}, {"prompts"}, {"prompts", "rounds"}, {"prompts", "rounds"}]
    said, left = [], iter(looks)
    monkeypatch.setattr(running, "SILENCE", 0.0)
    monkeypatch.setattr(running, "log", lambda message, **fields: said.append((message, fields)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(log_compilations(lambda: next(left)))
    assert said == [("compiling", {"programs": kind}) for kind in ("rounds", "prompts")]


def test_how_long_the_server_drains_is_said(monkeypatch):
    assert draining_notice(0, 30.0) == "jetspec-jax: the server is shutting down; no requests are running"
    for count, who in ((1, "1 running request has"), (3, "3 running requests have")):
        assert f" no more requests, and {who} 30 s to end; a second Ctrl-C " in draining_notice(count, 30.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert draining_notice(0, 1.5).startswith("\njetspec-jax: ")


def run(capsys, *words):
    code = command.main(["serve", *words])
    return code, capsys.readouterr().err


def test_a_port_in_use_is_said_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("jetspec_jax.cli.serving.AsyncLLM", lambda **_: pytest.fail("was loaded"))
    with bind("127.0.0.1", 0) as own:
        own.listen()
        port = own.getsockname()[1]
        code, said = run(capsys, "--port", str(port))
    assert code == 2
    assert f"cannot listen at 127.0.0.1:{port}" in said
    assert "--port" in said
    code, said = run(capsys, "--host", "no.such.host.invalid")
    assert (code, said.count("\n")) == (2, 1)


def test_a_port_that_another_took_since(capsys):
    with bind("127.0.0.1", 0) as own, bind("127.0.0.1", own.getsockname()[1]) as other:
        other.listen()
        port = own.getsockname()[1]
        serving = serve_at(Scripted(small_target()), own, ServeSettings(warm_up="none"), "demo", Stopping())
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: .* --port"):
            asyncio.run(serving)
    assert "is served" not in capsys.readouterr().err


@pytest.mark.parametrize(("context", "said"), [(1024, ""), (2048, "context 1024 of 2048; --max-model-len")])
def test_the_context_is_named_if_it_is_not_the_models(context, said, capsys):
    target = random_target(replace(SMALL, max_position_embeddings=context), 0)
    with bind("127.0.0.1", 0) as own, bind("127.0.0.1", own.getsockname()[1]) as other:
        other.listen()
        with pytest.raises(OSError, match="cannot listen"):
            asyncio.run(serve_at(Scripted(target), own, ServeSettings(warm_up="none"), "demo", Stopping()))
    err = capsys.readouterr().err
    assert ("context" in err, said in err) == (bool(said), True)


def test_the_extra_that_is_not_installed(capsys, monkeypatch):
    for name in [own for own in sys.modules if own.startswith("jetspec_jax.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, said = run(capsys)
    assert code == 2
    assert said == 'jetspec-jax: the server needs uvicorn: pip install "jetspec-jax[serve]"\n'


def test_too_small_a_device(capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 10 * 2**30)
    code, said = run(capsys, "--port", "0", "--max-num-seqs", str(2**20))
    assert code == 2
    assert "GiB" in said or "MiB" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tool-call-parser", "x"], "tool_call_parser must be one of hermes, qwen3_coder, qwen3_xml"),
        (["--tool-call-parser", "openai"], "tool_call_parser openai needs reasoning_parser openai_gptoss"),
        (["--max-requests-per-key", "2"], "needs keys"),
        (["no/such/folder", "--port", "0"], "no/such/folder"),
    ],
)
def test_what_the_command_line_refuses(capsys, words, says):
    code, said = run(capsys, *words)
    assert code == 2
    assert says in said
    assert said.count("\n") == 1


def test_every_setting_has_an_option_of_vllm_s_name():
    assert {option.field for option in SERVER.options} == {field.name for field in fields(ServeSettings)}
    names = {option.name for option in (*SERVER.options, *ENGINE.options, *MODELS.options)}
    assert {
        *("--host", "--port", "--api-key", "--served-model-name", "--uvicorn-log-level", "--allowed-origins"),
        *("--root-path", "--tool-call-parser", "--reasoning-parser", "--scheduling-policy"),
        "--per-request-spec-decode-metrics",
        *("--max-num-seqs", "--max-model-len", "--tensor-parallel-size", "--data-parallel-size"),
    } <= names
    assert ServeSettings(api_key=["a,b"]).api_key == ("a", "b")
