"""The self-contained page of the playground, and its content security policy."""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.view.page import TREE_SCRIPTS, join_page, part

PARTS = Path(__file__).parent / "page_parts"
_SCRIPTS = ("stream.js", "figures.js", "playground.js")


def playground_page(data: Mapping[str, Any]) -> str:
    """The page."""
    style = part("tree.css") + _page_part("page.css")
    script = "".join([*map(part, TREE_SCRIPTS), *map(_page_part, _SCRIPTS)])
    # Labels of tokens are sent with their trees.
    return join_page(_page_part("page.html"), {**data, "labels": {}}, style, script)


def policy_of(page: str) -> str:
    """A content security policy that allows only the page's style and script, and requests to its server."""
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash_of(page, '<style>', '</style>')}",
            f"script-src {_hash_of(page, '<script>', '</script>')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hash_of(page: str, start: str, end: str) -> str:
    [text] = re.findall(f"{start}(.*?){end}", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _page_part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")
