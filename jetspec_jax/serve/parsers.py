"""Names of the forms in which models write reasoning and calls of tools; their readers are elsewhere."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Markers:
    """What stands around the reasoning at the beginning of an answer.

    Attributes:
        start: Before it.
        end: After it.
        special: Whether they are special tokens, which are no text unless a request asks for them.
        without: What stands there instead of ``start`` where there is no reasoning.
    """

    start: str
    end: str
    special: bool = False
    without: str | None = None


_THINK = Markers("<think>", "</think>")

#: By name of ``--reasoning-parser``.
REASONING = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "step3": _THINK,
    "gemma4": Markers("<|channel>thought\n", "<channel|>", special=True),
    "openai_gptoss": Markers(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        special=True,
        without="<|channel|>final<|message|>",
    ),
}

#: Names of ``--tool-call-parser``: JSON in tags, and functions and parameters as tags.
TOOL_CALLS = ("hermes", "qwen3_coder", "qwen3_xml")
