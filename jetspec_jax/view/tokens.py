"""Readable texts of tokens: visible white space, escaped control characters, widths in columns."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from jetspec_jax.arguments import printable
from jetspec_jax.engine.detokenizer import detokenizer_of, whole_text

# Runs of at least this many white-space characters are counted: four and five dots look alike.
_COUNTED = 4
_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}
_RUN = re.compile(r"([ \n\t])\1*")


def token_label(tokenizer: Any, token: int, *, ascii_only: bool = False) -> str:
    """A token as a label on one line, in ASCII a quoted literal; one without text is its id in brackets."""
    detokenizer = detokenizer_of(tokenizer)
    text = None if detokenizer is None else whole_text(detokenizer.token_bytes(token))
    if not text:
        return f"<{token}>" if ascii_only else f"⟨{token}⟩"
    return visible(text, ascii_only=ascii_only)


def visible(text: str, *, ascii_only: bool = False) -> str:
    """Text on one line: white space as ``·``, ``↵`` and ``⇥``, unprintable characters escaped.

    Runs of four or more are counted: twelve spaces are ``·×12``. In ASCII it is a quoted literal.
    """
    if ascii_only:
        return ascii(text)
    signs = _RUN.sub(_run, text)
    # Also escapes control and direction characters, with which a model could control a terminal.
    return printable(signs)


def _run(match: re.Match[str]) -> str:
    sign, count = _SIGNS[match[1]], len(match[0])
    return f"{sign}×{count}" if count >= _COUNTED else sign * count


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token of a sequence adds; joined, they are the sequence's text.

    A token that ends within a character adds nothing of it; the token that completes the character adds all
    of it. Without a tokenizer the texts are ids.
    """
    detokenizer = detokenizer_of(tokenizer)
    if detokenizer is None:
        return [f"{token} " for token in tokens]
    stream = detokenizer.stream()
    added = [stream.feed(int(token)) for token in tokens]
    return [*added[:-1], added[-1] + stream.end()] if added else []


def columns(text: str) -> int:
    """A text's width in columns: two for a wide character, none for a combining one."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def cut(text: str, width: int | None, ellipsis: str = "…") -> str:
    """A text cut to ``width`` columns with an ellipsis; None does not cut."""
    if width is None or columns(text) <= width:
        return text
    room, kept = width - columns(ellipsis), ""
    for c in text:
        room -= columns(c)
        if room < 0:
            break
        kept += c
    return (kept + ellipsis)[: max(width, 0)]
