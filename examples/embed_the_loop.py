"""The decoding loop in a program of one's own: slots and pages are yours, every call is a function of arrays.

``python examples/embed_the_loop.py``
"""

import argparse

import numpy as np

import jetspec_jax as jj
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET

PAGES, PAGE_SIZE, CHUNK = 8, 64, 32

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max-tokens", type=int, default=48)
params = jj.SamplingParams(max_tokens=parser.parse_args().max_tokens)

target = jj.load_target(DEMO_TARGET)
head = jj.load_draft_head(DEMO_DRAFT_HEAD, target=target)
decoder = jj.TreeDecoder(target.config, jj.DraftHeadProposer(head.config), bucket=16)
weights = jj.DecodeWeights(target.weights, head.weights)
# One slot, which gets all pages. Each call donates the state that it is given.
state = decoder.empty_state(1, num_pages=PAGES, pages_per_slot=PAGES, page_size=PAGE_SIZE, dtype=target.dtype)
slot, pages = np.int32(0), np.arange(PAGES, dtype=np.int32)
vocabulary = target.config.vocab_size
settings = jj.SlotSettings.of(
    params, target.eos_token_ids, vocab_size=vocabulary, budget=16, depth=decoder.depth
)
state = decoder.insert(state, slot, pages, settings)
prompt = target.tokenizer.encode("def read_lines(path):")
for begin in range(0, len(prompt), CHUNK):
    chunk = np.array(prompt[begin : begin + CHUNK], np.int32)
    count, is_last = np.int32(len(chunk)), np.bool_(begin + CHUNK >= len(prompt))
    padded = np.pad(chunk, (0, CHUNK - len(chunk)))
    state, first = decoder.prefill(weights, state, slot, padded, count, is_last)
tokens = [int(first)]
while state.active.any():  # eight rounds on the device, then the host looks
    state, records = decoder.decode(weights, state, np.int32(8))
    tokens += [token for token in records.tokens[:, 0].reshape(-1).tolist() if token >= 0]
print(target.tokenizer.decode(tokens[: params.max_tokens]))
