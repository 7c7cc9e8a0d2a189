"""Twenty seconds of what `make soak-serve` does for minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.events import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_a_server_holds_for_a_while():
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.soak_serve",
        "--minutes",
        "0.34",
        "--streams",
        "16",
        "--cases",
        "12",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    report = json.loads(done.stdout)
    # Each client has one at least.
    assert sum(report["ended"].values()) >= 16
    assert report["ended"]["finished"]
