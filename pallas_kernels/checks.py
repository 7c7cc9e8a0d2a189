"""What is wrong with a call or a configuration: found before work starts, and reported all at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

#: What kernels compute with.
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
#: A name, the array that was given under it or None, and the shape and dtype that it must have. The dtype may
#: also be a kind, such as `jnp.floating`, or a tuple of several of which any will do.
Expected = tuple[str, Array | None, tuple[int, ...], Any]


def refuse(what: str, wrong: Sequence[str]) -> None:
    """Raises a ValueError that lists all that is `wrong` with `what`, unless that is nothing."""
    if wrong:
        raise ValueError(f"{what}: {'; '.join(wrong)}")


def wrong_arrays(*expected: Expected, empty: bool = True) -> list[str]:
    """What is wrong with the arrays of a call that were given, which may be `empty` or not."""
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
    """Checks the settings of a kernel.

    Args:
        config: Has them as attributes.
        powers: Of those that must be a power of two, the least.
        counts: Those that must be at least 1.

    Raises:
        ValueError: Naming every setting that is out of its range.
    """
    given = {name: getattr(config, name) for name in (*powers, *counts)}
    wrong = [
        f"{name} must be a power of two of at least {least}, not {given[name]}"
        for name, least in powers.items()
        if given[name] < least or given[name] & (given[name] - 1)
    ]
    wrong += [f"{name} must be at least 1, not {given[name]}" for name in counts if given[name] < 1]
    refuse("Config", wrong)
