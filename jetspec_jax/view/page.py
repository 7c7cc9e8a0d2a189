"""A generation as one HTML page that needs nothing else: see ``page.html``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.files import write_text

TEMPLATE = Path(__file__).parent / "page.html"
_PLACE = "{{DATA}}"


def page_of(data: Mapping[str, Any]) -> str:
    """The page that steps through the rounds of a generation, as `jetspec_jax.view.data` describes it."""
    # Settings are shown and no more; as a number a seed of 64 bits would be rounded.
    shown = {name: str(value) for name, value in data["settings"].items() if value is not None}
    # Nothing in the data can end the script element or begin a comment, whatever the tokens are.
    text = json.dumps({**data, "settings": shown}, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    template = TEMPLATE.read_text(encoding="utf-8")
    before, after = template.split(_PLACE)
    return before + text + after


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the page, whole or not at all."""
    write_text(path, page_of(data))
