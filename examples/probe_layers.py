"""Reads hidden states: how early the target knows its next token.

Each layer's output goes through the final norm and the output head (a logit lens), and is compared with the
target's choice.

``python examples/probe_layers.py``
"""

import argparse

import jax.numpy as jnp

from jetspec_jax import bind, hidden_states, load_target, logits

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--model", default="demo")
parser.add_argument("--text", default="def read_lines(path):\n    with open(path) as file:\n")
parser.add_argument("--max-tokens", type=int, default=64, help="tokens of the text that are read")
arguments = parser.parse_args()

target = load_target(arguments.model)
ids = [target.tokenizer.encode(arguments.text)[: arguments.max_tokens]]
chosen = logits(target, ids).argmax(-1)  # [1, T]
states = hidden_states(target, ids, layers=range(target.config.num_layers))  # [L, 1, T, M]
model = bind(target.config, target.weights)
for layer, state in enumerate(states):
    guessed = model.logits(model.norm(state.astype(target.dtype))).argmax(-1)
    print(f"layer {layer}: {jnp.mean(guessed == chosen):.0%} of {len(ids[0])} tokens are the target's")
