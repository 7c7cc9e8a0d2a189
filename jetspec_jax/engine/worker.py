"""Processes that share devices: process 0 has the engine, and the others run all that its runner does.

Process 0 sends actions, as JSON types.
"""

import base64
import contextlib
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.processes import ProgramEnded, agreed, compare, spans
from jetspec_jax.engine.batch import Adjusting, Admission, Batch, Chunk, Growth, Kind, Program, SlotCopy
from jetspec_jax.engine.plan import EnginePlan, check_engine_memory
from jetspec_jax.engine.runner import Runner
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams

_ABOUT = "the engine of process 0"
_SENT = (Adjusting, Admission, Batch, Chunk, EngineSize, Growth, Kind, Program, SlotCopy)
_RECORDS: dict[str, Any] = {each.__name__: each for each in (*_SENT, SamplingParams, StructuredOutputsParams)}


class Workers:
    """The other processes that share a mesh, as process 0 sees them."""

    def __init__(self, mesh: Mesh | None):
        #: Whether there are any.
        self.there = spans(mesh)

    def send(self, action: str, *values: Any) -> None:
        """Sends an action, which `follow` runs, to all of them, if there are any."""
        if self.there:
            agreed([action, pack(values)], _ABOUT)


def follow(plan: EnginePlan, weights: DecodeWeights) -> None:
    """Runs the actions of process 0 until its LLM is closed, or its program ends.

    A worker does not wait for its devices. Raises OutOfStep if process 0 does something else.
    """
    runner = None
    with contextlib.suppress(ProgramEnded):
        while True:
            message: Any = agreed(None, _ABOUT)
            action, values = message[0], unpack(message[1])
            if action == "end":
                return
            # Process 0 gets the same error of a lack of memory, and sends what follows from it.
            with contextlib.suppress(DeviceMemoryError):
                runner = _act(runner, plan, weights, action, values)


def _act(
    runner: Runner | None, plan: EnginePlan, weights: DecodeWeights, action: str, values: tuple[Any, ...]
) -> Runner | None:
    """Runs an action; returns the runner after it."""
    if action == "open":
        plan = replace(plan, size=values[0])
        check_engine_memory(plan)
        return Runner(plan, weights)
    if runner is None:  # process 0 has none either: the devices could not hold it
        return None
    if action == "free":
        runner.free()
        return None
    if action == "batch":
        runner.launch(*values)
        runner.in_flight.clear()
    elif action == "compile":
        runner.compiler.compile(*values)
    elif action == "score":
        runner.score(*values)
    return runner


def check_alike(plan: EnginePlan) -> None:
    """Raises ValueError, in every process that shares the mesh, if their engines differ: it says how."""
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


def pack(value: Any) -> Any:
    """Encodes numbers, texts, arrays, tuples, lists, mappings and records as JSON types; else TypeError."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        data = base64.b64encode(array.tobytes()).decode("ascii")
        return {"array": data, "dtype": array.dtype.str, "shape": array.shape}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    if _RECORDS.get(kind) is type(value):
        names = [each.name for each in fields(value)] if is_dataclass(value) else value._fields
        return {"record": kind, "fields": {name: pack(getattr(value, name)) for name in names}}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [pack(item) for item in value]}
    if isinstance(value, dict):
        return {"items": [[pack(key), pack(item)] for key, item in value.items()]}
    raise TypeError(f"{kind} cannot be broadcast between processes")


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(unpack, value["tuple"]))
    if "items" in value:
        return {unpack(key): unpack(item) for key, item in value["items"]}
    if "array" in value:
        array = np.frombuffer(base64.b64decode(value["array"]), value["dtype"])
        return array.reshape(value["shape"])[()]  # an array without axes becomes a scalar
    return _RECORDS[value["record"]](**{key: unpack(field) for key, field in value["fields"].items()})
