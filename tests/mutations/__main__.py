"""Seeded faults: applies each to a copy of the tree, and runs the tests that should catch it.

A fault is a patch in ``faults/`` and an entry in ``faults.toml``. It is caught if an assertion of a test that
its entry names fails with the patch, and these tests pass without it. The exit code is 0 if all are caught.
"""

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.mutations.runner import CAUGHT, Pass, Result, read_faults, write_json

ROOT = Path(__file__).resolve().parents[2]
WORK = Path("build/mutations")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults (default: all)")
    parser.add_argument(
        "--work", type=Path, default=WORK, help=f"copies, results to resume (default: {WORK})"
    )
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time (default: 1)")
    parser.add_argument("--no-suite", action="store_true", help="run the named tests alone")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {arguments.jobs}")
    try:
        faults = read_faults(ROOT, arguments.names)
    except ValueError as error:
        parser.error(str(error))
    one_pass = Pass(ROOT, arguments.work.resolve(), arguments.jobs)
    if arguments.no_suite:
        one_pass.suite = None
    results = one_pass.run(faults, lambda result: print(f"{result.name}: {result.outcome}", flush=True))
    if arguments.json:
        write_json(arguments.json, [asdict(result) for result in results])
    print(f"\n{table(results)}")
    return int(any(result.outcome != CAUGHT for result in results))


def table(results: list[Result]) -> str:
    """One line a fault, the caught ones counted by room, and the messages of those that were not caught."""
    rows = [(result.room, result.name, result.outcome, result.test) for result in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    total = Counter(result.room for result in results)
    caught = Counter(result.room for result in results if result.outcome == CAUGHT)
    rooms = ", ".join(f"{room} {caught[room]}/{count}" for room, count in total.items())
    lines += ["", f"caught {caught.total()} of {total.total()}: {rooms}"]
    for result in results:
        if result.outcome != CAUGHT and result.message:
            lines += ["", f"{result.name}: {result.outcome}: {result.test}", result.message]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
