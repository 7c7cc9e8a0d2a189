"""``jetspec-jax chat``: a conversation in a terminal, or line by line through pipes."""

import argparse
import contextlib
import enum
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from jetspec_jax.arguments import printable
from jetspec_jax.checkpoint.chat_template import check_template_arguments, read_chats
from jetspec_jax.cli.figures import figures
from jetspec_jax.cli.options import ALGORITHM, CHAT, MODELS, ROUTING, SAMPLING, STRUCTURED, add_target_place
from jetspec_jax.cli.process import hear, in_main_thread
from jetspec_jax.cli.prompts import decode_utf8
from jetspec_jax.cli.screen import on_screen
from jetspec_jax.cli.settings import load_llm, sampling_params
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.prompts import encode_chat, templated
from jetspec_jax.engine.stream import Stream
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams

#: Most tokens of an answer, where nothing else is said; what completes a prompt is usually shorter.
ANSWER_TOKENS = 512
_COMMANDS = {
    "/clear": "forget what was said",
    "/system [TEXT]": "what the answers are to heed, from now on; without a text, nothing",
    "/help": "these lines",
    "/exit": "end, as does the end of the input",
}
_HELP = "\n".join(f"{name:16}{does}" for name, does in _COMMANDS.items())
_NOT_ASKED = {
    SAMPLING: ("n", "logprobs", "prompt_logprobs"),
    CHAT: ("add_generation_prompt", "continue_final_message"),
    MODELS: ("data_parallel_size",),  # one answer at a time has a use for one copy alone
}


def add_chat_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``jetspec-jax``."""
    parser = commands.add_parser("chat", help="talk to a model", description=_chat.__doc__)
    parser.set_defaults(run=_chat)
    add_target_place(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the answers are to heed")
    for group in (SAMPLING, CHAT, STRUCTURED, MODELS, ALGORITHM, ROUTING):
        asked = [option.field for option in group.options if option.field not in _NOT_ASKED.get(group, ())]
        group.add(parser, asked, max_tokens=ANSWER_TOKENS)
    parser.add_argument("--stats", action="store_true", help="figures of each answer, to standard error")


def _chat(arguments: argparse.Namespace) -> int:
    """Answers what is typed, a line at a time, with all that was said before; /help lists its commands.

    Ctrl-C stops an answer, a second one the program. Without a terminal each line of standard input is a
    message, and the answers are what is printed.
    """
    params = sampling_params(arguments)
    settings = CHAT.given(arguments).get("chat_template_kwargs", {})
    check_template_arguments(settings)
    llm = load_llm(arguments)
    templated(llm.target)
    hints = {key: value for key in ("task", "mode") if (value := getattr(arguments, key)) is not None}
    limit = min(llm.target.config.max_position_embeddings, arguments.max_model_len or sys.maxsize)
    chat = _Conversation(llm, params, settings, hints, limit, arguments.system, stats=arguments.stats)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # some Pythons have none
            import readline  # noqa: F401  (from then on `input` edits lines and knows earlier ones)
        print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
    hear(chat.interrupt, signal.SIGINT)
    while (line := _read_typed(chat) if terminal else _read_line(chat)) is not None:
        try:
            if not chat.take(line):
                break
        except (ValueError, DeviceMemoryError) as error:
            if not terminal:
                raise
            print(f"jetspec-jax: {printable(str(error))}", file=sys.stderr)
    return 0


class _State(enum.Enum):
    """What the chat does, which decides what an interrupt does."""

    READING = "an interrupt discards what was typed; without a terminal it ends the program"
    ANSWERING = "an interrupt stops the answer to the last line, also before its first token"
    STOPPING = "the answer is being stopped, and another interrupt ends the program"


def _read_line(chat: "_Conversation") -> str | None:
    """The next line of standard input, without its end; None at the end of the input."""
    chat.state = _State.READING
    line = sys.stdin.buffer.readline()
    chat.state = _State.ANSWERING
    return decode_utf8(line, "standard input").removesuffix("\n").removesuffix("\r") if line else None


def _read_typed(chat: "_Conversation") -> str | None:
    """The next line from a terminal; an interrupt discards what was typed and prompts again."""

    def read() -> str:
        try:
            chat.state = _State.READING
            return input("> ")
        finally:
            # In the main thread, as signal handlers are: each interrupt comes before this or after it.
            chat.state = _State.ANSWERING

    while True:
        try:
            return in_main_thread(read)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


class _Conversation:
    """What was said, and how it goes on.

    Attributes:
        messages: All of it but the system's.
        system: What the answers are to heed.
        state: Set by whoever reads the lines, and by an interrupt.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        settings: dict[str, Any],
        hints: dict[str, str],
        limit: int,
        system: str | None,
        *,
        stats: bool,
    ):
        """A conversation that has not begun; ``limit`` is the tokens that it may have."""
        self.messages: list[dict[str, str]] = []
        self.system = system
        self._llm, self._params, self._settings = llm, params, settings
        self._hints, self._limit, self._stats = hints, limit, stats
        self._stream: Stream | None = None
        self.state = _State.READING

    def take(self, line: str) -> bool:
        """Does what a line says, which may be a message; returns whether the conversation goes on.

        Raises:
            ValueError: It is an unknown command, or cannot be answered; nothing was said then.
        """
        word, _, rest = line.strip().partition(" ")
        if not word.startswith("/") or word.startswith("//"):
            if word:
                self._say(line[1:] if line.startswith("//") else line)
        elif word == "/system":
            self.system = rest.strip() or None
        elif rest or word not in _COMMANDS:
            raise ValueError(
                f"there is no command {line.strip()!r}, see /help; a message that begins with / needs two"
            )
        elif word == "/clear":
            self.messages.clear()
        elif word == "/help":
            print(_HELP, file=sys.stderr)
        return word != "/exit"

    def interrupt(self, _: int) -> None:
        """Stops the answer, from any thread.

        Raises:
            KeyboardInterrupt: There is no answer to stop, or it is being stopped already.
        """
        if self.state is not _State.ANSWERING:
            raise KeyboardInterrupt
        self.state = _State.STOPPING
        if (stream := self._stream) is not None:
            stream.close()

    def _say(self, text: str) -> None:
        """Prints the answer to a message as it comes; what was begun counts as said, if it was stopped."""
        asked = {"role": "user", "content": text}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        [chat] = read_chats([*system, *self.messages, asked])
        ids = encode_chat(self._llm.target, chat, self._settings).ids
        if (room := self._limit - len(ids)) < 1:
            raise ValueError(f"the conversation is {len(ids)} tokens of {self._limit}: /clear forgets it")
        most = self._params.max_tokens
        params = replace(self._params, max_tokens=room if most is None else min(most, room))
        answer = self._answer(ids.tolist(), params, self._hints or {"text": text})
        if answer is not None:
            self.messages += [asked, {"role": "assistant", "content": answer}]

    def _answer(self, ids: list[int], params: SamplingParams, hints: dict[str, str]) -> str | None:
        """Prints an answer, and returns it; None if it was stopped before it began."""
        pieces, completion, started = [], None, time.perf_counter()
        try:
            with self._llm.stream(ids, params, routing=hints) as stream:
                self._stream = stream
                if self.state is _State.STOPPING:
                    stream.close()
                for piece in stream:
                    print(on_screen(piece), end="", flush=True)
                    pieces.append(piece)
                completion = stream.completion
        except KeyboardInterrupt:
            pass  # of a program in the main thread: in any other the stream was closed
        finally:
            self._stream = None
        print(flush=True)
        if completion is None:
            print("jetspec-jax: stopped", file=sys.stderr)
        elif self._stats:
            print(figures([completion], time.perf_counter() - started), file=sys.stderr)
        elif completion.finish_reason == "length":
            print(f"jetspec-jax: cut after {params.max_tokens} tokens", file=sys.stderr)
        return "".join(pieces) if pieces or completion else None
