"""``jetspec-jax chat``: a conversation in a terminal, or through pipes with a message per line."""

import argparse
import contextlib
import enum
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from jetspec_jax.arguments import decode_utf8, printable
from jetspec_jax.checkpoint.chat_template import check_template_arguments, read_chats
from jetspec_jax.checkpoint.gguf.smollm2 import INSTALL
from jetspec_jax.cli.figures import figures
from jetspec_jax.cli.options import ALGORITHM, CHAT, MODELS, ROUTING, SAMPLING, STRUCTURED, add_target_place
from jetspec_jax.cli.process import in_main_thread, on_signals
from jetspec_jax.cli.screen import on_screen
from jetspec_jax.cli.settings import load_llm, sampling_params
from jetspec_jax.demo import DEMO
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.engines import Stream
from jetspec_jax.engine.prompts import EncodedPrompt, encode_chat, templated
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.smollm2 import SMOLLM2

#: The default for the most tokens of an answer; completions of prompts have a smaller default.
ANSWER_TOKENS = 512
_COMMANDS = {
    "/clear": "forget the conversation",
    "/system [TEXT]": "set the system message for further answers; without a text, remove it",
    "/help": "show these lines",
    "/exit": "end the program, as /quit, a line of quit or exit alone, and the end of the input do",
}
_ENDS = ("/exit", "/quit", "exit", "quit")
_DEMO = (
    f"the demo pair writes Python and little else; a model that chats: jetspec-jax chat {SMOLLM2} ({INSTALL})"
)
_HELP = "\n".join(f"{name:16}{does}" for name, does in _COMMANDS.items())
_LEFT_OUT = {
    SAMPLING: ("n", "logprobs", "prompt_logprobs"),
    CHAT: ("add_generation_prompt", "continue_final_message"),
    MODELS: ("data_parallel_size",),  # one answer at a time can only use one copy
}


def add_chat_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``jetspec-jax``."""
    parser = commands.add_parser("chat", help="talk to a model", description=_chat.__doc__)
    parser.set_defaults(run=_chat)
    add_target_place(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    for group in (SAMPLING, CHAT, STRUCTURED, MODELS, ALGORITHM, ROUTING):
        fields = [option.field for option in group.options if option.field not in _LEFT_OUT.get(group, ())]
        group.add(parser, fields, max_tokens=ANSWER_TOKENS)
    parser.add_argument(
        "--stats", action="store_true", help="print statistics of each answer to standard error"
    )


def _chat(arguments: argparse.Namespace) -> int:
    """Answers each typed line in the context of the whole conversation; /help lists the commands.

    Ctrl-C stops an answer, a second Ctrl-C the program. Without a terminal each line of standard input is a
    message, and only the answers are printed.
    """
    params = sampling_params(arguments)
    settings = CHAT.given(arguments).get("chat_template_kwargs", {})
    check_template_arguments(settings)
    llm = load_llm(arguments)
    templated(llm.target)
    if MODELS.given(arguments).get("target", DEMO) == DEMO:
        _tell(_DEMO)
    limit = min(llm.target.config.max_position_embeddings, arguments.max_model_len or sys.maxsize)
    chat = _Conversation(llm, params, settings, limit, arguments.system, stats=arguments.stats)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # missing in some builds of Python
            import readline  # noqa: F401  (gives `input` line editing and a history)
        print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
    on_signals(chat.interrupt, signal.SIGINT)
    while (line := _read_typed(chat) if terminal else _read_line(chat)) is not None:
        try:
            if not chat.process(line):
                break
        except (ValueError, DeviceMemoryError) as error:
            if not terminal:
                raise
            _tell(printable(str(error)))
    return 0


def _tell(message: str) -> None:
    print(f"jetspec-jax: {message}", file=sys.stderr)


class _State(enum.Enum):
    """The state of the chat, which decides the effect of an interrupt."""

    READING = "an interrupt discards what was typed; without a terminal it ends the program"
    ANSWERING = "an interrupt stops the answer to the last line, also before its first token"
    STOPPING = "the answer is being stopped, and another interrupt ends the program"


def _read_line(chat: "_Conversation") -> str | None:
    """The next line of standard input, without its line ending; None at the end of the input."""
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
            # Runs in the main thread, like signal handlers, so no interrupt comes in between.
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
    """A conversation of at most ``limit`` tokens; readers of lines and interrupts set its `state`."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        settings: dict[str, Any],
        limit: int,
        system: str | None,
        *,
        stats: bool,
    ):
        self.messages: list[dict[str, str]] = []
        self.system = system
        self._llm, self._params, self._settings = llm, params, settings
        self._limit, self._stats = limit, stats
        self._stream: Stream | None = None
        self.state = _State.READING

    def process(self, line: str) -> bool:
        """Runs a command or answers a message; returns whether the conversation continues."""
        word, _, rest = line.strip().partition(" ")
        if line.strip() in _ENDS:
            return False
        if not word.startswith("/") or word.startswith("//"):
            if word:
                self._say(line[1:] if line.startswith("//") else line)
        elif word == "/system":
            self.system = rest.strip() or None
            _tell("there is no system message now" if self.system is None else "the system message is set")
        elif rest or word not in _COMMANDS:
            raise ValueError(
                f"there is no command {line.strip()!r}, see /help; a message that begins with / needs two"
            )
        elif word == "/clear":
            self.messages.clear()
            _tell("the conversation is forgotten")
        elif word == "/help":
            print(_HELP, file=sys.stderr)
        return True

    def interrupt(self, _: int) -> None:
        """Stops the answer, or raises KeyboardInterrupt; may be called from any thread."""
        if self.state is not _State.ANSWERING:
            raise KeyboardInterrupt
        self.state = _State.STOPPING
        if (stream := self._stream) is not None:
            stream.close()

    def _say(self, text: str) -> None:
        """Streams the answer to a message; a stopped answer stays in the conversation as far as it came."""
        message = {"role": "user", "content": text}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        [chat] = read_chats([*system, *self.messages, message])
        prompt = encode_chat(self._llm.target, chat, self._settings)
        if (room := self._limit - (count := len(prompt.ids))) < 1:
            raise ValueError(f"the conversation is {count} tokens of {self._limit}: /clear forgets it")
        most = self._params.max_tokens
        params = replace(self._params, max_tokens=room if most is None else min(most, room))
        answer = self._answer(prompt, params)
        if answer is not None:
            self.messages += [message, {"role": "assistant", "content": answer}]

    def _answer(self, prompt: EncodedPrompt, params: SamplingParams) -> str | None:
        """Streams an answer, and returns it; None if it was stopped before its first token."""
        pieces, completion, started = [], None, time.perf_counter()
        try:
            with self._llm.stream(prompt, params) as stream:
                self._stream = stream
                if self.state is _State.STOPPING:
                    stream.close()
                for piece in stream:
                    print(on_screen(piece), end="", flush=True)
                    pieces.append(piece)
                completion = stream.completion
        except KeyboardInterrupt:
            pass  # raised only if the program runs in the main thread; otherwise the stream was closed
        finally:
            self._stream = None
        print(flush=True)
        if completion is None:
            _tell("stopped")
        elif self._stats:
            print(figures([completion], time.perf_counter() - started), file=sys.stderr)
        elif completion.finish_reason == "length":
            _tell(f"cut after {params.max_tokens} tokens")
        return "".join(pieces) if pieces or completion else None
