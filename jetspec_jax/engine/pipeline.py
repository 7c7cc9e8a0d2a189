"""How an engine keeps its device busy: batches in flight, and rounds per program.

A loop of rounds on the device waits in its launch, so one batch is in flight, and only many rounds hide the
cost of a launch. A program with a fixed number of rounds does not wait: the host launches the next one while
the device runs the one before, and fetches results one batch behind.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jetspec_jax.device.processes import spans

#: How many times as long as its launch a program must run, so that the device never waits for the host:
#: beside the launch, the host also schedules, fetches results and hands out tokens.
LAUNCH_SHARE = 2.0
#: Most rounds of a program with a fixed number.
MOST_ROUNDS = 16


class Pipeline(NamedTuple):
    """How an engine keeps its device busy.

    Attributes:
        depth: Most batches in flight.
        rounds: Rounds of every program; None: a loop on the device, of as many rounds as the policy chooses.
    """

    depth: int = 1
    rounds: int | None = None


#: One batch in flight, with a loop on the device.
LOOP = Pipeline()


class LaunchTimes(NamedTuple):
    """Seconds of programs that are launched one after another, each in the mean.

    Attributes:
        host: Until the launch returns.
        device: Until the next program can run.
    """

    host: float
    device: float


def choose_pipeline(mesh: Mesh | None, time_launches: Callable[[int], LaunchTimes]) -> Pipeline:
    """The pipeline for an engine's devices.

    On a GPU two batches are in flight, usually of one round: so requests come and go, and callers get tokens,
    with every round. If a model's rounds are shorter than their launch, a program has several: the smallest
    power of two whose rounds take `LAUNCH_SHARE` times as long as a launch beside them. On a CPU a round
    takes much longer than its launch, which may even compute, so nothing would overlap. Several processes
    exchange a message per batch, which long loops make cheap.

    Args:
        mesh: The engine's devices; None is the default device.
        time_launches: Times programs of a fixed number of rounds.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform not in ("gpu", "cuda", "rocm") or spans(mesh):
        return LOOP
    return Pipeline(2, rounds_per_program(time_launches))


def rounds_per_program(time_launches: Callable[[int], LaunchTimes]) -> int:
    """Rounds of a program: 1, unless rounds are shorter than their launch; see `choose_pipeline`."""
    one = time_launches(1)
    if one.device >= LAUNCH_SHARE * one.host:
        return 1
    most = time_launches(MOST_ROUNDS)
    # The host also spends time on each round, for its kernels: only the rest is the launch's own.
    launch = one.host - max(most.host - one.host, 0.0) / (MOST_ROUNDS - 1)
    each = most.device / MOST_ROUNDS
    rounds = 1
    while rounds < MOST_ROUNDS and rounds * each < LAUNCH_SHARE * launch:
        rounds *= 2
    return rounds
