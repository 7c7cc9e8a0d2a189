"""A generation as a self-contained HTML page, joined from the files in ``page_parts``.

Other pages use `join_page` and the parts that draw trees, too.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.files import write_text

PARTS = Path(__file__).parent / "page_parts"
#: The scripts that draw a tree: they read the global ``data.labels``, and draw into ``tree.html``'s elements.
TREE_SCRIPTS = ("layout.js", "tree.js")
_STYLES, _SCRIPTS = ("tree.css", "page.css"), (*TREE_SCRIPTS, "rounds.js")
_READ_DATA = 'const data = JSON.parse(document.getElementById("data").textContent);\n'


def page_of(data: Mapping[str, Any]) -> str:
    """The page that steps through the rounds of a generation, given as in `jetspec_jax.view.data`."""
    # Settings are only shown, so they are texts: JavaScript would round a seed of 64 bits.
    shown = {name: str(value) for name, value in data["settings"].items() if value is not None}
    styles, scripts = map(part, _STYLES), map(part, _SCRIPTS)
    return join_page(part("page.html"), {**data, "settings": shown}, "".join(styles), "".join(scripts))


def join_page(template: str, data: Mapping[str, Any], style: str, script: str) -> str:
    """Fills in a template with the places ``{{STYLE}}``, ``{{TREE}}``, ``{{DATA}}`` and ``{{SCRIPT}}``."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    places = {
        "STYLE": style,
        "TREE": part("tree.html"),
        # Escaped, so that no token can end the script element or start a comment.
        "DATA": text.replace("<", "\\u003c"),
        "SCRIPT": '"use strict";\n' + _READ_DATA + script,
    }
    # In one pass, so that nothing in the data is taken for a place.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda place: places[place[1]], template)


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the page atomically."""
    write_text(path, page_of(data))


def part(name: str) -> str:
    """Reads a file of ``page_parts``."""
    return (PARTS / name).read_text(encoding="utf-8")
