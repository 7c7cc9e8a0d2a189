"""What a kernel is lowered to for a GPU, on a machine without one too."""

import contextlib

import jax

KERNEL = "__gpu$xla.gpu.triton"  # the name of every launch in the program


def lower_for_gpu(function, *args):
    """The program of a call as text. Arguments may be mere shapes."""
    with _gpu_to_lower_for():
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def _gpu_to_lower_for():
    """From JAX 0.11 a kernel is lowered for a device, present or named; before, for any."""
    if jax.__version_info__ < (0, 11) or jax.default_backend() == "gpu":
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), explicit, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
