"""Whether devices that share a model agree on what steers its decoding, bit for bit.

Each device of a mesh computes trees, choices and counts for itself. Where one has another bit than the others
it takes another path, silently or for ever. So it can be looked at after every launch.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jetspec_jax.decode.state import DecodeWeights, split
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.runner import Decode, Runner


def steering(runner: Runner) -> Any:
    """All arrays that must be equal on all devices after a launch: the state but for its stores, and records.

    Stores hold what is made of sums over devices, which may be rounded in another order on each.
    """
    flight = runner.in_flight
    return split(runner.state)[1], None if flight is None else flight.records


def unequal(tree: Any) -> list[str]:
    """Those arrays of a pytree that are not whole on every device of this process, or not of the same bits.

    Args:
        tree: Arrays on devices.

    Returns:
        Their paths.
    """
    return [
        jax.tree_util.keystr(path)
        for path, array in jax.tree_util.tree_leaves_with_path(tree)
        if not (array.is_fully_replicated and _alike(array))
    ]


def _alike(array: jax.Array) -> bool:
    parts = {np.asarray(shard.data).tobytes() for shard in array.addressable_shards}
    return len(parts) == 1


#: Between two looks.
FEW_ROUNDS = 8


class WatchedEngine(Engine):
    """An engine that shows after every launch, of few rounds, what must be equal on all devices."""

    def __init__(self, plan: EnginePlan, weights: DecodeWeights, look: Callable[[Any], None]):
        """As an `Engine`, and what is called with what `steering` gives."""
        self.look = look
        super().__init__(plan, weights)

    def launch(
        self, most_rounds: int | None = None, decode: Decode | None = None, *, timed: bool = True
    ) -> None:
        """As an `Engine`'s; not timed, as looking waits for the devices."""
        super().launch(min(most_rounds or FEW_ROUNDS, FEW_ROUNDS), decode, timed=False)
        self.look(steering(self.runner))
