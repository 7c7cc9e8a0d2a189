"""What the pages show runs: every Python block and every command that one CPU can run.

The blocks of a page share their names, as they do for who types them in one after the other, and all pages
share a process, so that programs are compiled once.
"""

import collections
import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading

import httpx
import jax
import pytest

from jetspec_jax.cli import serving
from jetspec_jax.llm import PLAIN_NOTICE
from jetspec_jax.tree import algorithms
from tests.docs.blocks import ALL, PAGES, ROOT
from tests.docs.commands import (
    IN_BLOCKS,
    IN_PROSE,
    MAKE,
    NOT_RUN,
    PROGRAMS,
    SHORT,
    block_parts,
    error_of,
    is_to_run,
)
from tests.events import join, until
from tests.loading.gguf_files import CONFIGS, random_tensors, write_gguf
from tests.loading.test_gguf_tokenizer import byte_level

#: Blocks that are marked as not run, and other commands that are not; a new one is to be thought about.
MARKED, LEFT_OUT = 17, 109
# What a wheel lacks.
PROGRAMS_OF_A_CHECKOUT = re.compile(
    r"python -m (?:bench|train|convert)\b|`make [a-z]|^make [a-z]|\bserve run\b|python examples/",
    re.MULTILINE,
)


def test_trees_of_first_examples_and_of_the_hint_are_small():
    """Readers run them on a CPU, where large trees are slower than plain decoding."""
    first = {
        "README.md",
        *(f"docs/{name}.md" for name in ["command-line", "playground", "sampling", "serving", "usage"]),
    }
    texts = [block.code for block in ALL if block.page in first]
    texts += [PLAIN_NOTICE, *re.findall(r"LLM\(.*", (ROOT / "examples/generate.py").read_text())]
    budgets = [int(size) for text in texts for size in re.findall(r"budget[= ](\d+)\b", text)]
    assert len(budgets) > 10
    assert max(budgets) <= 16


def test_what_is_not_run_is_counted_and_has_a_reason():
    marked = [block for block in ALL if block.reason]
    for block in marked:
        assert block.language == "python" or list(block_parts(block)), (
            f"{block.page}:{block.line} has nothing to run"
        )
    inside = {command.where for block in marked for command in block_parts(block)}
    left_out = [one for one in (*IN_BLOCKS, *IN_PROSE) if one.reason and one.where not in inside]
    assert (len(marked), len(left_out)) == (MARKED, LEFT_OUT)
    found = collections.Counter(one.reason for one in left_out)
    assert not {*NOT_RUN.values()} - {*found}, "a reason that no command has"
    assert sum(map(is_to_run, IN_BLOCKS)) > 30


def test_commands_that_run_are_plain_calls():
    for command in filter(is_to_run, IN_BLOCKS):
        assert command.plain, f"mark {command.where}, or change it"


@pytest.mark.parametrize(
    "command", [*IN_BLOCKS, *IN_PROSE], ids=lambda command: f"{command.where} {command.name}"
)
def test_commands_have_options_that_their_programs_know(command):
    """Also those that are not run, inside of other commands, and in the middle of a text."""
    assert error_of(command) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_that_a_wheel_lacks_are_said_to_be_of_a_checkout(page):
    opening, *sections = re.split(r"^(?=## )", page.read_text("utf-8"), flags=re.M)
    for section in sections if "checkout" in opening else [opening, *sections]:
        if found := PROGRAMS_OF_A_CHECKOUT.search(section):
            assert "checkout" in section or "checkout" in opening, f"{page.name}: {found[0]}"


class Shell:
    """Runs a page's commands in this process, and keeps its server for the blocks that ask it."""

    def __init__(self, monkeypatch, capsys):
        self._patch, self._capsys, self._stopping = monkeypatch, capsys, []
        self.port, self._thread, self._code = 0, None, []
        # In a process of its own, signals call it.
        monkeypatch.setattr(serving, "on_signals", lambda stopping, *_: self._stopping.append(stopping))

    def run(self, part):
        """Runs a command to its end, of a server until it listens; or writes files for the commands."""
        if isinstance(part, str):
            path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
            subprocess.run(["sh", "-ec", part], check=True, env=os.environ | {"PATH": path})
        elif part.program == MAKE:
            self._make(part)
        elif part.name == "jetspec-jax serve":
            self._serve(["demo" if word == "smollm2" else word for word in part.words])
        else:
            self._call(part)

    def _call(self, part):
        fed = subprocess.run(["sh", "-c", part.feeding], capture_output=True, check=True).stdout
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(fed)))
        words = [*part.words, *SHORT.get(part.name, "").split()]
        trains = part.program == "python -m train"
        # The larger pair generates, once.
        if part.name in ("jetspec-jax chat", "jetspec-jax tree"):
            words = ["demo" if word == "smollm2" else word for word in words]
        if trains and "--max-tokens" in words:  # not where nothing is generated
            words += ["--max-tokens", "8"]
        with pytest.MonkeyPatch.context() as patch:
            if trains:  # on all devices; of a CPU there is one
                first = jax.devices()[:1]
                patch.setattr(jax, "devices", lambda *_: first)
                patch.setattr(jax, "device_count", lambda: 1)
            code = PROGRAMS[part.program](words)
        said = self._capsys.readouterr()
        # 3: the head did not improve, in so few steps.
        assert code == 0 or (trains and code == 3), f"{part.where}: {said.err}"
        nothing_said = part.name == "jetspec-jax chat" and not fed
        assert bool(said.out) is not nothing_said

    def _make(self, part):
        stamps = [word for name in ("test", "docs") for word in ("-o", f"{sys.prefix}/.installed-{name}")]
        words = [*stamps, f"VENV={sys.prefix}", *part.words, *SHORT.get(part.name, "").split()]
        done = subprocess.run([MAKE, "-C", str(ROOT), *words], capture_output=True, text=True)
        assert done.returncode == 0, f"{part.where}: {done.stderr}"

    def _serve(self, words):
        self.close()
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        more = ["--port", str(self.port), "--warm-up", "none"]
        serve = PROGRAMS["jetspec-jax"]
        self._thread = threading.Thread(target=lambda: self._code.append(serve([*words, *more])))
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


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with what pages say is there: parts of a checkout, and files of a reader's own."""
    for name in ("examples", "bench", "jetspec_jax"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "bench/results/demo/profile.json", tmp_path)
    lines = [json.dumps({"prompt": f"def f{number}(x):"}) + "\n" for number in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    raw, metadata = (
        {**CONFIGS["llama"], "vocab_size": 300},
        {f"tokenizer.{k}": v for k, v in byte_level().items()},
    )
    for name in ("model.gguf", "x.gguf"):
        write_gguf(tmp_path / name, raw, random_tensors(raw), metadata=metadata)
    monkeypatch.chdir(tmp_path)
    # What a page registers is gone after it.
    monkeypatch.setattr(algorithms, "_KNOWN", dict(algorithms._KNOWN))
    return tmp_path


RUN = [
    block for block in ALL if not block.reason and (block.language == "python" or list(block_parts(block)))
]
IN_SENTENCES = [command for command in IN_PROSE if is_to_run(command)]
#: Pages with something to run.
TO_RUN = dict.fromkeys([*(own.page for own in RUN), *(own.where.partition(":")[0] for own in IN_SENTENCES)])


@pytest.mark.wide
@pytest.mark.parametrize("name", TO_RUN)
def test_a_page_runs(name, place, monkeypatch, capsys):
    names, shell = {"__name__": "__main__"}, Shell(monkeypatch, capsys)
    with contextlib.closing(shell):
        for block in RUN:
            if block.page != name:
                continue
            if block.language == "python":
                code = block.code.replace("127.0.0.1:8000", f"127.0.0.1:{shell.port}")
                exec(compile(code, str(ROOT / name), "exec"), names)
            for part in block_parts(block):
                if isinstance(part, str) or is_to_run(part):
                    shell.run(part)
        for command in IN_SENTENCES:
            if command.where.startswith(f"{name}:"):
                for folder in ("FOLDER", "DIR"):  # another one each time
                    shutil.rmtree(place / folder, ignore_errors=True)
                shell.run(command)
    capsys.readouterr()
