"""How a case of the fuzzer may end: in correct output, or in an exception that is documented."""

import ctypes
import gc
from pathlib import Path

import jax


class Finding(Exception):
    """A case ended as no case may."""


def ending(error: BaseException, allowed: tuple[type[BaseException], ...], *named: Path) -> str:
    """The name of a documented exception; anything else is a finding, with its text."""
    name, text = type(error).__name__, str(error)
    if not isinstance(error, allowed):
        raise Finding(f"{name}: {text[:500]}") from error
    if name == "CheckpointError" and named and not any(str(folder) in text for folder in named):
        raise Finding(f"names no file: {text[:500]}") from error
    if not text.strip() or len(text) > 20_000:
        raise Finding(f"{name} with a message of {len(text)} characters: {text[:200]}") from error
    return name


def resident_bytes() -> int:
    """Memory of this process when nothing is cached any more."""
    jax.clear_caches()
    gc.collect()
    # Otherwise the C library keeps what was freed, and says that it is in use.
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("Linux says how much memory a process has")
