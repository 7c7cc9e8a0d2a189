"""Broadcasts from process 0 to all others: the actions of its engine, and the results of calls, as JSON."""

import base64
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.device.processes import agreed, is_first, spans
from jetspec_jax.engine.extras import Extras
from jetspec_jax.engine.logprobs import Logprob
from jetspec_jax.engine.metrics import RequestMetrics
from jetspec_jax.engine.output import Completion
from jetspec_jax.engine.programs import Kind, Program
from jetspec_jax.engine.records import Adjusting, Admission, Batch, Chunk, Growth, SlotCopy
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams

_RECORDS: dict[str, Any] = {
    record.__name__: record
    for record in (
        Adjusting,
        Admission,
        Batch,
        Chunk,
        Completion,
        Extras,
        Growth,
        Kind,
        Logprob,
        Program,
        RequestMetrics,
        SamplingParams,
        SlotCopy,
        StructuredOutputsParams,
    )
}
_ERRORS = {kind.__name__: kind for kind in (DeviceMemoryError, RuntimeError, TypeError, ValueError)}
#: The call that broadcasts: a process receives broadcasts of the same call only.
CALL = ContextVar("call", default="an AsyncLLM")


def sends(mesh: Mesh | None) -> bool:
    """Whether this process schedules for all processes that share a mesh."""
    return spans(mesh) and is_first()


def send(action: str, *values: Any) -> None:
    """Sends an action to all other processes; called by process 0 only."""
    agreed([action, pack(values)], CALL.get())


def send_end(result: Any = None, error: BaseException | None = None) -> None:
    """Sends the end of a call, with its result or its error."""
    names = [kind.__name__ for kind in type(error).__mro__] if error is not None else [""]
    send("end", result, next((name for name in names if name in _ERRORS), names[0]), str(error or ""))


def receive() -> tuple[str, tuple[Any, ...]]:
    """The next action of process 0; waits as long as that process lives.

    Raises:
        OutOfStep: Process 0 does something else.
    """
    message: Any = agreed(None, CALL.get())
    return message[0], unpack(message[1])


def result_of(result: Any, kind: str, text: str) -> Any:
    """The result in an "end" of process 0.

    Raises:
        Exception: The error in it: of the first of its types that is known here, else a RuntimeError.
    """
    if not kind:
        return result
    raise _ERRORS[kind](text) if kind in _ERRORS else RuntimeError(f"process 0 raised {kind}: {text}")


def pack(value: Any) -> Any:
    """Encodes numbers, texts, arrays, tuples, lists, mappings and records as JSON types.

    Raises:
        TypeError: The value has another type.
    """
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
