"""Decodes like `generate` and `generate_tree`, and checks after every launch that all devices agree."""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import jax

from bench.common.workload import Workload
from jetspec_jax import Completion, Head, Target
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.admission import make_requests
from jetspec_jax.engine.engines import Engines, complete
from jetspec_jax.engine.plan import plan_engine
from jetspec_jax.inspect.agreement import WatchedEngine, unequal


@dataclass
class Agreement:
    """A comparison, after each launch, of the arrays that must be equal on all devices that share a model."""

    devices: int = 1
    arrays: int = 0
    launches: int = 0
    unequal: set[str] = field(default_factory=set)

    def look(self, steering: Any) -> None:
        """Compares the arrays after a launch, if there are several devices."""
        arrays = jax.tree.leaves(steering)
        devices = len(arrays[0].devices())
        if devices > 1:
            self.devices, self.arrays = devices, max(self.arrays, len(arrays))
            self.launches += 1
            self.unequal.update(unequal(steering))

    def entry(self) -> dict[str, Any] | None:
        """The comparison as a report has it; None for one device."""
        return None if self.devices == 1 else {**vars(self), "unequal": sorted(self.unequal)}


def decode(
    target: Target,
    head: Head | None,
    work: Workload,
    settings: TreeSettings,
    *,
    max_slots: int,
    implementation: str | None,
    agreement: Agreement,
) -> list[Completion]:
    """Completions of the prompts, ``max_slots`` at a time on each copy; without a head by plain decoding."""
    models = target.config, None if head is None else head.config
    served = {"slots": max_slots, "implementation": implementation, "mesh": target.mesh}
    plan = plan_engine(*models, settings, target.dtype, **served)
    routing = None if head is None else work.routing
    requests = make_requests(target, plan, settings, work.ids, work.params, routing)
    make = functools.partial(WatchedEngine, look=agreement.look)
    with contextlib.closing(Engines(target, head, plan, longer_slots=True, make=make)) as engines:
        return complete(engines, requests, target.tokenizer)
