"""A model's text on standard output."""

import sys

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def on_screen(text: str) -> str:
    """Text as standard output gets it: where that is a terminal, characters that control one are escaped.

    A model may write, or repeat from a prompt, what moves the cursor or hides lines. Files
    and pipes get the text as it is.
    """
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text
