"""Joins the processes of a program, and ends all of them when one ends early.

A process that fails or is interrupted announces it, and the others end within seconds. If a process dies
silently, `jax.distributed` ends the others: its heartbeats come from a thread that neither a compilation nor
Python can block.
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

#: Seconds without a heartbeat after which `jax.distributed` considers a process dead and ends the others.
HEARTBEAT_SECONDS = 15
# Seconds between checks of the other processes, and of silence before a warning.
# Heartbeats are sent at half of their timeout: a dead process is silent for at least as long before
# `jax.distributed` ends this one.
_LOOK_SECONDS, _SILENT_SECONDS = 0.5, 4
# Seconds for this process to report its error before it ends because of another's, and seconds that process
# 0, which holds the store, stays for the others to read its announcement.
_GRACE_SECONDS, _LINGER_SECONDS = 1.0, 2.5
_WATCH, _DONE = f"{ROOT}/watch", "done"
# Set when this process ends for its own reason, so that it is not ended because of another process.
_leaving = threading.Event()
#: Exit codes after an error and after an interrupt.
FAILED, INTERRUPTED = 1, 130


def join_processes(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Joins the other processes of a program; call it before any device is used.

    Afterwards `jax.devices` has the devices of all processes, and all processes end if one of them dies, is
    interrupted, or ends with an uncaught error.

    Args:
        coordinator: ``HOST:PORT`` of the first process, reachable by the others. None reads all three values
            from a cluster that JAX recognises, such as Slurm or Open MPI.
        processes: The number of processes.
        process: The index of this process, from 0.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is missing or out of range, or JAX recognises no cluster.
        RuntimeError: Devices were used before, or the processes could not connect.
    """
    meeting: dict[str, Any] = {}
    if coordinator is not None:
        check_type("coordinator", coordinator, str, "HOST:PORT")
        if processes is None or process is None:
            raise ValueError("a coordinator needs the number of processes, and the index of this process")
        count = check_integer("processes", processes, 1)
        index = check_integer("process", process, 0, count - 1)
        if not coordinator.rpartition(":")[2].isdigit() or ":" not in coordinator:
            raise ValueError(f"coordinator must be HOST:PORT, not {coordinator!r}")
        meeting = {
            "coordinator_address": coordinator,
            "num_processes": count,
            "process_id": index,
            # A detected cluster would otherwise choose this process's devices.
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
            raise ValueError(f"JAX knows no cluster here ({error}); give a coordinator, HOST:PORT") from error
    if distributed.global_state.num_processes == 1:
        return
    if distributed.global_state.process_id:
        progress.hide()
    watch = _Watch()
    threading.Thread(target=watch.run, name="other processes", daemon=True).start()
    atexit.register(_leave_at_exit, watch)


def leave(reason: str, code: int = FAILED) -> None:
    """Ends this process and, within seconds, all others, which show the reason; returns if there are none."""
    if announce(reason, code):
        _end(code)


def tell_of_interrupt() -> None:
    """Announces to all other processes that this one was interrupted, so that they end too."""
    announce("it was interrupted", INTERRUPTED)


def announce(reason: str, code: int = FAILED) -> bool:
    """Announces this process's end to the others, which end within seconds, and waits for them to read it.

    Returns whether there are other processes.
    """
    index, store = distributed.global_state.process_id, distributed.global_state.client
    if store is None or distributed.global_state.num_processes == 1:
        return False
    _leaving.set()
    try:
        store.key_value_set(f"{_WATCH}/ended/{index}", json.dumps([reason, code]), allow_overwrite=True)
    except jax.errors.JaxRuntimeError:
        return True  # the first process has ended, which the others notice too
    if index == 0:  # this process holds the store
        time.sleep(_LINGER_SECONDS)
    return True


def _end(code: int) -> NoReturn:
    """Ends the process at once: devices might wait for a process that has ended, and JAX for all to end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


def _leave_at_exit(watch: "_Watch") -> None:
    """Called when Python ends, before JAX waits for the other processes."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # in an interactive session the error did not end the program
        watch.stop()
        say_end()
    elif isinstance(error, KeyboardInterrupt):
        leave("it was interrupted", INTERRUPTED)
    else:
        leave(f"{type(error).__name__}: {error}")


class _Watch:
    """A thread that watches the entries of the other processes in the store."""

    def __init__(self) -> None:
        self._index: int = distributed.global_state.process_id
        self._store: Any = distributed.global_state.client
        self._done = threading.Event()
        self._last_seen: dict[int, tuple[str, float]] = {}
        self._reported: set[int] = set()

    def run(self) -> None:
        """Watches until the program ends."""
        looks = 0
        while not self._done.wait(_LOOK_SECONDS):
            looks += 1
            try:
                self._publish(str(looks))
                entries = self._store.key_value_dir_get(f"{_WATCH}/")
            except jax.errors.JaxRuntimeError:
                if self._done.is_set():
                    return
                self._end_with("process 0 has ended, or cannot be reached", FAILED)
                return
            self._check_entries({key.removeprefix(f"{_WATCH}/"): value for key, value in entries})

    def stop(self) -> None:
        """Stops watching at a regular end of the program, and marks this process as done."""
        self._done.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._publish(_DONE)

    def _publish(self, text: str) -> None:
        self._store.key_value_set(f"{_WATCH}/alive/{self._index}", text, allow_overwrite=True)

    def _check_entries(self, entries: dict[str, str]) -> None:
        now = time.monotonic()
        for key, value in sorted(entries.items()):
            kind, _, number = key.partition("/")
            process = int(number)
            if process == self._index:
                continue
            if kind == "ended":
                reason, code = json.loads(value)
                time.sleep(_GRACE_SECONDS)
                self._end_with(f"process {process} has ended: {reason}", code)
            before, since = self._last_seen.get(process, ("", now))
            if before != value or value == _DONE:
                self._last_seen[process] = value, now
            elif now - since > _SILENT_SECONDS and process not in self._reported:
                self._reported.add(process)
                _write_line(
                    f"process {process} has said nothing for {_SILENT_SECONDS} s; if it is dead, this "
                    f"process ends within {HEARTBEAT_SECONDS} s"
                )

    def _end_with(self, reason: str, code: int) -> None:
        if _leaving.is_set():
            self._done.set()
            return
        _write_line(f"{reason}; this process ends too")
        _end(code)


def _write_line(text: str) -> None:
    """Writes a line to file descriptor 2, bypassing Python's `sys.stderr`."""
    os.write(2, f"\njetspec-jax: process {distributed.global_state.process_id}: {text}\n".encode())
