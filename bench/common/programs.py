"""Programs of many kernels: compiled side by side, run in bursts, timed by the GPU's own clock."""

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

# XLA does not hold Python's lock while it compiles.
WORKERS = max(2, min(16, os.cpu_count() or 2))
# What a compiler says of a kernel that it cannot make: XLA the one, Pallas the others.
UNCOMPILABLE = (jax.errors.JaxRuntimeError, NotImplementedError, ValueError)
# A program is dispatched until this much work is under way: the device is awake, and the host does not show.
BURST_SECONDS = 5e-3
MOST_DISPATCHES = 64
# Between two programs of one trace nothing runs for so long; inside a program something always runs earlier.
PAUSE_SECONDS = 10e-3
GAP_NS = 0.5e9 * PAUSE_SECONDS

#: A function and its arguments.
Job = tuple[Callable[..., Any], tuple[Any, ...]]


class LayerTime(NamedTuple):
    """Of one layer, in microseconds.

    Attributes:
        micros: By the GPU's clock, the sum over its kernels; where there is no GPU, as ``wall``.
        wall: By the host's clock.
        kernels: By kernel; empty where there is no GPU.
    """

    micros: float
    wall: float
    kernels: dict[str, float]


@dataclass
class Program:
    """A compiled chain of layers, and its arguments.

    Attributes:
        call: The compiled program.
        arguments: What it takes.
        layers: How many layers a dispatch computes.
        dispatches: Of a burst.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    layers: int
    dispatches: int = 1

    def warm_up(self) -> Any:
        """Runs it, and finds out how long a burst must be; returns its result."""
        result = jax.block_until_ready(self.call(*self.arguments))
        seconds, _ = seconds_of(self.call, *self.arguments)
        self.dispatches = max(1, min(MOST_DISPATCHES, round(BURST_SECONDS / seconds)))
        return result

    def burst(self) -> Any:
        """Dispatches it some times in a row; the last result."""
        result = None
        for _ in range(self.dispatches):
            result = self.call(*self.arguments)
        return result

    def wall_micros(self) -> float:
        """Microseconds of a layer in a burst, by the host's clock: launches and gaps are in it."""
        return 1e6 * seconds_of(self.burst)[0] / (self.dispatches * self.layers)


def compile_together(jobs: Sequence[Job], step: Callable[[], object]) -> list[Any]:
    """Compiles functions for their arguments, some at a time.

    Args:
        jobs: Functions, and the arguments that each is for.
        step: Called after each.

    Returns:
        For each job its program, or the error if it could not be compiled.
    """

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
    """Times chains of layers, in bursts that take turns.

    Args:
        jobs: The chains.
        layers: Of each.
        counted: Part of the names of the kernels that count in each; None if all do.
        repeats: Bursts by the host's clock.
        title: Of the progress bar.
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
            own = [i for i, other in enumerate(counted) if other == name]
            for i, micros in zip(own, kernel_micros([programs[i] for i in own], name), strict=True):
                kernels[i] = micros
    return [
        LayerTime(sum(own.values()) or median(wall), median(wall), own)
        for wall, own in zip(walls, kernels, strict=True)
    ]


def kernel_micros(programs: Sequence[Program], name: str | None) -> list[dict[str, float]]:
    """Microseconds of a layer by kernel, as the GPU timed them in one burst of each program.

    A kernel's time is the median over its launches times their number, so that a slow first one does not
    count.

    Args:
        programs: The programs, warmed up.
        name: Part of the names of the kernels that count; None if all do.

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
        found.append({key: 1e-3 * median(own) * len(own) / runs for key, own in durations.items()})
    return found


def trace_apart(runs: Sequence[Callable[[], Any]]) -> list[list[Kernel]]:
    """What each of some runs launches on the GPU.

    One trace serves all of them, because to begin and end one takes longer than a run: pauses tell the runs
    apart. If something else paused, each run gets a trace of its own.
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
    """Kernels in groups, between which nothing ran for some milliseconds."""
    groups: list[list[Kernel]] = []
    end = float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        if kernel.start_ns - end > GAP_NS:
            groups.append([])
        groups[-1].append(kernel)
        end = max(end, kernel.start_ns + kernel.duration_ns)
    return groups
