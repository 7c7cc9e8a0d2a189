"""``jetspec-jax chat``, on the embedded demo pair: through pipes, and on a terminal of its own."""

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.cli import chatting
from jetspec_jax.cli import command as cli
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.llm import PLAIN_NOTICE

PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    return LLM(budget=1)


class Typed:
    """Standard input that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def chat(monkeypatch, capsys, llm):
    """Runs the command with some lines; returns its code and what it printed."""
    monkeypatch.setattr(chatting, "load_llm", lambda arguments: llm)

    def run(lines, *arguments):
        if not isinstance(lines, Typed):
            lines = io.TextIOWrapper(io.BytesIO(lines if isinstance(lines, bytes) else lines.encode()))
        monkeypatch.setattr(sys, "stdin", lines)
        code = cli.main(["chat", "--max-tokens", "12", *arguments])
        return code, *capsys.readouterr()

    return run


def said(role, content):
    return {"role": role, "content": content}


def answers(llm, *lines, system=None):
    """The answers to some messages in their turn, each with all that was said before."""
    messages = [] if system is None else [said("system", system)]
    for line in lines:
        messages.append(said("user", line))
        [completion] = llm.chat(messages, PARAMS, use_tqdm=False)
        messages.append(said("assistant", completion.text))
    return "".join(f"{own['content']}\n" for own in messages if own["role"] == "assistant")


def test_each_line_is_answered_with_all_that_was_said_before(chat, llm):
    code, out, err = chat("def f(x):\n\nfor x in y:\r\nwhy?")
    assert code == 0
    assert out == answers(llm, "def f(x):", "for x in y:", "why?")
    assert "jetspec-jax: cut after 12 tokens\n" in err
    assert answers(llm, "why?") not in out


def test_commands_forget_instruct_and_end(chat, llm):
    one, other = "import os", "import sys"
    code, out, err = chat(
        f"{one}\n/clear\n/system be brief\n{other}\n/system\n/clear\n/help\n{one}\n/exit\n{one}"
    )
    assert code == 0
    assert out == answers(llm, one) + answers(llm, other, system="be brief") + answers(llm, one)
    assert all(word in err for word in ("/clear", "/system [TEXT]", "/exit"))


def test_a_system_message_may_come_from_the_command_line(chat, llm):
    assert chat("def f(x):", "--system", "be brief")[1] == answers(llm, "def f(x):", system="be brief")


def test_figures_of_each_answer(chat):
    _, _, err = chat("a\nb\n", "--stats")
    assert err.count("12 tokens in 12 plain steps; ") == 2
    assert "cut" not in err
    assert "compiling" not in err


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            "/usr/bin/x\n",
            "a message that begins with / needs two",
        ),
        ("/exit now\n", "there is no command '/exit now'"),
        (b"\xff\n", "standard input is no UTF-8 text"),
        ("x" * 5000, " tokens of 2048: /clear forgets it"),
    ],
)
def test_a_line_that_is_no_message_ends_a_chat_through_pipes(chat, lines, problem):
    code, out, err = chat(lines)
    assert (code, out) == (2, "")
    assert problem in err
    assert err.count("\n") == 1


def test_two_slashes_begin_a_message_with_one(chat, llm):
    assert chat("//usr/bin/x")[1] == answers(llm, "/usr/bin/x")


def test_the_last_answers_take_what_room_is_left(chat, llm):
    """Prompt and answer never exceed the context, or the capacity; then there is advice."""
    ids = llm.encode("<|im_start|>user\ndef<|im_end|>\n<|im_start|>assistant\n")
    code, out, err = chat("def\n", "--capacity", str(len(ids) + 3))
    assert code == 0
    assert err == "jetspec-jax: cut after 3 tokens\n"
    code, out, err = chat("def\n", "--capacity", str(len(ids)))
    assert (code, out) == (2, "")
    assert f"the conversation is {len(ids)} tokens of {len(ids)}: /clear forgets it" in err


def test_a_target_without_a_template_is_refused_before_anything_is_read(chat, llm, monkeypatch):
    monkeypatch.setattr(llm.target.tokenizer, "chat_template", None)
    assert chat("def f(x):\n") == (
        2,
        "",
        "jetspec-jax: the target's tokenizer has no chat template; use generate\n",
    )


def test_options_that_a_chat_has_no_use_for_are_not_its(chat):
    for option in ("-n=2", "--logprobs=2", "--data-parallel=2", "--no-add-generation-prompt"):
        with pytest.raises(SystemExit):
            chat("", option)
    with pytest.raises(SystemExit):
        chat("", "a prompt")


class TestInterrupts:
    """What an interrupt does in the middle of an answer."""

    @pytest.fixture
    def conversation(self, llm):
        room = llm.target.config.max_position_embeddings
        return chatting._Conversation(llm, SamplingParams(max_tokens=400), {}, {}, room, None, stats=False)

    def test_it_stops_the_answer_and_what_was_begun_counts(self, conversation, monkeypatch, capsys):
        taken = []

        def print_and_stop(*values, **settings):
            if values and values[0] and not taken:
                taken.append(conversation.interrupt(signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    conversation.interrupt(signal.SIGINT)

        monkeypatch.setattr(chatting, "print", print_and_stop, raising=False)
        assert conversation.take("def f(x):")
        assert taken == [None]
        [_, answer] = conversation.messages
        assert answer["role"] == "assistant"
        assert 0 < len(conversation._llm.encode(answer["content"])) < 100

    def test_a_program_in_the_main_thread_is_interrupted_itself(self, conversation, monkeypatch):
        def interrupted(*arguments, **settings):
            raise KeyboardInterrupt

        monkeypatch.setattr(conversation._llm, "stream", interrupted)
        assert conversation.take("def f(x):")
        assert conversation.messages == []

    def test_without_an_answer_it_is_one(self, conversation):
        with pytest.raises(KeyboardInterrupt):
            conversation.interrupt(signal.SIGINT)


class Terminal:
    """The command in a process of its own, on a terminal."""

    def __init__(self, *arguments):
        self.file, theirs = pty.openpty()
        command = [sys.executable, "-m", "jetspec_jax", "chat", *arguments]
        files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self.process = subprocess.Popen(command, **files, start_new_session=True)
        os.close(theirs)
        self.text = ""

    def wait_for(self, text, seconds=60.0):
        """Reads until a text has come, and returns what came before it."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} does not come: {self.text!r}"
            if select.select([self.file], [], [], 0.1)[0]:
                self.text += os.read(self.file, 4096).decode(errors="replace")
        before, _, self.text = self.text.partition(text)
        return before

    def type(self, text):
        os.write(self.file, text.encode())

    def interrupt(self, text, seconds=2.0):
        """Sends what Ctrl-C sends until a text comes: readline misses one before it waits for keys.

        Not the key itself, which kernels were seen to lose where it came right behind others.
        """
        for _ in range(30):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                return self.wait_for(text, seconds)
        raise AssertionError(f"{text!r} does not come after an interrupt: {self.text!r}")


@pytest.fixture
def terminal():
    own = Terminal("--max-tokens", "1900")
    yield own
    own.process.kill()
    own.process.wait()
    os.close(own.file)


def test_on_a_terminal_an_interrupt_stops_the_answer_and_not_the_program(terminal):
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.interrupt("\n> ")  # forgets it
    terminal.type("/nonsense\n")
    terminal.wait_for("there is no command '/nonsense'")
    terminal.wait_for("> ")
    terminal.type("def f(x):\n")
    terminal.wait_for(PLAIN_NOTICE)
    terminal.wait_for("\n    ")  # the answer has begun
    terminal.interrupt("jetspec-jax: stopped", 60.0)
    terminal.wait_for("> ")
    terminal.interrupt("\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_on_a_terminal_what_cannot_be_answered_is_said_and_the_chat_goes_on(chat, monkeypatch, llm):
    typed = iter(["x" * 5000, "def f(x):"])

    def read(prompt):
        assert prompt == "> "
        if (line := next(typed, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = chat(Typed())
    assert code == 0
    assert out == answers(llm, "def f(x):") + "\n"
    assert " tokens of 2048: /clear forgets it" in err


def test_the_demo_has_a_template():
    assert "<|im_start|>" in (DEMO_TARGET / "tokenizer_config.json").read_text()
