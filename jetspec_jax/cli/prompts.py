"""The prompts of a command line: words, standard input, files, or token ids."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.chat_template import check_template_arguments, read_chats, render_chat
from jetspec_jax.cli.options import parse_option
from jetspec_jax.engine.prompts import naming
from jetspec_jax.llm import LLM
from jetspec_jax.tree import Hints

_LINE = 'a line is a string, or an object with "prompt", "text", "prompt_token_ids" or "messages" alone'


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt as it was given: one of its three forms.

    Attributes:
        name: What a heading calls it.
        text: A text to continue.
        token_ids: A prompt that is encoded already.
        messages: A conversation to answer.
    """

    name: str
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None

    @property
    def last_words(self) -> str | None:
        """Its text, or what was said last; None of token ids."""
        if self.messages is None:
            return self.text
        said = self.messages[-1].get("content")
        return said if isinstance(said, str) else None

    def numbered(self, index: int) -> "GivenPrompt":
        """The same under the heading of one of its completions."""
        return replace(self, name=f"{self.name}, {index + 1}")


def read_prompts(arguments: argparse.Namespace) -> list[GivenPrompt]:
    """The prompts that the arguments name; standard input if they name none.

    Raises:
        ValueError: They name several, or what was read is no prompt.
        OSError: A file cannot be read.
    """
    given = {
        "PROMPT": arguments.prompt,
        "--prompt-file": arguments.prompt_file,
        "--token-ids": arguments.token_ids,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"give one of {', '.join(given)}, not {' and '.join(named)}")
    if arguments.template_argument and not (arguments.chat or arguments.prompt_file):
        raise ValueError("--template-argument is about chats; give --chat too")
    if arguments.token_ids is not None:
        prompts = [GivenPrompt("prompt", token_ids=arguments.token_ids)]
    elif arguments.prompt_file is not None:
        prompts = [prompt for path in arguments.prompt_file for prompt in _read_file(path)]
    elif arguments.prompt is not None:
        prompts = [GivenPrompt("prompt", arguments.prompt)]
    else:
        prompts = [GivenPrompt("standard input", _decode(sys.stdin.buffer.read(), "standard input"))]
    if not arguments.chat:
        return prompts
    return [_as_chat(prompt) for prompt in prompts]


def encode(llm: LLM, prompt: GivenPrompt, arguments: argparse.Namespace) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ValueError: The target has no tokenizer or no chat template, or the template refuses the conversation.
    """
    if prompt.messages is None:
        plain = prompt.text if prompt.token_ids is None else prompt.token_ids
        assert plain is not None, "a prompt has one of its three forms"
        return llm.encode(plain)
    settings = dict(parse_option(text, "--template-argument") for text in arguments.template_argument or ())
    check_template_arguments(settings)
    tokenizer = llm.target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target has no chat template; give its prompts as text, without --chat")
    with naming(prompt.name):
        [chat] = read_chats(list(prompt.messages))
    return render_chat(
        tokenizer,
        chat,
        settings,
        where=prompt.name,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )


def routing_hints(arguments: argparse.Namespace, prompt: GivenPrompt) -> Hints:
    """What the tree algorithms are told of a prompt: the words of the command line, else its own."""
    said = {key: value for key in ("task", "mode") if (value := getattr(arguments, key)) is not None}
    own = prompt.last_words
    return said or ({} if own is None else {"text": own})


def _read_file(path: Path) -> Iterator[GivenPrompt]:
    text = _decode(path.read_bytes(), str(path))
    if path.suffix != ".jsonl":
        yield GivenPrompt(str(path), text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
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
        case [("messages", [*messages])] if messages and all(isinstance(own, dict) for own in messages):
            return GivenPrompt(where, messages=messages)
    raise ValueError(f"{where}: {_LINE}")


def _decode(content: bytes, where: str) -> str:
    """Strictly: Python's own reading would smuggle invalid bytes through."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no UTF-8 text: {error}") from error


def _as_chat(prompt: GivenPrompt) -> GivenPrompt:
    if prompt.token_ids is not None:
        raise ValueError("--chat needs words; token ids are a prompt already")
    if prompt.messages is not None:
        return prompt
    return GivenPrompt(prompt.name, messages=[{"role": "user", "content": prompt.text}])
