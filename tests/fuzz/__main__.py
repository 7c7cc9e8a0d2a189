"""``python -m tests.fuzz``: hostile checkpoints and requests for as long as you like; see ``--help``."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from tests.fuzz.run import run_cases

#: Cases of each part unless minutes are named.
CASES = {"checkpoints": 1500, "requests": 600}
#: Programs beside this one, which have cases of their own.
OTHERS = ("tests.fuzz.signals", "tests.fuzz.interrupts")
SHARE = {"checkpoints": 0.6, "requests": 0.4}
ENDLESS = 10**9


def main():
    """Exit code 1 where there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="run that long, in place of a number of cases")
    parser.add_argument("--cases", type=int, help=f"cases of each part (default: {CASES})")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: 0)")
    parser.add_argument("--parts", nargs="+", default=[*CASES], choices=[*CASES], help="(default: both)")
    parser.add_argument("--json", type=Path, default=Path("fuzz.json"), help="report (default: fuzz.json)")
    parser.add_argument("--alone", action="store_true", help="leave out signals and interrupts")
    arguments = parser.parse_args()
    # As in tests: nothing is fetched, and nothing left in the user's folders.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    report = {"seed": arguments.seed}
    for part in arguments.parts:
        first = arguments.first
        stop, deadline = first + (arguments.cases or CASES[part]), None
        if arguments.minutes is not None:
            stop = first + (arguments.cases or ENDLESS)
            deadline = time.monotonic() + 60 * arguments.minutes * SHARE[part]
        total = None if stop > ENDLESS / 2 else stop - first
        with tqdm(total=total, desc=part, unit=" cases") as bar:
            found = run_cases(part, (first, stop, arguments.seed), deadline=deadline, progress=bar.update)
        report[part] = found.as_json()
        print(json.dumps(report[part], indent=2))
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    failed = any(report[part]["findings"] for part in arguments.parts)
    if not arguments.alone:
        for module in OTHERS:
            if importlib.util.find_spec(module) is not None:
                failed |= bool(subprocess.run([sys.executable, "-m", module], check=False).returncode)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
