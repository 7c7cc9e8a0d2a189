"""A chat through the tokenizer's template, then a text that is shown while it is made.

``python examples/chat_and_stream.py``
"""

import argparse

from jetspec_jax import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--max-tokens", type=int, default=64)
params = SamplingParams(max_tokens=parser.parse_args().max_tokens)

llm = LLM("demo", budget=8)
messages = [{"role": "user", "content": "def read_lines(path):"}]
[answer] = llm.chat(messages, params)
print(answer.text)
# A next turn holds what was said before.
messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "class Stack:"}]
[answer] = llm.chat(messages, params)
print(answer.text)

# Leaving the block ends the request, finished or not, and frees its slot.
with llm.stream("def read_lines(path):", params) as stream:
    for piece in stream:
        print(piece, end="", flush=True)
print(f"\n{stream.completion.mean_acceptance_length:.2f} tokens per round")
