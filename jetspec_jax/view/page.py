"""A generation as one HTML page that needs nothing else, joined from the files in ``page_parts``.

`join_page` and the parts that draw a tree serve other pages too.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.files import write_text

PARTS = Path(__file__).parent / "page_parts"
#: What draws a tree: it reads the global ``data.labels``, and draws into the elements of ``tree.html``.
TREE_SCRIPTS = ("layout.js", "tree.js")
_STYLES, _SCRIPTS = ("tree.css", "page.css"), (*TREE_SCRIPTS, "rounds.js")
_READ_DATA = 'const data = JSON.parse(document.getElementById("data").textContent);\n'


def page_of(data: Mapping[str, Any]) -> str:
    """The page that steps through the rounds of a generation, as `jetspec_jax.view.data` describes it."""
    # Settings are shown and no more; as a number a seed of 64 bits would be rounded.
    shown = {name: str(value) for name, value in data["settings"].items() if value is not None}
    styles, scripts = map(part, _STYLES), map(part, _SCRIPTS)
    return join_page(part("page.html"), {**data, "settings": shown}, "".join(styles), "".join(scripts))


def join_page(template: str, data: Mapping[str, Any], style: str, script: str) -> str:
    """A page of a template with the places ``{{STYLE}}``, ``{{TREE}}``, ``{{DATA}}`` and ``{{SCRIPT}}``.

    Args:
        template: The page's HTML.
        data: JSON values, which the script has as ``data``.
        style: CSS.
        script: JavaScript.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    places = {
        "STYLE": style,
        "TREE": part("tree.html"),
        # Nothing in the data can end the script element or begin a comment, whatever the tokens are.
        "DATA": text.replace("<", "\\u003c"),
        "SCRIPT": '"use strict";\n' + _READ_DATA + script,
    }
    # In one pass: what stands in the data is no place.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda place: places[place[1]], template)


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the page, whole or not at all."""
    write_text(path, page_of(data))


def part(name: str) -> str:
    """One of the files that pages are joined from."""
    return (PARTS / name).read_text(encoding="utf-8")
