"""The prompts of a command line: arguments, standard input, files, or token ids."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetspec_jax.arguments import decode_utf8
from jetspec_jax.checkpoint.chat_template import Chat, Ending, check_template_arguments, read_chats
from jetspec_jax.cli.options import CHAT
from jetspec_jax.engine.prompts import EncodedPrompt, encode_chat, naming, read_prompt
from jetspec_jax.llm import LLM

_LINE = 'a line is a string, or an object with "prompt", "text", "prompt_token_ids" or "messages" alone'


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt in one of three forms, and its name in a heading."""

    name: str
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Chat | None = None


def read_prompts(arguments: argparse.Namespace) -> list[GivenPrompt]:
    """Reads the prompts of a command line, by default from standard input."""
    given = {
        "PROMPT": arguments.prompt,
        "--prompt-file": arguments.prompt_file,
        "--token-ids": arguments.token_ids,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"give one of {', '.join(given)}, not {' and '.join(named)}")
    if arguments.token_ids is not None:
        prompts = [GivenPrompt("prompt", token_ids=arguments.token_ids)]
    elif arguments.prompt_file is not None:
        prompts = [prompt for path in arguments.prompt_file for prompt in _read_file(path)]
        if not prompts:
            raise ValueError(f"there are no prompts in {', '.join(map(str, arguments.prompt_file))}")
    elif arguments.prompt is not None:
        prompts = [GivenPrompt("prompt", arguments.prompt)]
    else:
        if sys.stdin.isatty():
            print("jetspec-jax: the prompt is read from standard input; Ctrl-D ends it", file=sys.stderr)
        prompts = [GivenPrompt("standard input", decode_utf8(sys.stdin.buffer.read(), "standard input"))]
    if arguments.chat:
        prompts = [_as_chat(prompt) for prompt in prompts]
    if CHAT.given(arguments) and not any(prompt.messages for prompt in prompts):
        names = " and ".join(option.name for option in CHAT.options)
        raise ValueError(f"{names} are about chats; give --chat")
    return prompts


def encode(llm: LLM, prompt: GivenPrompt, arguments: argparse.Namespace) -> EncodedPrompt:
    """A prompt as tokens."""
    with naming("" if prompt.name == "prompt" else prompt.name):
        if prompt.messages is not None:
            [chat], given = read_chats(prompt.messages), CHAT.given(arguments)
            settings = given.pop("chat_template_kwargs", {})
            check_template_arguments(settings)
            return encode_chat(llm.target, chat, settings, Ending.of(**given))
        plain = prompt.text if prompt.token_ids is None else prompt.token_ids
        assert plain is not None, "a prompt has one of its three forms"
        return read_prompt(llm.target, plain)


def _read_file(path: Path) -> Iterator[GivenPrompt]:
    text = decode_utf8(path.read_bytes(), str(path))
    if path.suffix != ".jsonl":
        yield GivenPrompt(str(path), text)
        return
    # Not `splitlines`: a JSON string may contain other characters at which that splits.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parse_line(line, f"{path}:{number}")


def _parse_line(line: str, where: str) -> GivenPrompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    match [value] if isinstance(value, str) else list(value.items()) if isinstance(value, dict) else []:
        case [str() as text] | [("prompt" | "text", str() as text)]:
            return GivenPrompt(where, text)
        case [("prompt_token_ids", [*ids])] if all(type(token) is int for token in ids):
            return GivenPrompt(where, token_ids=ids)
        case [("messages", [*messages])] if messages and all(
            isinstance(message, dict) for message in messages
        ):
            return GivenPrompt(where, messages=messages)
    raise ValueError(f"{where}: {_LINE}")


def _as_chat(prompt: GivenPrompt) -> GivenPrompt:
    if prompt.token_ids is not None:
        raise ValueError("--chat needs a text: it cannot be used with token ids")
    if prompt.messages is not None:
        return prompt
    return GivenPrompt(prompt.name, messages=[{"role": "user", "content": prompt.text}])
