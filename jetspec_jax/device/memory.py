"""Bytes on a device: what is free, what something takes, and an error before it is read or allocated.

For a CPU Linux says how much is free. A device that does not say how much memory it has passes every check.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import abstract, dtype_of, weights_of

#: Bytes by what they are for.
Bytes = Mapping[str, int]

TARGET_WEIGHTS = "weights of the target"
HEAD_WEIGHTS = "weights of the draft head"


class DeviceMemoryError(RuntimeError):
    """A device cannot hold what is asked of it; nothing was read or allocated for it."""


def free_bytes() -> int | None:
    """Bytes that the device can still give; None if neither it nor, for a CPU, the system says."""
    device = _device()
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return _available_bytes() if device.platform == "cpu" else None


def check_memory(
    needs: Callable[[], Bytes],
    *,
    smaller: Callable[[], Iterable[tuple[str, int | str, Bytes]]] = tuple,
) -> None:
    """Checks that the device can give what is needed; asks for it only where the device says what it has.

    Args:
        needs: What is needed.
        smaller: Other values of settings, with what they would need. The error recommends the first of each
            setting that fits.

    Raises:
        DeviceMemoryError: It cannot. The message lists all parts, their sum, and what would fit.
    """
    free = free_bytes()
    if free is None:
        return
    parts = needs()
    total = sum(parts.values())
    if total <= free:
        return
    fitting: dict[str, int | str] = {}
    for setting, value, other in smaller():
        if sum(other.values()) <= free:
            fitting.setdefault(setting, value)
    width = max(map(len, parts))
    lines = [f"too little memory on {_device().device_kind}: {_gib(total)} needed, {_gib(free)} free"]
    lines += [f"  {name:<{width}}  {_gib(size):>11}" for name, size in parts.items()]
    if fitting:
        settings = [f"{setting} {value}" for setting, value in fitting.items()]
        lines.append(f"one of these would fit: {', '.join(settings)}")
    raise DeviceMemoryError("\n".join(lines))


def num_parameters(config: ModelConfig | DraftHeadConfig) -> int:
    """Elements of a config's parameters."""
    return sum(math.prod(shape) for shape in _parameter_shapes(config).values())


def weight_bytes(config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype) -> int:
    """Bytes of a config's parameters in a type, as far as `dtype_of` lets them have it."""
    return sum(_parameter_bytes(config, dtype))


def largest_parameter_bytes(config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype) -> int:
    """Bytes of the largest of a config's parameters."""
    return max(_parameter_bytes(config, dtype))


def array_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, or of the shapes that stand in their place."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _parameter_bytes(config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype) -> list[int]:
    shapes = _parameter_shapes(config).items()
    return [math.prod(shape) * dtype_of(config, path, dtype).itemsize for path, shape in shapes]


@functools.cache
def _parameter_shapes(config: ModelConfig | DraftHeadConfig) -> Mapping[tuple[str | int, ...], Sequence[int]]:
    leaves = nnx.traversals.flatten_mapping(weights_of(abstract(config)))
    return {path: leaf.shape for path, leaf in leaves.items()}


def _device() -> Any:
    """Where arrays are put unless told otherwise."""
    chosen: Any = getattr(jax.config, "jax_default_device", None)
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def _available_bytes() -> int | None:
    """What Linux can give without swapping; None on other systems, which do not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    available = kibibytes.get("MemAvailable")
    return None if available is None else int(available.split()[0]) * 1024


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
