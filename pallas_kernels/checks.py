"""Checks of calls and configurations, which report all faults at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

#: The types of the kernels' inputs.
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
#: An argument's name, its array or None, and the required shape and dtype. The dtype may also be a kind, such
#: as `jnp.floating`, or a tuple of alternatives.
Expected = tuple[str, Array | None, tuple[int, ...], Any]


def refuse(what: str, wrong: Sequence[str]) -> None:
    """Raises a ValueError that lists the faults of `what`, if there are any."""
    if wrong:
        raise ValueError(f"{what}: {'; '.join(wrong)}")


def wrong_arrays(*expected: Expected, empty: bool = True) -> list[str]:
    """The faults of a call's arrays; `empty` arrays may be allowed."""
    wrong = []
    for name, array, shape, dtype in expected:
        if array is None:
            continue
        if array.shape != shape:
            wrong.append(f"{name} is {array.shape}, expected {shape}")
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        if not any(jnp.issubdtype(array.dtype, each) for each in dtypes):
            names = ", ".join(str(getattr(each, "__name__", each)) for each in dtypes)
            wrong.append(f"{name} holds {array.dtype}, expected {names}")
        if array.size == 0 and not empty:
            wrong.append(f"{name} is {array.shape}: no elements")
    return wrong


def check_config(config: Any, *, powers: Mapping[str, int], counts: Sequence[str]) -> None:
    """Raises a ValueError that names all settings out of range; `powers` are least powers of two."""
    given = {name: getattr(config, name) for name in (*powers, *counts)}
    wrong = [
        f"{name} must be a power of two of at least {least}, not {given[name]}"
        for name, least in powers.items()
        if given[name] < least or given[name] & (given[name] - 1)
    ]
    wrong += [f"{name} must be at least 1, not {given[name]}" for name in counts if given[name] < 1]
    refuse("Config", wrong)
