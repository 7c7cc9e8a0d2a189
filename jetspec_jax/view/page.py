"""A generation as one HTML page that needs nothing else, joined from the files in ``page_parts``."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.files import write_text

PARTS = Path(__file__).parent / "page_parts"
_SCRIPTS = ("layout.js", "tree.js", "rounds.js")
_READ_DATA = 'const data = JSON.parse(document.getElementById("data").textContent);\n'


def page_of(data: Mapping[str, Any]) -> str:
    """The page that steps through the rounds of a generation, as `jetspec_jax.view.data` describes it."""
    # Settings are shown and no more; as a number a seed of 64 bits would be rounded.
    shown = {name: str(value) for name, value in data["settings"].items() if value is not None}
    text = json.dumps({**data, "settings": shown}, separators=(",", ":"), allow_nan=False)
    places = {
        "STYLE": _part("page.css"),
        # Nothing in the data can end the script element or begin a comment, whatever the tokens are.
        "DATA": text.replace("<", "\\u003c"),
        "SCRIPT": '"use strict";\n' + _READ_DATA + "".join(map(_part, _SCRIPTS)),
    }
    # In one pass: what stands in the data is no place.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda place: places[place[1]], _part("page.html"))


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the page, whole or not at all."""
    write_text(path, page_of(data))


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")
