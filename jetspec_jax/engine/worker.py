"""A worker process: runs the batches that process 0 schedules, on its own devices."""

import contextlib
from typing import Any

from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.broadcast import receive
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.grammars import WorkerMatchers
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.serving import Group


def run_worker(group: Group, plan: EnginePlan) -> None:
    """Runs the broadcasts of process 0 until it closes.

    A worker does not wait for its devices, except for batches with grammars: process 0 waits before it
    schedules again.

    Args:
        group: The models.
        plan: The engine plan, as in process 0.

    Raises:
        RuntimeError: An error ended process 0.
        OutOfStep: Process 0 does something else.
    """
    loop, grammars = group.loop, WorkerMatchers(group.target)
    engine: Any = None
    while True:
        action, values = receive()
        if action == "end":
            [reason] = values
            if reason is not None:
                raise RuntimeError(f"process 0 has stopped serving: {reason}")
            return
        # Process 0 gets the same error, fails the requests, and continues.
        with contextlib.suppress(DeviceMemoryError):
            if action == "engine":
                engine = None
                loop.free()
                loop.engine = engine = Engine(plan, group.weights)
            elif action == "batch":
                [batch] = values
                engine.runner.launch(batch, matchers=grammars.begin(batch))
                if batch.masked:
                    grammars.end(batch, engine.runner.collect().tokens)
                engine.runner.in_flight.clear()
            elif action == "compile":
                kinds, scores = values
                engine.compile(kinds, scores=scores)
            else:
                engine.extend(*values)
