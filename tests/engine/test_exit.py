"""The end and the forks of a program whose `AsyncLLM` decodes."""

import subprocess
import sys


def test_a_program_forks_and_ends_while_it_decodes():
    """Its own exit code, no abort and no complaint; a fork says what would work, and waits for nothing."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.exit_program"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("refused\nended\n", 3), ran.stderr
    assert "Traceback" not in ran.stderr
