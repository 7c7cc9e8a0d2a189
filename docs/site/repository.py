"""What the site makes of the repository: links as GitHub follows them, and pages that stand elsewhere.

Every page is written to be read in the repository too, so its links are paths there. On the site a link goes
to the page that was made of its goal, and to the repository's own address where there is none.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
#: Pages from outside of ``docs/``, by their paths in the repository and on the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/results/NOTES.md": "notes.md",
    "jetspec_jax/demo/README.md": "demo.md",
    "train/results/README.md": "training-results.md",
}
_FENCE = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that stand elsewhere."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Has the links of a page lead where they lead in the repository."""
    own = page.file.src_uri
    folder = dirname(next((path for path, made in PAGES.items() if made == own), f"docs/{own}"))

    def led(link: re.Match[str]) -> str:
        return _goal(normpath(join(folder, link[0])), dirname(own), config, files)

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(led, text) for text in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Shows a docstring's ``::``, which announces code, as the colon that it is."""
    return re.sub("::(?=</p>)", ":", html)


def _goal(path: str, folder: str, config: Any, files: Files) -> str:
    """Where a link to a path of the repository leads, from a folder of the site."""
    if path in PAGES:
        return relpath(PAGES[path], folder or ".")
    if path.startswith("docs/"):
        return relpath(path.removeprefix("docs/"), folder or ".")
    if path.endswith((".png", ".svg")):
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        return relpath(path, folder or ".")
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{config.extra['repository']}/{kind}/main/{path}"
