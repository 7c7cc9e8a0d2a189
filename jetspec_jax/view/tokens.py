"""Tokens as people can read them: white space visible, nothing that moves a cursor, widths in columns."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from jetspec_jax.arguments import printable
from jetspec_jax.engine.detokenizer import detokenizer_of, whole_text

# From this many equal white-space characters on they are counted: four and five dots look alike.
_COUNTED = 4
_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}
_RUN = re.compile(r"([ \n\t])\1*")


def token_label(tokenizer: Any, token: int, *, ascii_only: bool = False) -> str:
    """A token as a label on one line; one without text of its own is its id in brackets.

    Args:
        tokenizer: A transformers tokenizer, or None.
        token: The token's id.
        ascii_only: For places that can print no more than ASCII: a quoted literal.
    """
    detokenizer = detokenizer_of(tokenizer)
    text = None if detokenizer is None else whole_text(detokenizer.token_bytes(token))
    if not text:
        return f"<{token}>" if ascii_only else f"⟨{token}⟩"
    return visible(text, ascii_only=ascii_only)


def visible(text: str, *, ascii_only: bool = False) -> str:
    """Text on one line: white space as ``·``, ``↵`` and ``⇥``, what cannot be printed escaped.

    A run of four or more is counted: twelve spaces are ``·×12``. In ASCII it is a quoted literal.
    """
    if ascii_only:
        return ascii(text)
    signs = _RUN.sub(_run, text)
    # Control and direction characters too: a model may emit what would take over a terminal.
    return printable(signs)


def _run(match: re.Match[str]) -> str:
    sign, count = _SIGNS[match[1]], len(match[0])
    return f"{sign}×{count}" if count >= _COUNTED else sign * count


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token of a sequence adds; joined, they are the sequence's text.

    A token adds what it settles: one that ends within a character adds nothing of it, and the token that
    completes the character all of it. Without a tokenizer the tokens are their ids.
    """
    detokenizer = detokenizer_of(tokenizer)
    if detokenizer is None:
        return [f"{token} " for token in tokens]
    stream = detokenizer.stream()
    added = [stream.feed(int(token)) for token in tokens]
    return [*added[:-1], added[-1] + stream.end()] if added else []


def columns(text: str) -> int:
    """Columns of a terminal that a text takes: two for a wide character, none for a combining one."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def cut(text: str, width: int | None, ellipsis: str = "…") -> str:
    """A text of at most ``width`` columns, an ellipsis for what is left out; None cuts nothing."""
    if width is None or columns(text) <= width:
        return text
    room, kept = width - columns(ellipsis), ""
    for c in text:
        room -= columns(c)
        if room < 0:
            break
        kept += c
    return (kept + ellipsis)[: max(width, 0)]
