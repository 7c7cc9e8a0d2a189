"""Broadcasts from process 0 to its workers: an action and its records, as JSON."""

import base64
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from jetspec_jax.device.processes import agreed
from jetspec_jax.engine.extras import Extras
from jetspec_jax.engine.programs import Kind
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
        Extras,
        Growth,
        Kind,
        SamplingParams,
        SlotCopy,
        StructuredOutputsParams,
    )
}
_ABOUT = "a broadcast of process 0"


def send(action: str, *values: Any) -> None:
    """Sends an action to all workers; called by process 0 only. Workers wait for it in `receive`."""
    agreed([action, pack(values)], _ABOUT)


def receive() -> tuple[str, tuple[Any, ...]]:
    """The next action of process 0; waits as long as that process lives.

    Raises:
        OutOfStep: Process 0 does something else.
    """
    message: Any = agreed(None, _ABOUT)
    return message[0], unpack(message[1])


def pack(value: Any) -> Any:
    """Encodes numbers, texts, arrays, tuples and records as JSON types.

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
        fields = vars(value) if is_dataclass(value) else value._asdict()
        return {"record": kind, "fields": {key: pack(field) for key, field in fields.items()}}
    if isinstance(value, tuple | list):
        return [pack(item) for item in value]
    raise TypeError(f"{kind} cannot be broadcast between processes")


def unpack(value: Any) -> Any:
    """The inverse of `pack`; lists become tuples."""
    if isinstance(value, list):
        return tuple(map(unpack, value))
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = np.frombuffer(base64.b64decode(value["array"]), value["dtype"])
        return array.reshape(value["shape"])[()]  # an array without axes becomes a scalar
    return _RECORDS[value["record"]](**{key: unpack(field) for key, field in value["fields"].items()})
