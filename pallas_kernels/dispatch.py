"""The choice among the implementations of an operation: the best that supports the case, or one by name."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

_OLDEST_CAPABILITY = (8, 0)  # Ampere: the oldest that the kernels are written for


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        function: The computation. All of an operation's implementations take the same arguments.
        unsupported: Takes what `choose` is given for the call and says why `function` cannot do
            it here; None if it can.
    """

    function: Callable[..., Any]
    unsupported: Callable[..., str | None]


def choose(
    operation: str, table: Mapping[str, Implementation], name: str | None, *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """The function to call: the first of `table` that supports the case, or the one called `name`.

    Args:
        operation: The operation's name, for messages.
        table: Its implementations by name, the preferred first.
        name: One of them, or None for the first that supports the case.
        *args: What `unsupported` needs to know of the call.
        **kwargs: Likewise.

    Raises:
        ValueError: The table has no implementation `name`.
        NotImplementedError: The named one does not support the case, or, with None, none does.
    """
    if name is not None and name not in table:
        raise ValueError(f"{operation} has no implementation {name!r}; available: {', '.join(table)}")
    reasons = []
    for candidate in table if name is None else (name,):
        reason = table[candidate].unsupported(*args, **kwargs)
        if reason is None:
            return table[candidate].function
        reasons.append(f"{candidate} cannot run: {reason}")
    raise NotImplementedError(f"{operation}: {'; '.join(reasons)}")


def gpu_problem() -> str | None:
    """Why Triton kernels cannot run on the default device; None if they can.

    While a program is traced nobody knows where it will run, so JAX's default device stands for it; and only
    `jax.set_mesh` says that XLA will split it over several devices, which it cannot do to a kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes)
    if split > 1:
        return f"XLA splits the program over {split} devices, and cannot split a kernel"
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    if device.platform not in ("gpu", "cuda", "rocm"):
        return f"no GPU: the default device is a {device.platform}"
    # Other makers' GPUs have no such attribute, or an architecture's name in it ("gfx942").
    version = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
    if version is None:
        return f"no NVIDIA GPU: the default device is a {device.device_kind}"
    if tuple(map(int, version.groups())) < _OLDEST_CAPABILITY:
        oldest = ".".join(map(str, _OLDEST_CAPABILITY))
        return f"compute capability {version[0]} is older than {oldest}"
    return None
