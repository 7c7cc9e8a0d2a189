"""Names of the parsers of reasoning and tool calls; needs no library of the server."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jetspec_jax.serve import tag_reader as tags

#: The marks of GPT-OSS's messages; see `harmony`.
MARKS = tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call"))


@dataclass(frozen=True)
class Markers:
    """The markers around the reasoning at the beginning of an answer.

    With ``messages``, answers are sequences of messages, with reasoning in several places; see `harmony`.
    """

    start: str
    end: str
    messages: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts that must be in an answer for its parser."""
        return MARKS if self.messages else (self.start, self.end)


_THINK = Markers("<think>", "</think>")

#: The values of ``--reasoning-parser``.
REASONING = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "step3": _THINK,
    "gemma4": Markers("<|channel>thought\n", "<channel|>"),
    "openai_gptoss": Markers("<|channel|>analysis<|message|>", "<|end|>", messages=True),
}

#: The tool-call parser for messages to functions, and the reasoning parser that it needs.
MESSAGE_CALLS, MESSAGES = "openai", "openai_gptoss"
_CALL = tags.OPEN, tags.CLOSE
_TAGS = *_CALL, tags.FUNCTION, tags.FUNCTION_END, tags.PARAMETER, tags.PARAMETER_END
#: The values of ``--tool-call-parser``, with the tags that each reads: JSON in tags, functions and parameters
#: as tags, messages to functions.
TOOL_CALLS = {"hermes": _CALL, "qwen3_coder": _TAGS, "qwen3_xml": _TAGS, MESSAGE_CALLS: MARKS}


def special_tokens(tokenizer: Any, tags: Iterable[str]) -> frozenset[int]:
    """The special tokens of a transformers tokenizer that are tags or parts of tags.

    Parsers read tags in the text, whether or not the tokenizer declares them as special.
    """
    added = {} if tokenizer is None else tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return frozenset(
        token
        for token, word in added.items()
        if word.special and any(word.content in tag or tag in word.content for tag in tags)
    )
