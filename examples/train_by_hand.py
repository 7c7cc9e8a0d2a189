"""A custom training loop: the demo's target learns a text, and decodes it.

``python examples/train_by_hand.py``
"""

import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax import SamplingParams, bind, generate, load_target, weights_of
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--max-tokens", type=int, default=12)
params = SamplingParams(max_tokens=parser.parse_args().max_tokens)
target = load_target("demo", dtype="float32")
ids = jnp.array([target.tokenizer.encode("The tree grows where the draft is sure, and nowhere else.")])
model = bind(target.config, target.weights)  # a Flax module; optimizers of Optax work as for any other


@nnx.jit
def _step(model):
    def loss(model):
        block = Block.chain(ids)
        attend = attend_over(None, None, block, implementation="xla")
        log_probs = jax.nn.log_softmax(model.logits(model(ids, block.depths, attend).hidden))
        return -jnp.take_along_axis(log_probs[:, :-1], ids[:, 1:, None], -1).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.05 * g, nnx.state(model, nnx.Param), grads))
    return value


print("loss:", *(f"{_step(model):.2f}" for _ in range(12)))
trained = replace(target, weights=weights_of(model))
print(generate(trained, "The tree grows", params)[0].text)
