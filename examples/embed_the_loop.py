"""The decoding loop in a program of one's own: slots and pages are yours, every call is a function of arrays.

``python examples/embed_the_loop.py``
"""

import argparse

import numpy as np

import jetspec_jax as jj

PAGES, PAGE_SIZE, CHUNK = 8, 64, 32

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--max-tokens", type=int, default=48)
params = jj.SamplingParams(max_tokens=parser.parse_args().max_tokens)

target = jj.load_target("demo")
head = jj.load_draft_head("demo", target=target)
decoder = jj.TreeDecoder(target.config, jj.DraftHeadProposer(head.config), bucket=16)
weights = jj.DecodeWeights(target.weights, head.weights)
# One slot, which gets all pages. Each call donates the state that it is given.
state = decoder.empty_state(1, num_pages=PAGES, pages_per_slot=PAGES, page_size=PAGE_SIZE, dtype=target.dtype)
slot, pages = np.int32(0), np.arange(PAGES, dtype=np.int32)
vocabulary = target.config.vocab_size
settings = jj.SlotSettings.of(
    params, target.eos_token_ids, vocab_size=vocabulary, budget=16, depth=decoder.depth
)
# The last token of the prompt is the first round's anchor; those before it are prefilled.
prompt = target.tokenizer.encode("def read_lines(path):")
*before, anchor = prompt
state = decoder.insert(state, slot, pages, settings, np.int32(anchor), np.int32(0), np.bool_(not before))
for begin in range(0, len(before), CHUNK):
    # A forward may take in chunks of several prompts: all arguments have an axis of prompts.
    chunk = np.array([before[begin : begin + CHUNK]], np.int32)
    counts, ready = np.array([chunk.size], np.int32), np.array([begin + CHUNK >= len(before)])
    padded = np.pad(chunk, ((0, 0), (0, CHUNK - chunk.size)))
    state = decoder.prefill(weights, state, slot[None], padded, counts, ready)
tokens = []
while state.active.any():  # eight rounds on the device, then the host looks
    state, records = decoder.decode(weights, state, np.int32(8))
    tokens += [token for token in records.tokens[:, 0].reshape(-1).tolist() if token >= 0]
# Decoded with the prompt: alone, some tokenizers drop the space that it begins with.
print(target.tokenizer.decode(prompt + tokens[: params.max_tokens]))
