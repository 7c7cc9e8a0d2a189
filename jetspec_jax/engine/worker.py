"""Processes that share devices: process 0 has the engine, and the others run all that its runner does."""

import contextlib
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.processes import ProgramEnded, agreed, compare, spans
from jetspec_jax.engine.broadcast import pack, unpack
from jetspec_jax.engine.grammars import WorkerMatchers
from jetspec_jax.engine.memory import checked
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.records import Batch
from jetspec_jax.engine.runner import Runner

_ABOUT = "the engine of process 0"


class Workers:
    """The other processes that share a mesh, as process 0 sees them."""

    def __init__(self, mesh: Mesh | None):
        #: Whether there are any.
        self.there = spans(mesh)

    def send(self, action: str, *values: Any) -> None:
        """Sends an action, which `follow` runs, to all of them, if there are any."""
        if self.there:
            agreed([action, pack(values)], _ABOUT)


def follow(target: Target, plan: EnginePlan, weights: DecodeWeights) -> None:
    """Runs the actions of process 0 until it closes its engine for good, or its program ends.

    A worker does not wait for its devices, except for batches with grammars: process 0 waits before it
    schedules again.

    Raises:
        OutOfStep: Process 0 does something else.
    """
    runner, matchers = None, WorkerMatchers(target)
    with contextlib.suppress(ProgramEnded):
        while True:
            message: Any = agreed(None, _ABOUT)
            action, values = message[0], unpack(message[1])
            if action == "end":
                return
            # Process 0 gets the same error of a lack of memory, and sends what follows from it.
            with contextlib.suppress(DeviceMemoryError):
                runner = _act(runner, matchers, plan, weights, action, values)


def _act(
    runner: Runner | None,
    matchers: WorkerMatchers,
    plan: EnginePlan,
    weights: DecodeWeights,
    action: str,
    values: tuple[Any, ...],
) -> Runner | None:
    """Runs an action; returns the runner after it."""
    if action == "open":
        size, fewer_slots = values
        return Runner(checked(replace(plan, size=size), fewer_slots=fewer_slots), weights)
    if runner is None:  # process 0 has none either: the devices could not hold it
        return None
    if action == "free":
        runner.free()
        return None
    if action == "batch":
        _run_batch(runner, matchers, *values)
    elif action == "compile":
        runner.compiler.compile(*values)
    elif action == "score":
        runner.score(*values)
    return runner


def _run_batch(runner: Runner, matchers: WorkerMatchers, batch: Batch) -> None:
    runner.launch(batch, matchers=matchers.begin(batch))
    if batch.masked:
        matchers.end(batch, runner.collect().tokens)
    runner.in_flight.clear()


def check_alike(plan: EnginePlan) -> None:
    """Checks that all processes that share a mesh make the same engine.

    Raises:
        ValueError: They differ, raised in every process; the message lists all differences.
    """
    decoder = plan.decoder
    if spans(decoder.mesh):
        parts = {
            "the mesh": describe_mesh(decoder.mesh),
            "the target's config": decoder.target,
            "the draft head's config": decoder.proposer,
            "the size": plan.size,
            "the dtype": str(plan.dtype),
            "the budget": str(decoder.bucket),
            "the trees": (decoder.breadth, decoder.depth, decoder.algorithm, plan.least_nodes),
            "the implementation": str(decoder.implementation),
        }
        compare(parts, "a new engine", "an engine")
