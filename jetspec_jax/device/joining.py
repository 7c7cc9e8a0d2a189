"""How processes meet, and how they end: together, with a sentence, when one of them does not go on.

A process that fails or is interrupted says so, and the others end within seconds. One that dies without a
word is missed by `jax.distributed`, which ends the others: its heartbeats come from a thread that neither a
compiler nor Python can hold up.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from typing import Any, NoReturn

import jax
from jax._src import distributed

from jetspec_jax import progress
from jetspec_jax.arguments import check_integer, check_type
from jetspec_jax.device.processes import ROOT, say_end

#: Seconds without a heartbeat after which `jax.distributed` takes a process for dead, and ends the others.
HEARTBEAT_SECONDS = 15
# Between two looks at the others, and how long one that said nothing is not worth a line.
_LOOK_SECONDS, _SILENT_SECONDS = 0.5, 6
# A process that fails as another has failed says so itself; the first holds the store for the others.
_GRACE_SECONDS, _LINGER_SECONDS = 1.0, 2.5
_WATCH, _DONE = f"{ROOT}/watch", "done"
# Set where this process ends for a reason of its own, and no longer for another's.
_leaving = threading.Event()
#: Exit codes: of a program that ends with an error, and of one that is interrupted.
FAILED, INTERRUPTED = 1, 130


def join_processes(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Meets the other processes of a program, before anything uses devices.

    From then on the devices of all processes are `jax.devices`, and all processes end when one of them dies,
    is interrupted, or ends with an error that nothing catches.

    Args:
        coordinator: ``HOST:PORT`` of the first process, which the others can reach. None takes all three from
            a cluster that JAX knows, as Slurm or Open MPI.
        processes: How many there are.
        process: Which of them this is, from 0.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is missing or out of its range, or JAX knows no cluster here.
        RuntimeError: Devices have been used before, or the processes did not meet.
    """
    meeting: dict[str, Any] = {}
    if coordinator is not None:
        check_type("coordinator", coordinator, str, "HOST:PORT")
        if processes is None or process is None:
            raise ValueError("a coordinator needs the number of processes, and which of them this is")
        count = check_integer("processes", processes, 1)
        own = check_integer("process", process, 0, count - 1)
        if not coordinator.rpartition(":")[2].isdigit() or ":" not in coordinator:
            raise ValueError(f"coordinator must be HOST:PORT, not {coordinator!r}")
        meeting = {
            "coordinator_address": coordinator,
            "num_processes": count,
            "process_id": own,
            # A cluster would have a say in which devices are this process's.
            "cluster_detection_method": "deactivate",
        }
    elif processes is not None or process is not None:
        raise ValueError("processes and process need a coordinator, HOST:PORT of the first process")
    with progress.waiting("waiting for the other processes"):
        try:
            jax.distributed.initialize(**meeting, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        except ValueError as error:
            if meeting:
                raise
            raise ValueError(f"JAX knows no cluster here ({error}); name a coordinator, HOST:PORT") from error
    if distributed.global_state.num_processes == 1:
        return
    if distributed.global_state.process_id:
        progress.hide()
    watch = _Watch()
    threading.Thread(target=watch.run, name="other processes", daemon=True).start()
    atexit.register(_leave_at_exit, watch)


def leave(reason: str, code: int = FAILED) -> None:
    """Ends this process and, within seconds, all others; returns where there are no others.

    Args:
        reason: Why, for the others: "it was interrupted".
        code: The exit code, of all processes.
    """
    if announce(reason, code):
        _end(code)


def tell_of_interrupt() -> None:
    """Has all other processes end, because a user has interrupted this one, which ends too."""
    announce("it was interrupted", INTERRUPTED)


def announce(reason: str, code: int = FAILED) -> bool:
    """Has all other processes end within seconds, and waits until they have heard of it.

    Args:
        reason: Why, as for `leave`.
        code: Their exit code.

    Returns:
        Whether there are others.
    """
    own, store = distributed.global_state.process_id, distributed.global_state.client
    if store is None or distributed.global_state.num_processes == 1:
        return False
    _leaving.set()
    try:
        store.key_value_set(f"{_WATCH}/ended/{own}", json.dumps([reason, code]), allow_overwrite=True)
    except jax.errors.JaxRuntimeError:
        return True  # the first process is gone, and the others miss it as well
    if own == 0:  # the store goes with it
        time.sleep(_LINGER_SECONDS)
    return True


def _end(code: int) -> NoReturn:
    """Ends at once: devices may wait for a process that never comes, and JAX for all to end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


def _leave_at_exit(watch: "_Watch") -> None:
    """Called when Python ends, before JAX waits for the others to end too."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # an error that somebody has seen, and gone on
        watch.stop()
        say_end()
    elif isinstance(error, KeyboardInterrupt):
        leave("it was interrupted", INTERRUPTED)
    else:
        leave(f"{type(error).__name__}: {error}")


class _Watch:
    """Looks at what the others say of themselves, in a thread of its own."""

    def __init__(self) -> None:
        self._own: int = distributed.global_state.process_id
        self._store: Any = distributed.global_state.client
        self._done = threading.Event()
        self._heard: dict[int, tuple[str, float]] = {}
        self._said: set[int] = set()

    def run(self) -> None:
        """Looks until the program ends."""
        looks = 0
        while not self._done.wait(_LOOK_SECONDS):
            looks += 1
            try:
                self._tell(str(looks))
                entries = self._store.key_value_dir_get(f"{_WATCH}/")
            except jax.errors.JaxRuntimeError:
                if self._done.is_set():
                    return
                self._over("process 0 has ended, or cannot be reached", FAILED)
                return
            self._look({key.removeprefix(f"{_WATCH}/"): value for key, value in entries})

    def stop(self) -> None:
        """The program ends as it should: it says no more, and nobody need wonder."""
        self._done.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._tell(_DONE)

    def _tell(self, text: str) -> None:
        self._store.key_value_set(f"{_WATCH}/alive/{self._own}", text, allow_overwrite=True)

    def _look(self, entries: dict[str, str]) -> None:
        now = time.monotonic()
        for key, value in sorted(entries.items()):
            kind, _, number = key.partition("/")
            process = int(number)
            if process == self._own:
                continue
            if kind == "ended":
                reason, code = json.loads(value)
                time.sleep(_GRACE_SECONDS)
                self._over(f"process {process} has ended: {reason}", code)
            before, since = self._heard.get(process, ("", now))
            if before != value or value == _DONE:
                self._heard[process] = value, now
            elif now - since > _SILENT_SECONDS and process not in self._said:
                self._said.add(process)
                _say(
                    f"process {process} has said nothing for {_SILENT_SECONDS} s; if it is dead, this ends "
                    f"within {HEARTBEAT_SECONDS} s"
                )

    def _over(self, reason: str, code: int) -> None:
        if _leaving.is_set():
            self._done.set()
            return
        _say(f"{reason}; this process ends too")
        _end(code)


def _say(text: str) -> None:
    """A line on standard error, past whatever Python has there."""
    os.write(2, f"\njetspec-jax: process {distributed.global_state.process_id}: {text}\n".encode())
