"""A tree algorithm of one's own: wide where the head is unsure, a chain where it is sure.

It shows how an algorithm is written, and how its figures are compared: with so few nodes the default, which
chooses each node by its probability, gets more tokens per round.

``python examples/own_algorithm.py [--nats 1.0]``
"""

import argparse
from dataclasses import dataclass

import jax.numpy as jnp

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.tree import Algorithm, Plan, check_algorithm_contract, get_algorithm, register_algorithm


@register_algorithm("wide_while_unsure")
@dataclass(frozen=True)
class WideWhileUnsure(Algorithm):
    """Full width at depths whose draft row has more entropy than ``nats``; one child at others."""

    nats: float = 1.0

    def plan(self, candidates, routing):
        """How many children a node of each depth may have: traced, and each sequence's own."""
        width = candidates.tokens.shape[2]
        return Plan(jnp.where(candidates.entropies > self.nats, width, 1).astype(jnp.int32))


parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--nats", type=float, default=1.0)
parser.add_argument("--max-tokens", type=int, default=64)
arguments = parser.parse_args()

algorithm = get_algorithm("wide_while_unsure", {"nats": arguments.nats})
check_algorithm_contract(algorithm, depth=15, width=7)  # values and shapes, before a model is there
params = SamplingParams(max_tokens=arguments.max_tokens)
for name, own in (("the default", {}), ("our own", {"algorithm": algorithm})):
    [completion] = LLM("demo", budget=16, **own).generate("def read_lines(path):", params)
    nodes = sum(completion.tree_sizes) / completion.rounds
    print(f"{name}: {completion.mean_acceptance_length:.2f} tokens from {nodes:.1f} nodes per round")
