"""Seconds of a call and of a compilation, and the most memory that was in use."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def seconds_of(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds until all that a call returns is there, and what it returns."""
    jax.block_until_ready(arguments)
    started = time.perf_counter()
    result = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - started, result


def compile_seconds(function: Any, *arguments: Any) -> tuple[float, Any]:
    """Seconds to trace and compile a jitted function for its arguments, and the program."""
    started = time.perf_counter()
    program = function.lower(*arguments).compile()
    return time.perf_counter() - started, program


def median(values: Sequence[float]) -> float:
    """The median as a plain float."""
    return float(statistics.median(values))


def on_gpu() -> bool:
    """Whether the device is a GPU, whose clock tells kernels apart."""
    return jax.default_backend() == "gpu"


def peak_bytes(device: Any = None) -> int | None:
    """The most bytes that the process had in use on a device; None if the device does not say.

    Args:
        device: Which; None is the first.
    """
    return ((device or jax.devices()[0]).memory_stats() or {}).get("peak_bytes_in_use")
