"""What a round drafted, what the target chose, and what was accepted, as NumPy arrays and as a drawing.

``python examples/look_at_a_tree.py [--budget 16]``
"""

import argparse

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.inspect.trace import trace_rounds
from jetspec_jax.view.terminal import draw_round
from jetspec_jax.view.tokens import token_label

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--budget", type=int, default=16, help="most nodes of a tree")
parser.add_argument("--max-tokens", type=int, default=32)
arguments = parser.parse_args()

llm = LLM("demo", budget=arguments.budget)
params = SamplingParams(max_tokens=arguments.max_tokens)
rounds = trace_rounds(llm.target, llm.draft_head, "def read_lines(path):", params, llm.settings)
shown = 0
for number, one in enumerate(rounds, 1):
    text, shown = rounds.text[shown:], len(rounds.text)
    print(f"round {number}: {len(one.tokens)} nodes, {len(one.path) - 1} accepted, text {text!r}")
    if number == 1:
        print("\n".join(draw_round(one, lambda token: token_label(llm.target.tokenizer, token))))
print(rounds.completion.text)
