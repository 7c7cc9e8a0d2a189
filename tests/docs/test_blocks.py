"""What README and docs show runs: every Python block and every call of the command that one CPU can run.

The blocks of a page share their names, as they do for who types them in one after the other, and all pages
share a process, so that programs are compiled once.
"""

import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from jetspec_jax.cli import command, serving
from jetspec_jax.tree import algorithms
from tests.docs.blocks import ALL, PAGES, ROOT
from tests.events import join, until

#: Blocks that are marked as not run; a new one is to be thought about.
MARKED = 15
#: Appended to commands that decode: the test's own limit.
SHORT = ("--max-tokens", "16")
# What a wheel lacks.
PROGRAMS = re.compile(
    r"python -m (?:bench|train|convert)\b|`make [a-z]|^make [a-z]|\bserve run\b|python examples/",
    re.MULTILINE,
)


def named(block):
    return f"{block.page}:{block.line}"


def test_what_is_not_run_is_counted_and_has_a_reason():
    marked = [block for block in ALL if block.reason]
    assert len(marked) == MARKED
    for block in marked:
        assert block.language == "python" or block.commands, f"{named(block)} has nothing that would run"
    assert sum(block.runs for block in ALL) > len(marked)


def test_calls_that_run_are_plain_calls():
    for block in ALL:
        if block.runs:
            assert all(own.words for own in block.commands), f"mark {named(block)}, or change it"


def test_calls_that_do_not_run_have_options_that_are_known():
    """Also those inside of other commands, and those in the middle of a text."""
    parser = command._parser()
    names = [name for action in parser._actions for name in (action.choices or {}) if action.nargs == "A..."]
    call = re.compile(rf"jetspec-jax ((?:{'|'.join(names)})\b[^'|#`]*)")
    seen = 0
    for page in PAGES:
        for found in call.findall(page.read_text("utf-8").replace("\\\n", " ")):
            words = shlex.split(re.sub(r"\$\w+|\bN\b", "1", found.partition("\n")[0]))
            if words[-1] not in names:  # a call, and not the mention of a command
                parser.parse_args(words)
                seen += 1
    assert seen > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_that_a_wheel_lacks_are_said_to_be_of_a_checkout(page):
    opening, *sections = re.split(r"^(?=## )", page.read_text("utf-8"), flags=re.M)
    for section in sections if "checkout" in opening else [opening, *sections]:
        if found := PROGRAMS.search(section):
            assert "checkout" in section or "checkout" in opening, f"{page.name}: {found[0]}"


class Shell:
    """Runs a page's commands in this process, and keeps its server for the blocks that ask it."""

    def __init__(self, monkeypatch, capsys):
        self._patch, self._capsys, self._stopping = monkeypatch, capsys, []
        self.port, self._thread, self._code = 0, None, []
        # In a process of its own, signals call it.
        monkeypatch.setattr(serving, "on_signals", lambda stopping, *_: self._stopping.append(stopping))

    def run(self, call):
        """Runs a call to its end; of a server, until it listens."""
        if call.words[0] == "serve":
            self._serve(call.words)
            return
        fed = subprocess.run(["sh", "-c", call.feeding], capture_output=True, check=True).stdout
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(fed)))
        short = SHORT if call.words[0] in ("generate", "chat", "tree") else ()
        assert command.main([*call.words, *short]) == 0, self._capsys.readouterr().err
        nothing_said = call.words[0] == "chat" and not fed
        assert bool(self._capsys.readouterr().out) is not nothing_said

    def _serve(self, words):
        self.close()
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        more = ["--port", str(self.port), "--warm-up", "none"]
        self._thread = threading.Thread(target=lambda: self._code.append(command.main([*words, *more])))
        self._thread.start()
        until(self._listens)

    def _listens(self):
        assert self._thread.is_alive(), self._capsys.readouterr().err
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/version").status_code == 200
        return False

    def close(self):
        """Ends the server, if there is one, as a signal does."""
        if self._thread is not None:
            self._stopping.pop()(15)
            join(self._thread)
            assert self._code.pop() == 0
            self._thread = None


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", list(dict.fromkeys(block.page for block in ALL if block.runs)), ids=os.path.basename
)
def test_a_page_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # What a page registers is gone after it.
    monkeypatch.setattr(algorithms, "_KNOWN", dict(algorithms._KNOWN))
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # which a page says is a checkout's
    names, shell = {"__name__": "__main__"}, Shell(monkeypatch, capsys)
    with contextlib.closing(shell):
        for block in ALL:
            if block.page != name or not block.runs:
                continue
            if block.language == "python":
                code = block.code.replace("127.0.0.1:8000", f"127.0.0.1:{shell.port}")
                exec(compile(code, str(ROOT / name), "exec"), names)
            for call in block.commands:
                shell.run(call)
    capsys.readouterr()
