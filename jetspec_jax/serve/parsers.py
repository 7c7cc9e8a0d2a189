"""Names of the forms in which models write reasoning and calls of tools; their readers are elsewhere."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Markers:
    """What stands around the reasoning at the beginning of an answer.

    Attributes:
        start: Before it.
        end: After it.
        special: Whether they are special tokens, which are no text unless a request asks for them.
        messages: Whether answers are sequences of messages, in which reasoning may come several times; see
            `harmony`.
    """

    start: str
    end: str
    special: bool = False
    messages: bool = False


_THINK = Markers("<think>", "</think>")

#: By name of ``--reasoning-parser``.
REASONING = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "step3": _THINK,
    "gemma4": Markers("<|channel>thought\n", "<channel|>", special=True),
    "openai_gptoss": Markers("<|channel|>analysis<|message|>", "<|end|>", special=True, messages=True),
}

#: The parser of calls that are messages, which needs the parser of messages.
MESSAGE_CALLS, MESSAGES = "openai", "openai_gptoss"
#: Names of ``--tool-call-parser``: JSON in tags, functions and parameters as tags, and messages to functions.
TOOL_CALLS = ("hermes", "qwen3_coder", "qwen3_xml", MESSAGE_CALLS)
