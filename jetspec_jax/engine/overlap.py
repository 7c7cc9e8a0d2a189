"""Chooses between loops of rounds on the device, and overlapped rounds.

Rounds overlap if the host launches one while the device runs the one before.

A loop of rounds on the device waits in its launch, so one batch is in flight, and only many rounds hide the
cost of a launch. A program of one round does not wait: two batches are in flight, and results are fetched one
batch behind.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jetspec_jax.device.processes import spans

#: How many times as long as its launch a round must run, so that the device never waits for the host: beside
#: the launch, the host also schedules, fetches results and hands out tokens.
LAUNCH_SHARE = 2.0
#: Bytes of a target whose rounds are shorter than their launch on every GPU, so that none is timed: at 4 TB/s
#: they are read in half a millisecond, and a launch of all kernels of a round takes longer.
SMALL_TARGET = 2 << 30


class LaunchTimes(NamedTuple):
    """Mean seconds of programs that are launched one after another."""

    host: float  # until the launch returns
    device: float  # until the next program can run


def choose_overlap(mesh: Mesh | None, target_bytes: int, time_launches: Callable[[], LaunchTimes]) -> bool:
    """Whether an engine on these devices overlaps single rounds; else it loops.

    On a GPU overlapped rounds let requests come and go, and callers get tokens, with every round. Models
    whose rounds are shorter than `LAUNCH_SHARE` launches keep the loop, or the device would wait for the
    host. On a CPU a round takes longer than its launch, which may even compute, so nothing would overlap.
    Several processes exchange a message per batch, which long loops make cheap. ``target_bytes`` are those of
    the target's parameters on one device.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform not in ("gpu", "cuda", "rocm") or spans(mesh) or target_bytes < SMALL_TARGET:
        return False
    times = time_launches()
    return times.device >= LAUNCH_SHARE * times.host
