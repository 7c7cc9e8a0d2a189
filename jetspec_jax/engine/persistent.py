"""Plans the persistent engine that serves requests of many callers."""

from dataclasses import replace

from jetspec_jax.arguments import check_integer
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.extras import Extras
from jetspec_jax.engine.memory import with_slots_that_fit
from jetspec_jax.engine.planning import EnginePlan, plan_engine
from jetspec_jax.engine.size import CPU_PREFILL_TOKENS, MAX_SLOTS, MOST_SLOTS, powers
from jetspec_jax.tree import BUCKETS
from pallas_kernels.dispatch import gpu_problem


def plan_persistent(
    target: Target,
    head: Head | None,
    settings: TreeSettings,
    *,
    max_slots: int | None = None,
    capacity: int | None = None,
    implementation: str | None = None,
) -> EnginePlan:
    """Plans an engine for requests that arrive at any time, on the target's own devices.

    With GPU kernels there are programs for 1, 2, 4, … live slots, and with "auto" trees of 2, 4, 8, … nodes.
    On a CPU each row is work, and programs compile slowly: so there are programs for 1, 4, 16, … live slots,
    and trees of the budget or none.

    The models are loaded; the other arguments are as for `plan_engine`. Without ``max_slots`` it has as many
    as the devices' free memory allows, a power of two up to `MOST_SLOTS`; without GPU kernels `MAX_SLOTS`.

    Raises:
        TypeError: A setting has a wrong type.
        ValueError: A setting is out of its range.
    """
    gpu = implementation != "xla" and gpu_problem() is None
    slots = MOST_SLOTS if gpu else MAX_SLOTS
    if max_slots is not None:
        slots = check_integer("max_slots", max_slots, 1)
    plan = plan_engine(
        target.config,
        None if head is None else head.config,
        settings,
        target.dtype,
        slots=slots,
        capacity=capacity,
        implementation=implementation,
        mesh=target.mesh,
    )
    if not gpu:
        least = max(plan.decoder.bucket, BUCKETS[1])
        return plan.for_many(live=powers(slots, 4), prefill_tokens=CPU_PREFILL_TOKENS, least_nodes=least)
    plan = plan.for_many()
    if max_slots is not None:
        return plan
    extras = Extras(adjusts=True, logprobs=True)  # requests may use all features
    fitted = with_slots_that_fit(replace(plan, extras=extras), target.meshes)
    return replace(fitted, extras=plan.extras)
