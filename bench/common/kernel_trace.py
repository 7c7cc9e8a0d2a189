"""The kernels that run on a GPU during rounds, by class, from a trace of JAX's profiler.

A trace has a plane per device. A GPU's plane has a line per stream, with its kernels and copies, and further
lines that XLA derives from them ("XLA Ops", "XLA Modules", "Steps"). Only streams are read: with the derived
lines every kernel would count twice. Other devices have no streams, and therefore no kernels here.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

# The first pattern that matches a kernel's name, in lower case, decides. XLA names a kernel after its HLO
# instruction, libraries after their templates, Pallas after the `name` of the call.
CLASSES: tuple[tuple[str, str], ...] = (
    ("collectives", r"nccl|all_?reduce|all_?gather|psum|peer_sum"),
    ("tree attention", r"attention|flash|fmha"),
    ("tree growth", r"grow|tree_build|build_tree"),
    ("experts", r"expert"),
    ("matmul", r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|matmul|(\b|_)dot(\b|_)"),
    ("top-k, sort", r"top_?k|sort|select_?k|radix"),
    ("commit, scatter", r"commit|paged_write|scatter|dynamic_update_slice"),
    ("norm, rotary, softmax", r"softmax|norm|rsqrt|rotary"),
    ("reduce, argmax", r"reduc|argmax"),
    ("copy, memset", r"memcpy|memset|copy|transpose"),
    ("gather", r"gather|dynamic_slice"),
    ("element-wise", r"fusion|wrapped_|activation|quantize"),
)
OTHER = "other"
TOP = 25


class Kernel(NamedTuple):
    """One launch on a device."""

    name: str
    start_ns: float
    duration_ns: float


def classify(name: str) -> str:
    """The class of a kernel."""
    lowered = name.lower()
    return next((kind for kind, pattern in CLASSES if re.search(pattern, lowered)), OTHER)


def trace_kernels(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels that ``run`` launches on the first GPU until its result is ready; empty without a GPU."""
    options = jax.profiler.ProfileOptions()
    # Events of Python and of the host would make the trace large and the host slow.
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        return [
            kernel
            for path in sorted(Path(folder).rglob("*.xplane.pb"))
            for kernel in kernels_of(ProfileData.from_file(str(path)))
        ]


def kernels_of(data: Any) -> list[Kernel]:
    """The kernels and copies on the streams of the first GPU; the other GPUs of a mesh run the same ones."""
    planes = sorted((p for p in data.planes if p.name.startswith("/device:GPU:")), key=lambda p: p.name)
    return [
        Kernel(event.name, event.start_ns, event.duration_ns)
        for plane in planes[:1]
        for line in plane.lines
        if line.name.startswith("Stream #")
        for event in line.events
    ]


def summarise(kernels: Sequence[Kernel], rounds: int) -> dict[str, Any]:
    """Microseconds and launches per round by class, the idle time, and the longest kernels.

    Kernels on two streams may overlap, so the classes may sum to more than ``busy_us``.
    """
    launches = Counter(kernel.name for kernel in kernels)
    micros = dict.fromkeys(launches, 0.0)
    for kernel in kernels:
        micros[kernel.name] += kernel.duration_ns / 1e3
    classes = {
        kind: {
            "us": sum(micros[name] for name in names) / rounds,
            "launches": sum(launches[name] for name in names) / rounds,
        }
        for kind in (*(kind for kind, _ in CLASSES), OTHER)
        if (names := [name for name in micros if classify(name) == kind])
    }
    busy = _union(kernels) / 1e3
    span = (max(k.start_ns + k.duration_ns for k in kernels) - min(k.start_ns for k in kernels)) / 1e3
    return {
        "classes": classes,
        "launches": len(kernels) / rounds,
        "busy_us": busy / rounds,
        "idle_us": (span - busy) / rounds,
        "top": [
            {
                "kernel": name,
                "class": classify(name),
                "us": total / rounds,
                "launches": launches[name] / rounds,
                "mean_us": total / launches[name],
            }
            for name, total in sorted(micros.items(), key=lambda item: -item[1])[:TOP]
        ],
    }


def kernel_tables(profile: Mapping[str, Any], name: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Titled tables of `summarise`: the kernels by class, and the longest ones."""
    classes = {
        **profile["classes"],
        "(busy)": {"us": profile["busy_us"], "launches": profile["launches"]},
        "(idle)": {"us": profile["idle_us"], "launches": 0.0},
    }
    longest = [
        {
            "kernel": part["kernel"][:60],
            "class": part["class"],
            "us": part["us"],
            "launches": part["launches"],
            "mean us": part["mean_us"],
        }
        for part in profile["top"]
    ]
    return [
        (f"Kernels by class of {name}", [{"class": kind, **part} for kind, part in classes.items()]),
        (f"The longest kernels of {name}", longest),
    ]


def _union(kernels: Iterable[Kernel]) -> float:
    """Nanoseconds in which at least one kernel ran."""
    busy, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        stop = kernel.start_ns + kernel.duration_ns
        busy += max(0.0, stop - max(kernel.start_ns, end))
        end = max(end, stop)
    return busy
