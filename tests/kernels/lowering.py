"""What a kernel is lowered to for a GPU, on a machine without one too."""

import contextlib
import re
from collections import Counter

import jax

from pallas_kernels import shards

KERNEL = "__gpu$xla.gpu.triton"  # the name of every launch in the program
MOSAIC = "mosaic_gpu_v2"  # likewise of kernels on the Mosaic backend


def lower_for_gpu(function, *args, mesh=None):
    """The program of a call as text. Arguments may be mere shapes; a mesh is one that the program is for."""
    with _gpu_to_lower_for(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def launches(program):
    """Launches of Triton kernels by name in a program's text, whose functions are called many times."""
    bodies, name = {}, None
    for line in program.splitlines():
        if found := re.match(r"\s*func\.func \w+ @([\w.]+)\(", line):
            [name] = found.groups()
            bodies[name] = Counter(), Counter()
        elif name is not None:
            calls, kernels = bodies[name]
            calls.update(re.findall(r"\bcall @([\w.]+)\(", line))
            kernels.update(re.findall(rf'{re.escape(KERNEL)}.*?name = "(\w+)"', line))

    def count(name):
        calls, kernels = bodies[name]
        total = Counter(kernels)
        for called, times in calls.items():
            for kernel, each in count(called).items():
                total[kernel] += times * each
        return total

    return count("main")


def gpu_mesh(expert, tensor):
    axes = (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.AbstractMesh((expert, tensor), shards.ALL, axes, abstract_device=_gpu())


def _gpu_to_lower_for(mesh):
    """From JAX 0.11 a kernel is lowered for a device, present or named; before, for any."""
    if jax.__version_info__ < (0, 11) or jax.default_backend() == "gpu" or mesh is not None:
        return contextlib.nullcontext()
    explicit = (jax.sharding.AxisType.Explicit,)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), explicit, abstract_device=_gpu())
    )


def _gpu():
    return jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
