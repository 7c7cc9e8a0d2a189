"""Seconds of a call and of a compilation, and peak memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def seconds_of(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds until the whole result of a call is ready, and the result."""
    jax.block_until_ready(arguments)
    started = time.perf_counter()
    result = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - started, result


def compile_seconds(function: Any, *arguments: Any) -> tuple[float, Any]:
    """Seconds to trace and compile a jitted function for some arguments, and the program."""
    started = time.perf_counter()
    program = function.lower(*arguments).compile()
    return time.perf_counter() - started, program


def median(values: Sequence[float]) -> float:
    """The median as a Python float."""
    return float(statistics.median(values))


def on_gpu() -> bool:
    """Whether the default device is a GPU, whose profiler times single kernels."""
    return jax.default_backend() == "gpu"


def peak_bytes(device: Any = None) -> int | None:
    """The peak bytes in use on a device, by default the first; None if the device does not report it."""
    return ((device or jax.devices()[0]).memory_stats() or {}).get("peak_bytes_in_use")
