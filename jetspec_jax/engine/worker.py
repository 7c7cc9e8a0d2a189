"""Calls of several processes that share a model: process 0 schedules, and all run its batches."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from jax.sharding import Mesh

from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.device.processes import OutOfStep, is_first, shared_cancel, spans
from jetspec_jax.engine.broadcast import CALL, receive, result_of, send_end
from jetspec_jax.engine.call import Call
from jetspec_jax.engine.grammars import WorkerMatchers
from jetspec_jax.engine.records import Batch
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.runner import Decode, Runner

T = TypeVar("T")
# Numbers of `SharedRequest`s, equal in all processes.
_REQUEST_NUMBERS = itertools.count(1)


def in_all_processes(call: Call, about: str, work: Callable[[], T], decode: Decode | None = None) -> T:
    """Runs a function in process 0, and the batches that it launches in all processes.

    All processes that share the models make this call. If one process has them alone, it runs the function.

    Args:
        call: A call of the function, with the plan of any engine that it makes.
        about: A description of the call, the same in all processes.
        work: The function; its result, which all processes get, has a type that `broadcast.pack` encodes.
        decode: Runs the rounds of the batches; None is the decoder that process 0 chooses.

    Raises:
        OutOfStep: Another process makes another call.
        Exception: The function's error, in all processes.
    """
    if not spans(call.loop.mesh):
        return work()
    token = CALL.set(about)
    try:
        if not is_first():
            return run_worker(call, decode)
        result = work()
        send_end(result)
        return result
    except OutOfStep:
        raise
    except Exception as error:
        if is_first():
            send_end(error=error)
        raise
    finally:
        CALL.reset(token)


class SharedRequest:
    """A request with several calls, all of which all processes make, until process 0 cancels it."""

    def __init__(self, mesh: Mesh | None, request: Request):
        """All processes make it, in the same order."""
        #: Whether several processes share the models.
        self.shared, self._request, self._about = spans(mesh), request, ""
        if self.shared:
            self._about = f"a step of request {next(_REQUEST_NUMBERS)}"
            request.on_cancel = shared_cancel(request)

    def run(self, call: Call, work: Callable[[], T], decode: Decode | None = None) -> T | None:
        """As `in_all_processes`; None if process 0 has cancelled the request."""
        try:
            return in_all_processes(call, self._about, work, decode)
        except OutOfStep:
            if not self._request.cancelled:
                raise
            return None


def run_worker(call: Call, decode: Decode | None = None) -> Any:
    """Runs the broadcasts of process 0 to the end of its call.

    A worker does not wait for its devices, except for batches with grammars: process 0 waits before it
    schedules again.

    Returns the call's result; see `in_all_processes`.

    Raises:
        OutOfStep: Process 0 does something else.
        Exception: The call's error in process 0.
    """
    loop = call.loop
    while True:
        action, values = receive()
        if action == "end":
            return result_of(*values)
        # Process 0 gets the same error, and sends what follows from it.
        with contextlib.suppress(DeviceMemoryError):
            engine: Any = loop.engine
            if action == "engine":
                loop.make_engine(call)
            elif action == "free":
                loop.drop_idle()
            elif action == "batch":
                [batch] = values
                _run_batch(engine.runner, batch, loop.grammars, decode)
            elif action == "compile":
                engine.compiler.compile(*values)
            else:
                engine.extend(*values)


def _run_batch(runner: Runner, batch: Batch, grammars: WorkerMatchers | None, decode: Decode | None) -> None:
    assert grammars is not None or not batch.masked, "workers of given engines support no grammars"
    runner.launch(batch, decode, matchers=None if grammars is None else grammars.begin(batch))
    if grammars is not None and batch.masked:
        grammars.end(batch, runner.collect().tokens)
    runner.in_flight.clear()
