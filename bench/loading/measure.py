"""Measures loading a checkpoint, in a process that does nothing else."""

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

# The number of functions in a profile.
LONGEST = 15
# The block size of plain reading, in bytes.
BLOCK = 64 * 2**20
# Seconds between two samples of the process's memory.
INTERVAL = 0.02


@dataclass(frozen=True)
class Job:
    """A target to load, and its devices.

    Attributes:
        folder: The checkpoint.
        dtype: The type of the weights.
        sizes: The sizes of the mesh, see `make_mesh`; None is one device.
        ignore_config_keys: See `Source`.
        profile: Whether to profile the main thread, which slows it down.
    """

    folder: Path
    dtype: str
    sizes: tuple[int, int] | None = None
    ignore_config_keys: tuple[str, ...] = ()
    profile: bool = False


def in_fresh_process(job: Job) -> dict[str, Any]:
    """Runs `measure` in a new process, whose memory is unused."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, job).result()


def measure(job: Job) -> dict[str, Any]:
    """Loads a target once.

    Returns:
        Seconds, memory of the host and of each device in bytes, and ``profile``: functions by self time.
    """
    mesh = None if job.sizes is None else make_mesh(*job.sizes)
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    jax.block_until_ready(
        [jax.device_put(0.0, device) for device in devices]
    )  # excludes their initialisation
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
    """Seconds to read a folder's tensors once in blocks, without using them."""
    block, started = bytearray(BLOCK), time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started


def _largest_resident() -> int:
    """The process's peak resident bytes, mapped files included."""
    # In KiB on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def _watching() -> Iterator[dict[str, int | None]]:
    """Samples the process's anonymous memory, and yields its peak increase.

    Mapped files are not anonymous: they stay resident only until the memory is needed.
    """
    first, done = _anonymous(), threading.Event()
    memory: dict[str, int | None] = {"anonymous": None if first is None else 0}

    def sample() -> None:
        while first is not None and not done.wait(INTERVAL):
            memory["anonymous"] = max(memory["anonymous"] or 0, (_anonymous() or 0) - first)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()


def _anonymous() -> int | None:
    """The process's anonymous bytes; None if the system does not report them."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else None


def _longest(profile: cProfile.Profile) -> list[dict[str, Any]]:
    stats: Any = pstats.Stats(profile)
    by_self_time = sorted(stats.stats.items(), key=lambda item: -item[1][2])
    return [
        {
            "function": name if file == "~" else f"{Path(file).name}:{line} {name}",
            "calls": calls,
            "seconds": self_time,
        }
        for (file, line, name), (_, calls, self_time, _, _) in by_self_time[:LONGEST]
    ]
