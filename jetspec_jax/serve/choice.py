"""The text of one choice, taken apart while it arrives: reasoning, content, calls of tools."""

from collections.abc import Sequence
from typing import Any

from jetspec_jax.serve.calls import Call, Finder, ListedCalls, NamedCall
from jetspec_jax.serve.harmony import Harmony
from jetspec_jax.serve.json_calls import JsonCalls
from jetspec_jax.serve.parsers import MESSAGE_CALLS, Markers
from jetspec_jax.serve.reasoning import Reasoning
from jetspec_jax.serve.tagged_calls import TaggedCalls
from jetspec_jax.serve.tools import Tool


class ChoiceText:
    """Takes a choice's text apart.

    Attributes:
        calls: Calls of tools so far.
    """

    def __init__(
        self,
        markers: Markers | None,
        *,
        begun: bool,
        parser: str | None,
        tools: Sequence[Tool],
        forced: str | None,
        several: bool,
    ):
        """Begins before the first piece.

        Args:
            markers: Of the reasoning, or None.
            begun: Whether the prompt has begun it.
            parser: What reads calls in the text; None leaves all text as it is.
            tools: What may be called.
            forced: The function that the whole text calls, or "" for any of them; None for none.
            several: Whether there may be more than one call.
        """
        self.calls = 0
        self._reasoning, self._several = Reasoning(markers, begun=begun), several
        self._finder: Finder | None = None
        self._messages: Harmony | None = None
        if forced is not None:
            self._finder = NamedCall(forced) if forced else ListedCalls()
        elif parser == MESSAGE_CALLS and tools and markers is not None and markers.messages:
            self._messages = Harmony(begun=begun, reads_calls=True)
        elif parser == "hermes" and tools:
            self._finder = JsonCalls()
        elif parser in ("qwen3_coder", "qwen3_xml") and tools:
            self._finder = TaggedCalls(tools)

    def feed(self, text: str, *, last: bool, cut: bool = False) -> dict[str, Any]:
        """Takes a piece; gives what is new of "content", "reasoning_content" and "tool_calls".

        Args:
            text: The piece.
            last: Whether it is the last one.
            cut: Whether the text ends because it may not be longer.
        """
        calls: list[Call] = []
        if self._messages is not None:
            reasoning, content, calls = self._messages.feed(text, last=last)
        else:
            reasoning, content = self._reasoning.feed(text, last=last)
        if self._finder is not None:
            content, calls = self._finder.feed(content, last=last, cut=cut)
        if not self._several:
            calls = calls[: max(0, 1 - self.calls)]
        self.calls += len(calls)
        made = [call.described() for call in calls]
        return {"content": content, "reasoning_content": reasoning, "tool_calls": made}

    def reason(self, finish_reason: str | None) -> str | None:
        """Why it ended, as responses say it."""
        return "tool_calls" if finish_reason == "stop" and self.calls else finish_reason
