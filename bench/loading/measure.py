"""What reading a checkpoint takes, measured in a process that does nothing else."""

import contextlib
import cProfile
import multiprocessing
import pstats
import resource
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from bench.common.timing import peak_bytes
from jetspec_jax.checkpoint.loading import read_target
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.device.mesh import make_mesh

# Functions that a profile names.
LONGEST = 15
# Bytes that are read at a time where nothing is made of them.
BLOCK = 64 * 2**20
# Seconds between two looks at the process's memory.
LOOK = 0.02


@dataclass(frozen=True)
class Job:
    """What is read, and where to.

    Attributes:
        folder: The checkpoint.
        dtype: Of the weights.
        sizes: Of the mesh, as `make_mesh` takes them; None is one device.
        ignore_config_keys: As in `Source`.
        profile: Whether to say in which functions the main thread spends its time, which slows it down.
    """

    folder: Path
    dtype: str
    sizes: tuple[int, int] | None = None
    ignore_config_keys: tuple[str, ...] = ()
    profile: bool = False


def in_fresh_process(job: Job) -> dict[str, Any]:
    """As `measure`, in a process of its own, whose memory nobody has used before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, job).result()


def measure(job: Job) -> dict[str, Any]:
    """Reads a target once.

    Returns:
        Seconds, memory of the host and of each device in bytes, and ``profile``: functions by the seconds
        that they took themselves.
    """
    mesh = None if job.sizes is None else make_mesh(*job.sizes)
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    jax.block_until_ready([jax.device_put(0.0, device) for device in devices])  # what starting them takes
    source, profile = Source(job.folder, job.dtype, job.ignore_config_keys), cProfile.Profile()
    before = _largest_resident()
    with _watching() as memory, profile if job.profile else contextlib.nullcontext():
        started = time.perf_counter()
        target = read_target(source, mesh)
        jax.block_until_ready(target.weights)
        seconds = time.perf_counter() - started
    memory["resident"] = _largest_resident() - before
    weights = dict.fromkeys(devices, 0)
    for leaf in jax.tree.leaves(target.weights):
        for shard in leaf.addressable_shards:
            weights[shard.device] += shard.data.nbytes
    return {
        "seconds": seconds,
        "host": memory,
        "devices": [{"weights": weights[device], "peak": peak_bytes(device)} for device in devices],
        "dtype": str(target.dtype),
        "profile": _longest(profile) if job.profile else None,
    }


def read_plainly(folder: Path) -> float:
    """Seconds to read a folder's tensors once, a block after the other, and to make nothing of them."""
    block, started = bytearray(BLOCK), time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started


def _largest_resident() -> int:
    """The most bytes that the process has had in memory, with the pages of files that it has mapped."""
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def _watching() -> Iterator[dict[str, int | None]]:
    """Follows what the process has in memory besides pages of files: how much more it was, at most.

    Mapped files count as resident as long as there is room, and go when others need it.
    """
    first, done = _anonymous(), threading.Event()
    memory: dict[str, int | None] = {"anonymous": None if first is None else 0}

    def look() -> None:
        while first is not None and not done.wait(LOOK):
            memory["anonymous"] = max(memory["anonymous"] or 0, (_anonymous() or 0) - first)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()


def _anonymous() -> int | None:
    """Bytes in memory that are no file's; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else None


def _longest(profile: cProfile.Profile) -> list[dict[str, Any]]:
    stats: Any = pstats.Stats(profile)
    by_own_time = sorted(stats.stats.items(), key=lambda item: -item[1][2])
    return [
        {
            "function": name if file == "~" else f"{Path(file).name}:{line} {name}",
            "calls": calls,
            "seconds": own,
        }
        for (file, line, name), (_, calls, own, _, _) in by_own_time[:LONGEST]
    ]
