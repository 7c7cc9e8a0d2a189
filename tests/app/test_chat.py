"""``jetspec-jax chat``, on the embedded demo pair: through pipes, and on a terminal of its own."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.cli import chatting
from jetspec_jax.cli import command as cli
from jetspec_jax.demo import DEMO_TARGET
from tests.events import PATIENCE, until, until_it_sleeps

PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    return LLM(budget=1)


class Typed:
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


def test_a_byte_order_mark_is_no_part_of_a_message(chat, llm):
    assert chat("\ufeffdef f(x):\n")[1] == answers(llm, "def f(x):")


def test_commands_forget_instruct_and_end(chat, llm):
    one, other = "import os", "import sys"
    code, out, err = chat(
        f"{one}\n/clear\n/system be brief\n{other}\n/system\n/clear\n/help\n{one}\n/exit\n{one}"
    )
    assert code == 0
    told = ["the system message is set", "there is no system message now", "the conversation is forgotten"]
    assert [err.count(f"jetspec-jax: {each}\n") for each in told] == [1, 1, 2]
    assert out == answers(llm, one) + answers(llm, other, system="be brief") + answers(llm, one)
    assert all(word in err for word in ("/clear", "/system [TEXT]", "/exit"))


@pytest.mark.parametrize("end", ["/exit", "/quit", "exit", " quit "])
def test_words_that_end_a_chat(chat, llm, end):
    assert chat(f"quit it\n{end}\nimport os")[:2] == (0, answers(llm, "quit it"))


def test_the_demo_pair_says_what_it_is(chat):
    line = "jetspec-jax: the demo pair writes Python and little else; a model that chats: "
    for arguments, count in (([], 1), (["demo"], 1), (["--model", str(DEMO_TARGET)], 0)):
        assert chat("/exit", *arguments)[2].count(line) == count


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
    assert err.count("\n") == 2  # the first line is the demo pair's


def test_two_slashes_begin_a_message_with_one(chat, llm):
    assert chat("//usr/bin/x")[1] == answers(llm, "/usr/bin/x")


def test_the_last_answers_take_what_room_is_left(chat, llm):
    """Prompt and answer never exceed the context, or the capacity; then there is advice."""
    ids = llm.encode("<|im_start|>user\ndef<|im_end|>\n<|im_start|>assistant\n")
    code, out, err = chat("def\n", "--max-model-len", str(len(ids) + 3))
    assert code == 0
    assert err.splitlines()[1:] == ["jetspec-jax: cut after 3 tokens"]
    code, out, err = chat("def\n", "--max-model-len", str(len(ids)))
    assert (code, out) == (2, "")
    assert f"the conversation is {len(ids)} tokens of {len(ids)}: /clear forgets it" in err


def test_a_target_without_a_template_is_refused_before_anything_is_read(chat, llm, monkeypatch):
    monkeypatch.setattr(llm.target.tokenizer, "chat_template", None)
    assert chat("def f(x):\n") == (
        2,
        "",
        "jetspec-jax: the target's tokenizer has no chat template: give one by --chat-template FILE or "
        "chat_template=…, or use generate\n",
    )


def test_options_that_a_chat_has_no_use_for_are_not_its(chat):
    for option in (
        *("-n=2", "--logprobs=2", "--data-parallel-size=2"),
        *("--no-add-generation-prompt", "--continue-final-message"),
    ):
        with pytest.raises(SystemExit):
            chat("", option)
    with pytest.raises(SystemExit):
        chat("", "a-model", "a prompt")


class TestInterrupts:
    @pytest.fixture
    def conversation(self, llm):
        """One to which a line was typed that is not answered yet."""
        room = llm.target.config.max_position_embeddings
        own = chatting._Conversation(llm, SamplingParams(max_tokens=400), {}, room, None, stats=False)
        own.state = chatting._State.ANSWERING
        return own

    def test_it_stops_the_answer_and_what_was_begun_counts(self, conversation, monkeypatch, capsys):
        taken = []

        def print_and_stop(*values, **settings):
            if values and values[0] and not taken:
                taken.append(conversation.interrupt(signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    conversation.interrupt(signal.SIGINT)

        monkeypatch.setattr(chatting, "print", print_and_stop, raising=False)
        assert conversation.process("def f(x):")
        assert taken == [None]
        [_, answer] = conversation.messages
        assert answer["role"] == "assistant"
        assert 0 < len(conversation._llm.encode(answer["content"])) < 100

    def test_a_program_in_the_main_thread_is_interrupted_itself(self, conversation, monkeypatch):
        def interrupted(*arguments, **settings):
            raise KeyboardInterrupt

        monkeypatch.setattr(conversation._llm, "stream", interrupted)
        assert conversation.process("def f(x):")
        assert conversation.messages == []

    def test_before_the_first_token_it_stops_the_answer_too(self, conversation, capsys):
        conversation.interrupt(signal.SIGINT)
        assert conversation.process("def f(x):")
        assert conversation.messages == []
        assert capsys.readouterr() == ("\n", "jetspec-jax: stopped\n")

    def test_a_typed_line_is_discarded_until_it_ends(self, conversation, monkeypatch):
        """And from then on an interrupt is meant for the answer: no moment between the two is neither's."""
        typed = iter([KeyboardInterrupt, "a line"])

        def read(_):
            with pytest.raises(KeyboardInterrupt):
                conversation.interrupt(signal.SIGINT)
            if (line := next(typed)) is KeyboardInterrupt:
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr("builtins.input", read)
        assert chatting._read_typed(conversation) == "a line"
        conversation.interrupt(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            conversation.interrupt(signal.SIGINT)

    def test_without_a_terminal_it_ends_the_program_between_two_answers(self, conversation, monkeypatch):
        def read():
            with pytest.raises(KeyboardInterrupt):
                conversation.interrupt(signal.SIGINT)
            return b"a line\n"

        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(readline=read)))
        assert chatting._read_line(conversation) == "a line"
        conversation.interrupt(signal.SIGINT)


# An answer of this program begins and goes on until it is stopped, which none of a model's does.
ENDLESS = """
import sys
import threading

from jetspec_jax import LLM
from jetspec_jax.cli import main


class Endless:
    completion = None

    def __init__(self, ids, params):
        self.closed = threading.Event()
        self.close = self.closed.set

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __iter__(self):
        yield "it begins"
        self.closed.wait()


LLM.stream = Endless
sys.exit(main())
"""


class Terminal:
    """The command in a process of its own, on a terminal."""

    def __init__(self):
        self.file, theirs = pty.openpty()
        files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        command = [sys.executable, "-c", ENDLESS, "chat"]
        self.process = subprocess.Popen(command, **files, start_new_session=True)
        os.close(theirs)
        self.text = ""

    def wait_for(self, text):
        """Reads until a text has come, which is forgotten then, with all before it."""

        def comes():
            if text not in self.text and select.select([self.file], [], [], 0)[0]:
                self.text += os.read(self.file, 4096).decode(errors="replace")
            return text in self.text

        until(comes, lambda: self.text)
        self.text = self.text.partition(text)[2]

    def type(self, text):
        os.write(self.file, text.encode())

    def interrupt(self):
        """Sends what Ctrl-C sends, once all that was typed before has been read: Python notices a signal that
        comes just before it waits only when something else wakes it up.

        Not the key itself, which kernels were seen to lose where it came right behind others.
        """
        until_it_sleeps(self.process)
        self.process.send_signal(signal.SIGINT)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")  # one that is sent nothing but the text
    monkeypatch.setenv("INPUTRC", os.devnull)
    own = Terminal()
    yield own
    own.process.kill()
    own.process.wait()
    os.close(own.file)


def test_on_a_terminal_an_interrupt_stops_the_answer_and_not_the_program(terminal):
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.interrupt()  # forgets it
    terminal.wait_for("\n> ")
    terminal.type("/nonsense\n")
    terminal.wait_for("there is no command '/nonsense'")
    terminal.wait_for("> ")
    terminal.type("def f(x):\n")
    terminal.wait_for("it begins")
    terminal.interrupt()
    terminal.wait_for("jetspec-jax: stopped")
    terminal.wait_for("> ")
    terminal.interrupt()
    terminal.wait_for("\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0


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
