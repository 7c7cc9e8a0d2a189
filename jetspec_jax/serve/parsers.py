"""Names of the parsers of reasoning and tool calls; needs no library of the server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Markers:
    """The markers around the reasoning at the beginning of an answer.

    Attributes:
        start: The marker before the reasoning.
        end: The marker after the reasoning.
        special: Whether the markers are special tokens, which are usually removed from the text.
        messages: Whether answers are sequences of messages, with reasoning in several places; see `harmony`.
    """

    start: str
    end: str
    special: bool = False
    messages: bool = False


_THINK = Markers("<think>", "</think>")

#: The values of ``--reasoning-parser``.
REASONING = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "step3": _THINK,
    "gemma4": Markers("<|channel>thought\n", "<channel|>", special=True),
    "openai_gptoss": Markers("<|channel|>analysis<|message|>", "<|end|>", special=True, messages=True),
}

#: The tool-call parser for messages to functions, and the reasoning parser that it needs.
MESSAGE_CALLS, MESSAGES = "openai", "openai_gptoss"
#: The values of ``--tool-call-parser``: JSON in tags, functions and parameters as tags, messages to
#: functions.
TOOL_CALLS = ("hermes", "qwen3_coder", "qwen3_xml", MESSAGE_CALLS)
