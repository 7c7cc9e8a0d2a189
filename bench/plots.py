"""Redraws kept reports, each as an SVG beside it: the named ones, or all with a picture in bench/results.

Without named reports the README's pictures in docs are redrawn too: tokens and speed by budget, and, with a
browser, the page of trees.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_jax.checkpoint.files import replacing
from jetspec_jax.view.page import write_page

if TYPE_CHECKING:  # matplotlib is imported when a picture is drawn
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "bench/results", ROOT / "docs"
#: The report of the README's picture of budgets, and the algorithms in it.
BUDGETS, COMPARED = "smollm2/gsm8k-gpu", ("top_nodes",)
#: The trace of the README's page of trees, its round, and the size of the window.
TRACE, ROUND, WINDOW = "smollm2/tree-cpu", 8, (1200, 820)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    add(
        "reports",
        nargs="*",
        type=Path,
        help="reports; each picture is written beside its report (default: all with a picture)",
    )
    add(
        "--browser",
        metavar="PROGRAM",
        help="Chromium, to redraw the picture of the page of trees (default: keep that picture)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Redraws the pictures.

    Raises:
        ValueError: A file is no report, or its kind has no picture.
        RuntimeError: The browser made no picture.
    """
    for path in arguments.reports or kept_reports():
        draw_kept(path, path.with_suffix(".svg"))
    if not arguments.reports:
        from bench.common.picture import write_picture
        from bench.decode.plot import draw_budgets

        budgets = draw_budgets(read_report(RESULTS / f"{BUDGETS}.json"), COMPARED)
        write_picture(DOCS / "budgets.svg", budgets)
        if arguments.browser:
            photograph(arguments.browser, read_report(RESULTS / f"{TRACE}.json"), DOCS / "tree-page.png")
        else:
            print("docs/tree-page.png was kept: name a browser with --browser to redraw it")
    return 0


def kept_reports() -> list[Path]:
    """The kept reports with a picture beside them."""
    return [path for path in sorted(RESULTS.glob("*/*.json")) if path.with_suffix(".svg").exists()]


def read_report(path: Path) -> dict[str, Any]:
    """Reads a report; raises ValueError if the file is no JSON object."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(report, dict):
        raise ValueError(f"{path} is no report: it is no JSON object")
    return report


def draw_kept(path: Path, picture: Path) -> None:
    """Draws a report to an SVG; raises ValueError if its kind has no picture."""
    from bench.common.picture import write_picture

    write_picture(picture, picture_of(path))


def picture_of(path: Path) -> "Figure":
    """Draws a report; raises ValueError if its kind has no picture."""
    from bench.acceptance.plot import draw_acceptance, draw_profile
    from bench.decode.plot import draw_decode
    from bench.exactness.plot import draw_ledger
    from bench.kernel.plot import draw_experts, draw_kernels, draw_products
    from bench.load.plot import draw_load
    from bench.round.plot import draw_rounds
    from bench.serve.plot import draw_serve

    drawn = {
        "decode": draw_decode,
        "acceptance": draw_acceptance,
        "exactness": draw_ledger,
        "experts": draw_experts,
        "kernel": draw_kernels,
        "load": draw_load,
        "matmul": draw_products,
        "profile": draw_profile,
        "round": draw_rounds,
        "serve": draw_serve,
    }
    report = read_report(path)
    kind = report.get("benchmark") or report.get("meta", {}).get("benchmark")
    if kind not in drawn:
        raise ValueError(f"{path} is a report of {kind!r}; there are pictures of {', '.join(drawn)}")
    return drawn[kind](report)


def photograph(browser: str, trace: Mapping[str, Any], picture: Path) -> None:
    """Writes a PNG of a trace's page of trees, rendered by a headless Chromium."""
    with tempfile.TemporaryDirectory() as folder, replacing(picture) as partly:
        page, made = Path(folder) / "page.html", Path(folder) / "page.png"
        write_page(page, trace)
        words = [
            browser,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        size = f"--window-size={WINDOW[0]},{WINDOW[1]}"
        address = f"{page.as_uri()}#round={ROUND}"
        done = subprocess.run([*words, size, f"--screenshot={made}", address], capture_output=True, text=True)
        if done.returncode or not made.exists():
            raise RuntimeError(f"{browser} made no picture of the page: {done.stderr.strip()[-400:]}")
        partly.write_bytes(made.read_bytes())
    print(f"wrote {picture}")
