"""The end and the forks of a program whose `AsyncLLM` decodes."""

import subprocess
import sys
import threading
import time

from jetspec_jax.engine.compiler import PROGRAM_ENDED, EngineThread, end_all, in_engine_thread
from tests.events import PATIENCE


def test_a_program_forks_and_ends_while_it_decodes():
    """Its own exit code, no abort and no complaint; a fork says what would work, and waits for nothing."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.exit_program"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("refused\nended\n", 3), ran.stderr
    assert "Traceback" not in ran.stderr


def test_threads_that_only_return_are_waited_for():
    freed, ended = [], threading.Event()

    def work():
        assert ended.wait(PATIENCE)
        time.sleep(0.1)
        freed.append(in_engine_thread())

    EngineThread(work, "jetspec-test", ended.set).start()
    end_all()
    PROGRAM_ENDED.clear()
    assert freed == [True]
    assert not in_engine_thread()
