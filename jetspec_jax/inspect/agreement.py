"""Checks that devices that share a model have the same bits in all arrays that steer decoding.

Each device of a mesh computes trees, choices and counts itself. A device with a different bit would follow
another path, with wrong tokens or a hang. So the arrays can be compared after every launch.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jetspec_jax.decode.state import DecodeWeights, split
from jetspec_jax.engine.batch import Batch
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.plan import EnginePlan
from jetspec_jax.engine.runner import Runner


def steering(runner: Runner) -> Any:
    """The arrays that must be equal on all devices after a launch: the state without stores, and the records.

    Stores depend on sums over devices, which each device may round in another order.
    """
    return split(runner.state)[1], [flight.records for flight in runner.in_flight]


def unequal(tree: Any) -> list[str]:
    """The paths of a pytree's arrays that are not replicated on this process's devices with the same bits."""
    return [
        jax.tree_util.keystr(path)
        for path, array in jax.tree_util.tree_leaves_with_path(tree)
        if not array.is_fully_replicated
        or len({np.asarray(shard.data).tobytes() for shard in array.addressable_shards}) > 1
    ]


#: The most rounds between two comparisons.
FEW_ROUNDS = 8


class WatchedEngine(Engine):
    """An engine with few rounds per launch, which passes on what must be equal on all devices."""

    def __init__(
        self, plan: EnginePlan, weights: DecodeWeights, look: Callable[[Any], None], **settings: Any
    ):
        """``look`` is called with `steering` after every launch."""
        self.look = look
        super().__init__(plan, weights, **settings)

    def _launch(self, batch: Batch) -> None:
        """See `Engine`; never timed, because ``look`` waits for the devices."""
        super()._launch(batch._replace(rounds=min(batch.rounds, FEW_ROUNDS)))
        self.runner.in_flight[-1] = self.runner.in_flight[-1]._replace(started=None)
        self.look(steering(self.runner))
