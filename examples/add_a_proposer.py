"""A custom proposer in place of a draft head: each token's last successor in a text.

``python examples/add_a_proposer.py``
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jetspec_jax import LLM, SamplingParams, load_target


@dataclass(frozen=True)
class Successors:
    """Drafts a chain. Its parameters are a table of successors ``[V]``; it has no state."""

    depth: int = 4
    taps = ()  # it reads no layer of the target
    empty_state = staticmethod(lambda num_pages, page_size, dtype: None)
    commit = staticmethod(lambda weights, state, taps, slots, count: state)
    prepare = staticmethod(lambda weights: weights)

    def propose(self, weights, state, target, anchors, slots, depth=None):
        """Logits ``[B, D, V]`` below the anchors ``[B]``, the last committed tokens."""
        chain = [anchors]
        for _ in range(depth or self.depth):
            chain.append(weights[chain[-1]])
        return 9 * jax.nn.one_hot(jnp.stack(chain[1:], 1), target.config.vocab_size)


target, params = load_target("demo"), SamplingParams(max_tokens=64)
plain = LLM(target).generate("def read_lines(path):", params)[0].token_ids
table = jnp.arange(target.config.vocab_size).at[jnp.array(plain[:-1])].set(jnp.array(plain[1:]))
llm = LLM(target, proposer=Successors(), proposer_weights=table, budget=8)
[completion] = llm.generate("def read_lines(path):", params)
print(f"{completion.mean_acceptance_length:.2f} tokens per round, the same: {completion.token_ids == plain}")
