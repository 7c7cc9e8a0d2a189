"""The type checker behind the jaxtyping hook of ``conftest.py``: beartype, with one exception.

JAX rebuilds pytree dataclasses with leaves that are no arrays of the annotated shape: shapes,
``ShapeDtypeStruct``, batched values under ``vmap``, stacked ones out of ``scan``. What JAX rebuilds
passes unchecked; what our own code constructs or calls is always checked. (A compiled function's
results are rebuilt in its caller's name, so there the exception does not apply.)
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Self

import beartype

# An int will do for a float, as for every type checker. Self has no meaning to what sees one method.
CONF = beartype.BeartypeConf(is_pep484_tower=True, hint_overrides=beartype.FrozenDict({Self: Any}))

JAX_PACKAGES = ("jax", "flax")


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks every call of ``function``, unless it is an ``__init__`` that JAX calls."""
    checked = beartype.beartype(function, conf=CONF)
    if function.__name__ != "__init__":
        return checked

    @functools.wraps(function)
    def init(*args: Any, **kwargs: Any) -> Any:
        return (function if _caller() in JAX_PACKAGES else checked)(*args, **kwargs)

    return init


def _caller() -> str:
    """The top-level package of the code that constructs the object."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("jaxtyping."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0]
