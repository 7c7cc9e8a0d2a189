"""Small trees on a CPU, where nobody names any: for a call of one greedy request, if they can pay.

Each node is work on a CPU. A tree of 8 nodes pays where a plain round mostly waits for the weights and the
head's drafts are likely: for greedy decoding of one prompt. Requests that decode together share each read of
the weights already, and fewer drafts of sampled ones are accepted. Algorithm "auto" chooses between trees and
plain rounds, dispatch by dispatch, by measured costs.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.device.memory import array_bytes, fits
from jetspec_jax.engine.known_costs import known_costs
from jetspec_jax.engine.loop import loop_for
from jetspec_jax.engine.memory import engine_bytes
from jetspec_jax.engine.planning import EnginePlan, plan_engine
from jetspec_jax.engine.request import Request

SMALL_TREES = TreeSettings(8, algorithm="auto")
#: Bytes of a target for which they can pay: a processor's cache may hold a smaller one, whose plain rounds
#: wait for nothing.
LEAST_BYTES = 100_000_000
#: Rounds of trees that take more than so many times as long as plain ones do not pay: heads have about
#: 3 to 4 tokens of 8 nodes committed, and "auto" spends time on the head. SmolLM2 on two pairs of cores:
#: at 2.5 times, trees were 1.1 to 1.7 times as fast as plain decoding; at 3.3 times, 0.8 times.
MOST_RATIO = 2.75
#: Calls are decoded plainly until they have had so many tokens, which takes about as long as the trees'
#: programs take to compile: who asks for no more does not wait for the compiler.
PLAIN_TOKENS = 512


class SmallTrees:
    """Chooses between plain decoding and small trees, call by call."""

    def __init__(self, target: Target, head: Head, implementation: str | None = None):
        """Takes the models, on one device, and the implementation of tree attention."""
        self._target, self._head, self._implementation = target, head, implementation
        self._tokens = 0
        # Tokens of the last such call that was decoded plainly; they are not counted yet.
        self._last: Sequence[int] = ()

    def begin(self) -> None:
        """Gives trees from the next call on."""
        self._tokens = PLAIN_TOKENS

    def plan(self, plan: EnginePlan, requests: list[Request]) -> EnginePlan:
        """The engine for a call that was planned as plain decoding; its request gets the trees, if any."""
        loop = loop_for(self._target)
        if loop.server() is not None or len(requests) != 1 or requests[0].params.temperature > 0:
            return plan
        last, self._last = self._last, ()
        self._tokens += len(last)
        if self._tokens < PLAIN_TOKENS:
            self._last = requests[0].tokens
            return plan
        trees = plan_engine(
            self._target.config,
            self._head.config,
            SMALL_TREES,
            plan.dtype,
            capacity=plan.size.capacity,
            implementation=self._implementation,
        )
        costs = known_costs(trees.cost_key)
        if costs is not None:
            plain, tree = (costs.at((1, bucket), costs.contexts[0], math.inf) for bucket in costs.buckets(1))
            if tree > MOST_RATIO * plain:
                return plan
        kept = loop.engine
        if not (kept is not None and kept.plan.has_trees_of(trees)) and not fits(engine_bytes(trees)):
            return plan
        requests[0].budget, requests[0].depth = SMALL_TREES.budget, trees.decoder.depth
        return replace(trees, extras=plan.extras)


def can_pay(target: Target) -> bool:
    """Whether small trees are considered for a target."""
    return (
        jax.default_backend() == "cpu"
        and target.meshes == (None,)
        and array_bytes(target.weights) >= LEAST_BYTES
    )
