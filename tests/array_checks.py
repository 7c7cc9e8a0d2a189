"""Calls of functions whose annotations name array types, and of dataclasses, are checked while tests run.

jaxtyping and beartype check them. Other functions are left to pyright: with them, two of the largest files of
tests took a fifth longer.

JAX rebuilds pytree dataclasses with leaves that are no arrays of the annotated shape: shapes,
``ShapeDtypeStruct``, batched values under ``vmap``, stacked ones out of ``scan``. What JAX rebuilds
passes unchecked; what our own code constructs or calls is always checked. (A compiled function's
results are rebuilt in its caller's name, so there the exception does not apply.)
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Self, get_args

import beartype
import jaxtyping
from jaxtyping import AbstractArray, jaxtyped
from jaxtyping import install_import_hook as _install_import_hook

# An int will do for a float, as for every type checker. Self has no meaning to what sees one method.
CONF = beartype.BeartypeConf(is_pep484_tower=True, hint_overrides=beartype.FrozenDict({Self: Any}))

JAX_PACKAGES = ("jax", "flax")


def install_import_hook(packages: list[str]) -> None:
    """Checks every module of ``packages`` that is imported from now on."""
    jaxtyping.jaxtyped = _jaxtyped_if_arrays  # the name of the decorator that the hook inserts everywhere
    _install_import_hook(packages, f"{__name__}.check")


def _jaxtyped_if_arrays(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorate(definition: Any) -> Any:
        checked = inspect.isclass(definition) or _names_arrays(definition)
        return jaxtyped(definition, typechecker=typechecker) if checked else definition

    return decorate


def _names_arrays(definition: Any) -> bool:
    function = getattr(definition, "fget", None) or inspect.unwrap(definition)
    return any(map(_may_hold_arrays, getattr(function, "__annotations__", {}).values()))


def _may_hold_arrays(annotation: Any) -> bool:
    """Whether an annotation has an array type in it, or is a text, which is not looked into."""
    if inspect.isclass(annotation):
        return issubclass(annotation, AbstractArray)
    return isinstance(annotation, str) or any(map(_may_hold_arrays, get_args(annotation)))


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
