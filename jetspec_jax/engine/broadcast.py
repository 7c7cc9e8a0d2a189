"""Encodes what process 0 sends to all others as JSON types: the actions of its engine."""

import base64
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from jetspec_jax.engine.programs import Kind, Program
from jetspec_jax.engine.records import Adjusting, Admission, Batch, Chunk, Growth, SlotCopy
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams

_RECORDS: dict[str, Any] = {
    record.__name__: record
    for record in (
        Adjusting,
        Admission,
        Batch,
        Chunk,
        EngineSize,
        Growth,
        Kind,
        Program,
        SamplingParams,
        SlotCopy,
        StructuredOutputsParams,
    )
}


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
