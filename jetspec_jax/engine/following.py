"""What processes do that share a model with the first, whose scheduler decides for all."""

import contextlib
from typing import Any

from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.grammars import FollowedMatchers
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.serving import Group
from jetspec_jax.engine.wire import hear


def follow(group: Group, plan: EnginePlan) -> None:
    """Does what the first process decides, until that closes.

    It waits for nothing that the devices do, but where a grammar has a say: the first process does, before it
    decides again.

    Args:
        group: The models.
        plan: Of the engine, as in the first process.

    Raises:
        RuntimeError: An error has ended the work of the first process.
        OutOfStep: That process does something else.
    """
    loop, grammars = group.loop, FollowedMatchers(group.target)
    engine: Any = None
    while True:
        what, values = hear()
        if what == "end":
            [words] = values
            if words is not None:
                raise RuntimeError(f"process 0 serves no more: {words}")
            return
        # What the devices cannot hold, the first process is told as well, and goes on.
        with contextlib.suppress(DeviceMemoryError):
            if what == "engine":
                engine = None
                loop.free()
                loop.engine = engine = Engine(plan, group.weights)
            elif what == "batch":
                [batch] = values
                engine.runner.launch(batch, matchers=grammars.begin(batch))
                if batch.masked:
                    grammars.end(batch, engine.runner.collect().tokens)
                engine.runner.in_flight = None
            elif what == "compile":
                kinds, scores = values
                engine.compile(kinds, scores=scores)
            else:
                engine.extend(*values)
