"""Completes texts, several at once, each with its own sampling.

``python examples/generate.py [--model PATH_OR_ID --draft-head PATH_OR_ID]``
"""

import argparse

from jetspec_jax import LLM, SamplingParams

PROMPTS = ["def read_lines(path):", "class Stack:", "import os\n"]

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--model", default="demo", help="folder or hub id (default: the embedded pair)")
parser.add_argument("--draft-head", help="folder or hub id")
parser.add_argument("--max-tokens", type=int, default=64)
arguments = parser.parse_args()

llm = LLM(arguments.model, arguments.draft_head, budget=8)
params = [
    SamplingParams(max_tokens=arguments.max_tokens),  # greedy
    SamplingParams(max_tokens=arguments.max_tokens, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_tokens=arguments.max_tokens, temperature=0.8, seed=2, stop="\n\n"),
]
for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
    tau = completion.mean_acceptance_length
    print(f"--- {len(completion.token_ids)} tokens, {tau:.2f} per round, ended by {completion.finish_reason}")
    print(prompt + completion.text)
