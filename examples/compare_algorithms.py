"""Tokens per round of several tree algorithms, and that all give plain decoding's tokens.

``python examples/compare_algorithms.py [--budget 64] [--algorithms accum_logp top_nodes chain]``
"""

import argparse
import json

from jetspec_jax import SamplingParams, generate, generate_tree, load_draft_head, load_target
from jetspec_jax.demo import DEMO_PROMPTS
from jetspec_jax.tree import algorithm_names

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument(
    "--algorithms", nargs="+", default=["accum_logp", "top_nodes", "chain"], choices=algorithm_names()
)
parser.add_argument("--budget", type=int, default=64, help="most nodes of a tree")
parser.add_argument("--prompts", type=int, default=4)
parser.add_argument("--max-tokens", type=int, default=64)
arguments = parser.parse_args()

target = load_target("demo")
head = load_draft_head("demo", target=target)
lines = DEMO_PROMPTS.read_text(encoding="utf-8").splitlines()[: arguments.prompts]
prompts = [target.tokenizer.encode(json.loads(line)["text"]) for line in lines]
params = SamplingParams(max_tokens=arguments.max_tokens)

plain = generate(target, prompts, params)
for name in arguments.algorithms:
    trees = generate_tree(target, head, prompts, params, budget=arguments.budget, algorithm=name)
    rounds = sum(tree.rounds for tree in trees)
    committed = sum(sum(tree.accept_lengths) for tree in trees)
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain, trees, strict=True))
    print(
        f"{name:24} {committed / rounds:.2f} tokens per round; "
        f"{same} of {len(plain)} texts equal plain decoding's"
    )
