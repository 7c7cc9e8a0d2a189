"""``jetspec-jax info``: describes a checkpoint."""

import argparse
import json
from typing import Any

from jetspec_jax.arguments import printable
from jetspec_jax.checkpoint.pairs import PAIR_NAMES, pair_of
from jetspec_jax.cli.options import HEAD_GUIDE, add_ignore_option, add_target_option
from jetspec_jax.inspect.describe import describe

# Keys of byte counts, which are also printed in a larger unit.
BYTES = ("file_bytes", "weight_bytes", "cache_bytes", "state_bytes")


def add_info_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``jetspec-jax``."""
    parser = commands.add_parser("info", help="describe a checkpoint", description=_info.__doc__)
    parser.set_defaults(run=_info)
    parser.add_argument(
        "path", nargs="?", metavar="PATH_OR_ID", help=f"folder, GGUF file or hub id, or {PAIR_NAMES}"
    )
    add_target_option(
        parser, "target that the draft head is checked against; without PATH_OR_ID, the described checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_ignore_option(parser)


def _info(arguments: argparse.Namespace) -> int:
    """Describes a target or a draft head: shapes, bytes, and whether the head fits the target."""
    path, target, ignored = arguments.path, arguments.target, arguments.ignore_config_key
    if path is None:
        path, target = target, None
    if path is None:
        raise ValueError(f"info describes a checkpoint: name a folder, a GGUF file, a hub id or {PAIR_NAMES}")
    if (pair := pair_of(path)) is not None:
        head = describe(pair.draft_head, target or path, ignore_config_keys=ignored)
        reports = [describe(path), head]
    else:
        reports = [describe(path, target, ignore_config_keys=ignored)]
    if arguments.json:
        print(json.dumps(reports if len(reports) > 1 else reports[0]))
    else:
        print(printable("\n\n".join(_table(report) for report in reports)))
        if pair is None and reports[0]["kind"] == "target":
            print(f"\nto make a draft head for it: {HEAD_GUIDE}")
    return 0 if all(report.get("fits", True) for report in reports) else 1


def _table(report: dict[str, Any]) -> str:
    """The report in two columns, with byte counts also in KiB or MiB."""
    shown = {}
    for key, value in report.items():
        if key == "fit_problem" or (key == "unused_tensors" and not value):
            continue
        if key == "fits":
            value = "yes" if value else f"no: {report['fit_problem']}"
        elif key == "parameters":
            value = f"{value:,}"
        elif key == "unused_tensors":
            value = ", ".join(f"{count:,} ({reason})" for reason, count in value.items())
        elif key.startswith(BYTES):
            unit, size = ("MiB", 2**20) if value >= 2**20 else ("KiB", 2**10)
            value = f"{value:,} ({value / size:,.1f} {unit})" if value else "0"
        shown[key.replace("_", " ")] = value
    width = max(map(len, shown))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in shown.items())
