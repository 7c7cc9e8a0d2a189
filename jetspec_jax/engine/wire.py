"""What the scheduler of the first process tells the others: records as JSON."""

import base64
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from jetspec_jax.device.processes import agreed
from jetspec_jax.engine.extras import Extras
from jetspec_jax.engine.records import Adjusting, Admission, Batch, Chunk, Growth, SlotCopy
from jetspec_jax.engine.wants import Kind
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams

_RECORDS: dict[str, Any] = {
    own.__name__: own
    for own in (
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
_ABOUT = "what process 0 decides"


def tell(what: str, *values: Any) -> None:
    """Tells all other processes to do something; called by the first alone. They wait for it in `hear`."""
    agreed([what, pack(values)], _ABOUT)


def hear() -> tuple[str, tuple[Any, ...]]:
    """What the first process tells; waits for it as long as that lives.

    Raises:
        OutOfStep: It does something else.
    """
    said: Any = agreed(None, _ABOUT)
    return said[0], unpack(said[1])


def pack(value: Any) -> Any:
    """A value of numbers, texts, arrays, tuples and records, in JSON's types.

    Raises:
        TypeError: It has something else.
    """
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        data = base64.b64encode(array.tobytes()).decode("ascii")
        return {"array": data, "dtype": array.dtype.str, "shape": array.shape}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):
        fields = vars(value) if is_dataclass(value) else value._asdict()
        return {"record": name, "fields": {key: pack(own) for key, own in fields.items()}}
    if isinstance(value, tuple | list):
        return [pack(own) for own in value]
    raise TypeError(f"{name} is nothing that processes tell each other")


def unpack(value: Any) -> Any:
    """The inverse of `pack`; of lists there are tuples."""
    if isinstance(value, list):
        return tuple(map(unpack, value))
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = np.frombuffer(base64.b64decode(value["array"]), value["dtype"])
        return array.reshape(value["shape"])[()]  # of no axes it is a number again
    return _RECORDS[value["record"]](**{key: unpack(own) for key, own in value["fields"].items()})
