"""The choice among the implementations of an operation: the best that supports the case, or one by name."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

_OLDEST_CAPABILITY = (8, 0)  # Ampere: the oldest that the kernels are written for
_FP8_CAPABILITY = (8, 9)  # Ada: the oldest that has FP8


def _supports_all(*_: object, **__: object) -> None:
    """Nothing stands in the way of any call."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        function: The computation. All of an operation's implementations take the same arguments.
        unsupported: Takes what `Operation.choose` is given for the call and says why `function` cannot do it
            anywhere; None if it can.
        needs_gpu: Whether `function` runs on GPUs only.
    """

    function: Callable[..., Any]
    unsupported: Callable[..., str | None] = _supports_all
    needs_gpu: bool = False


@dataclass(frozen=True)
class Operation:
    """What can be computed in several ways.

    Attributes:
        name: For messages.
        table: Its implementations by name, the preferred first.
    """

    name: str
    table: dict[str, Implementation]

    @classmethod
    def of(
        cls,
        name: str,
        reference: Callable[..., Any],
        kernel: Callable[..., Any],
        unsupported: Callable[..., str | None] = _supports_all,
    ) -> "Operation":
        """An operation with a reference and a Triton kernel, which is preferred; see `Implementation`."""
        table = {
            "pallas_triton": Implementation(kernel, unsupported, needs_gpu=True),
            "xla": Implementation(reference),
        }
        return cls(name, table)

    def implementations(self) -> tuple[str, ...]:
        """Names that the operation's argument `implementation` accepts, the preferred first."""
        return tuple(self.table)

    def check(self, name: str | None) -> None:
        """Raises what `choose` would raise whatever the call; None passes."""
        if name is None:
            return
        if name not in self.table:
            raise ValueError(
                f"{self.name} has no implementation {name!r}; available: {', '.join(self.table)}"
            )
        if self.table[name].needs_gpu and (problem := gpu_problem()):
            raise NotImplementedError(f"{self.name}: {name} cannot run: {problem}")

    def choose(self, name: str | None, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The implementation `name`, or for None the first that supports the case.

        `unsupported` gets the other arguments. Raises ValueError for an unknown name, and NotImplementedError
        if the named implementation, or for None every one, cannot run the case.
        """
        self.check(name)
        reasons = []
        for candidate in self.table if name is None else (name,):
            own = self.table[candidate]
            reason = (gpu_problem() if own.needs_gpu else None) or own.unsupported(*args, **kwargs)
            if reason is None:
                return own.function
            reasons.append(f"{candidate} cannot run: {reason}")
        raise NotImplementedError(f"{self.name}: {'; '.join(reasons)}")


def gpu_problem() -> str | None:
    """Why Triton kernels cannot run on the default device; None if they can.

    While a program is traced nobody knows where it will run, so JAX's default device stands for it; and only
    `jax.set_mesh` says that XLA will split it over several devices, which it cannot do to a kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes)
    if split > 1:
        return f"XLA splits the program over {split} devices, and cannot split a kernel"
    device = default_device()
    if device.platform not in ("gpu", "cuda", "rocm"):
        return f"no GPU: the default device is a {device.platform}"
    capability = compute_capability()
    if capability is None:
        return f"no NVIDIA GPU: the default device is a {device.device_kind}"
    if capability < _OLDEST_CAPABILITY:
        own, oldest = (".".join(map(str, version)) for version in (capability, _OLDEST_CAPABILITY))
        return f"compute capability {own} is older than {oldest}"
    return None


def compute_capability(device: Any = None) -> tuple[int, ...] | None:
    """Major and minor version of a device, by default the default one, if that is an NVIDIA GPU."""
    # Other makers' GPUs have no such attribute, or an architecture's name in it ("gfx942").
    version = getattr(device or default_device(), "compute_capability", None) or ""
    found = re.fullmatch(r"(\d+)\.(\d+)", version)
    return None if found is None else tuple(map(int, found.groups()))


def fp8_problem(device: Any = None) -> str | None:
    """Why a device, by default the default one, cannot compute with FP8; None if it can or is no GPU."""
    capability = compute_capability(device)
    if capability is None or capability >= _FP8_CAPABILITY:
        return None
    found, least = (".".join(map(str, version)) for version in (capability, _FP8_CAPABILITY))
    return f"{device_kind(device)} has no FP8 (compute capability {found}, below {least})"


def device_kind(device: Any = None) -> str:
    """The kind of a device, by default the default one. Tables of tuned configurations are sorted by it."""
    return (device or default_device()).device_kind


def processors() -> int:
    """The default device's multiprocessors; an H100's and H200's, 132, where there is none."""
    return getattr(default_device(), "core_count", None) or 132


def default_device() -> Any:
    """JAX's default device."""
    config: Any = jax.config  # whose flags have types from JAX 0.12 on
    device = config.jax_default_device
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device
