"""Prints a model's text safely."""

import sys

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def on_screen(text: str) -> str:
    """Text for standard output; control characters are escaped if it is a terminal.

    A model may write characters that move the cursor or hide lines. Files and pipes get the text unchanged.
    """
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text
