"""Splits the text of a choice incrementally into reasoning, content and tool calls."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jetspec_jax.serve.calls import Call, Finder, WholeText, named_call
from jetspec_jax.serve.harmony import Harmony
from jetspec_jax.serve.json_calls import JsonCalls, listed_calls
from jetspec_jax.serve.parsers import MESSAGE_CALLS, Markers
from jetspec_jax.serve.reasoning import Reasoning
from jetspec_jax.serve.tagged_calls import TaggedCalls
from jetspec_jax.serve.tools import Tool


class ChoiceText:
    """An incremental parser of one choice's text."""

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
        """Starts without text.

        The prompt ends inside reasoning if it has ``begun``. ``parser`` is that of tool calls. ``forced`` is
        the function that the whole text calls, "" for a list of any calls, or None.
        """
        self.calls = 0
        self._reasoning, self._several = Reasoning(markers, begun=begun), several
        self._finder: Finder | None = None
        self._messages: Harmony | None = None
        if markers is not None and markers.messages:
            self._messages = Harmony(begun=begun, reads_calls=forced is None and parser == MESSAGE_CALLS)
        if forced is not None:
            self._finder = WholeText(partial(named_call, forced) if forced else listed_calls)
        elif parser == "hermes":
            self._finder = JsonCalls()
        elif parser in ("qwen3_coder", "qwen3_xml"):
            self._finder = TaggedCalls(tools)

    def feed(self, text: str, *, last: bool, cut: bool = False) -> dict[str, Any]:
        """Processes a piece; returns the new "content", "reasoning_content" and "tool_calls"."""
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
        made = [call.as_json() for call in calls]
        return {"content": content, "reasoning_content": reasoning, "tool_calls": made}

    def reason(self, finish_reason: str | None) -> str | None:
        """The ``finish_reason`` of the response, which is "tool_calls" if there are calls."""
        return "tool_calls" if finish_reason == "stop" and self.calls else finish_reason
