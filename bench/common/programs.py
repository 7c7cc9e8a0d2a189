"""Compiles programs in parallel, runs them in bursts, and times their kernels with the GPU's clock."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from bench.common.kernel_trace import Kernel, trace_kernels
from bench.common.timing import median, on_gpu, seconds_of
from jetspec_jax.progress import Progress

# XLA releases Python's lock while it compiles.
WORKERS = max(2, min(16, os.cpu_count() or 2))
# Errors for a kernel that cannot be compiled: the first is XLA's, the others are Pallas's.
UNCOMPILABLE = (jax.errors.JaxRuntimeError, NotImplementedError, ValueError)
# A burst is this much work: enough for the device to clock up, and for the host's launches to be hidden.
BURST_SECONDS = 5e-3
MOST_DISPATCHES = 64
# The pause between two programs of one trace. Gaps inside a program are always shorter.
PAUSE_SECONDS = 10e-3
GAP_NS = 0.5e9 * PAUSE_SECONDS

#: A function and its arguments.
Job = tuple[Callable[..., Any], tuple[Any, ...]]


class LayerTime(NamedTuple):
    """Microseconds of one layer.

    Attributes:
        micros: The sum over its kernels by the GPU's clock; without a GPU equal to ``wall``.
        wall: The time by the host's clock.
        kernels: The time of each kernel; empty without a GPU.
    """

    micros: float
    wall: float
    kernels: dict[str, float]


@dataclass
class Program:
    """A compiled chain of layers, with its arguments, its number of layers, and its dispatches per burst."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    layers: int
    dispatches: int = 1

    def warm_up(self) -> Any:
        """Runs the program, sets the number of dispatches per burst, and returns the result."""
        result = jax.block_until_ready(self.call(*self.arguments))
        seconds, _ = seconds_of(self.call, *self.arguments)
        self.dispatches = max(1, min(MOST_DISPATCHES, round(BURST_SECONDS / seconds)))
        return result

    def burst(self) -> Any:
        """Dispatches the program ``dispatches`` times; returns the last result."""
        result = None
        for _ in range(self.dispatches):
            result = self.call(*self.arguments)
        return result

    def wall_micros(self) -> float:
        """Microseconds of a layer in a burst by the host's clock, with launches and gaps."""
        return 1e6 * seconds_of(self.burst)[0] / (self.dispatches * self.layers)


def compile_together(jobs: Sequence[Job], step: Callable[[], object]) -> list[Any]:
    """The program of each job, or the error if it could not be compiled; ``step`` is called after each."""

    def compiled(job: Job) -> Any:
        function, arguments = job
        try:
            return jax.jit(function).lower(*arguments).compile()
        except UNCOMPILABLE as error:
            return error

    programs = []
    with ThreadPoolExecutor(WORKERS) as pool:
        for program in pool.map(compiled, jobs):
            programs.append(program)
            step()
    return programs


def time_together(
    jobs: Sequence[Job], layers: Sequence[int], counted: Sequence[str | None], repeats: int, title: str
) -> list[LayerTime]:
    """Times chains of layers in interleaved bursts.

    Args:
        layers: The number of layers in each.
        counted: For each chain, a part of the names of the kernels that count; None counts all.
        repeats: Bursts timed by the host's clock.
    """
    with Progress(total=len(jobs) * (2 + repeats), desc=title, unit="step") as bar:
        programs = []
        for call, (_, arguments), count in zip(compile_together(jobs, bar.update), jobs, layers, strict=True):
            if isinstance(call, Exception):
                raise call
            programs.append(Program(call, arguments, count))
        for program in programs:
            program.warm_up()
            bar.update()
        walls: list[list[float]] = [[] for _ in programs]
        for _ in range(repeats):
            for program, wall in zip(programs, walls, strict=True):
                wall.append(program.wall_micros())
                bar.update()
    kernels: list[dict[str, float]] = [{} for _ in programs]
    if on_gpu():
        for name in dict.fromkeys(counted):
            indices = [i for i, other in enumerate(counted) if other == name]
            for i, micros in zip(indices, kernel_micros([programs[i] for i in indices], name), strict=True):
                kernels[i] = micros
    return [
        LayerTime(sum(micros.values()) or median(wall), median(wall), micros)
        for wall, micros in zip(walls, kernels, strict=True)
    ]


def kernel_micros(programs: Sequence[Program], name: str | None) -> list[dict[str, float]]:
    """Microseconds of a layer by kernel, from the GPU's clock in one burst of each program.

    A kernel's time is the median of its launches times their number, which excludes a slow first launch.

    Args:
        programs: The programs, warmed up.
        name: A part of the names of the kernels that count; None counts all.

    Raises:
        RuntimeError: A program launched no kernel of that name.
    """
    if not programs:
        return []
    found = []
    for program, kernels in zip(programs, trace_apart([p.burst for p in programs]), strict=True):
        durations: dict[str, list[float]] = {}
        for kernel in kernels:
            if name is None or name in kernel.name:
                durations.setdefault(kernel.name, []).append(kernel.duration_ns)
        if not durations:
            names = ", ".join(sorted({kernel.name for kernel in kernels})) or "none at all"
            raise RuntimeError(f"no kernel in the trace is called {name!r}; there are: {names}")
        runs = program.dispatches * program.layers
        found.append({key: 1e-3 * median(times) * len(times) / runs for key, times in durations.items()})
    return found


def trace_apart(runs: Sequence[Callable[[], Any]]) -> list[list[Kernel]]:
    """The kernels that each run launches on the GPU.

    All runs share a trace, because starting and stopping a trace takes longer than a run. Pauses separate the
    runs. If the trace has other pauses too, every run is traced again alone.
    """

    def run_all() -> None:
        for run in runs:
            jax.block_until_ready(run())
            time.sleep(PAUSE_SECONDS)

    groups = split_at_pauses(trace_kernels(run_all))
    if len(groups) == len(runs):
        return groups
    return [trace_kernels(run) for run in runs]


def split_at_pauses(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Groups of kernels, separated by gaps of at least `GAP_NS` in which no kernel ran."""
    groups: list[list[Kernel]] = []
    end = float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        if kernel.start_ns - end > GAP_NS:
            groups.append([])
        groups[-1].append(kernel)
        end = max(end, kernel.start_ns + kernel.duration_ns)
    return groups
