"""Small trees on a CPU, if the caller sets no tree option: for calls of one greedy request, if they pay.

Each node is work on a CPU. A tree of 8 nodes pays if a plain round mostly waits for the weights and the
head's drafts are likely: for greedy decoding of one prompt. Requests that decode together share each read of
the weights already, and sampled requests have fewer drafts accepted. Algorithm "auto" chooses between trees
and plain rounds, dispatch by dispatch, by measured costs.
"""

import math
from collections.abc import Sequence

import jax

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.device.memory import array_bytes, fits
from jetspec_jax.engine.known_costs import known_costs
from jetspec_jax.engine.loop import loop_for
from jetspec_jax.engine.memory import engine_bytes
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.request import Request

SMALL_TREES = TreeSettings(8, algorithm="auto")
#: Smallest target, in bytes: a processor's cache may hold a smaller one, whose plain rounds never wait.
LEAST_BYTES = 100_000_000
#: Trees whose rounds take more than this many times as long as plain rounds do not pay: heads have about 3
#: to 4 tokens of 8 nodes committed, and "auto" spends time on the head. SmolLM2 on two pairs of cores: at
#: 2.5 times, trees were 1.1 to 1.7 times as fast as plain decoding; at 3.3 times, 0.8 times.
MOST_RATIO = 2.75
#: Calls are decoded plainly for this many tokens, which takes about as long as to compile the trees'
#: programs: short use does not wait for the compiler.
PLAIN_TOKENS = 512


class SmallTrees:
    """Chooses between plain decoding and small trees, call by call."""

    def __init__(self, target: Target, trees: EnginePlan):
        self._target, self._trees = target, trees
        self._tokens = 0
        # Tokens of the last plain call, which `_tokens` does not count yet.
        self._last: Sequence[int] = ()

    def begin(self) -> None:
        """Allows trees from the next call on."""
        self._tokens = PLAIN_TOKENS

    def plan(self, plan: EnginePlan, requests: list[Request]) -> EnginePlan:
        """The plan for a call that was planned as plain decoding; sets its request's tree, if it gets one."""
        loop = loop_for(self._target)
        if loop.server() is not None or len(requests) != 1 or requests[0].params.temperature > 0:
            return plan
        last, self._last = self._last, ()
        self._tokens += len(last)
        if self._tokens < PLAIN_TOKENS:
            self._last = requests[0].tokens
            return plan
        trees = self._trees.for_requests(requests)
        costs = known_costs(trees.cost_key)
        if len(buckets := costs.buckets(1)) > 1:
            plain, tree = (costs.at((1, bucket), costs.contexts[0], math.inf) for bucket in buckets)
            if tree > MOST_RATIO * plain:
                return plan
        engine = loop.engine
        if not (engine is not None and engine.plan.has_trees_of(trees)) and not fits(engine_bytes(trees)):
            return plan
        requests[0].budget, requests[0].depth = SMALL_TREES.budget, trees.decoder.depth
        return trees


def can_pay(target: Target) -> bool:
    """Whether small trees are considered for a target."""
    return (
        jax.default_backend() == "cpu"
        and target.meshes == (None,)
        and array_bytes(target.weights) >= LEAST_BYTES
    )
