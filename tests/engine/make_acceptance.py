"""Makes acceptance.npz: what trees of the demo pair have accepted at every position of its own texts.

From a checkout: `python -m tests.engine.make_acceptance`. It takes a few minutes on a CPU.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jetspec_jax import SamplingParams, generate, load_draft_head, load_target
from jetspec_jax.cache.stores import Slots
from jetspec_jax.decode.proposer import DraftHeadProposer
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_PROMPTS, DEMO_TARGET
from jetspec_jax.inspect.forward import _forward, draft_logits
from jetspec_jax.models import bind
from jetspec_jax.tree import BUCKETS, accept, build_tree, reach_of, tree_buckets

ACCEPTANCE = Path(__file__).with_name("acceptance.npz")
TOKENS, PROMPT_TOKENS, WIDTH = 512, 64, 7
#: Of each kind of text its temperature, and how many are written; the easiest, or the hardest, are kept.
KINDS = {"easy": (0.0, 32), "hard": (1.0, 32), "noise": (2.0, 12)}
KEPT = 12
# Positions that draft at the same time.
CHUNK = 64


def main():
    target, head = (
        load_target(DEMO_TARGET, dtype="float32"),
        load_draft_head(DEMO_DRAFT_HEAD, dtype="float32"),
    )
    arrays = {}
    for kind, (temperature, written) in KINDS.items():
        reaches = []
        for text in tqdm(write_texts(target, head.config.depth, temperature, written), desc=kind):
            reaches.append(reach_everywhere(target, head, text))
            if len(reaches) == 1:
                check(target, head, text, reaches[0])
        reaches.sort(key=lambda own: own.accepted[:, -1].mean(), reverse=kind == "easy")
        lengths = [1 + own.accepted[:, -1].mean() for own in reaches[:KEPT]]
        print(f"{kind}: {min(lengths):.2f} to {max(lengths):.2f} tokens a round of {BUCKETS[-1]} nodes")
        arrays[f"{kind}_expected"] = np.stack([own.expected for own in reaches[:KEPT]]).astype(np.float16)
        arrays[f"{kind}_accepted"] = np.stack([own.accepted for own in reaches[:KEPT]]).astype(np.uint8)
    np.savez_compressed(ACCEPTANCE, **arrays)


def write_texts(target, depth, temperature, count):
    """Prompts and what the target writes after them; the last trees look beyond the last token."""
    lines = DEMO_PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = [target.tokenizer.encode(json.loads(line)["text"]) for line in lines]
    prompts = [prompt for prompt in prompts if len(prompt) == PROMPT_TOKENS][:count]
    params = [
        SamplingParams(temperature=temperature, max_tokens=TOKENS + depth, ignore_eos=True, seed=seed)
        for seed in range(count)
    ]
    completions = generate(target, prompts, params)
    return [prompt + list(one.token_ids) for prompt, one in zip(prompts, completions, strict=True)]


def reach_everywhere(target, head, text):
    """The reach of trees of every bucket below each generated token; arrays [TOKENS, K]."""
    proposer = DraftHeadProposer(head.config)
    ids = jnp.asarray(text, jnp.int32)
    logits = _logits_everywhere(target.config, proposer, target.weights, head.weights, ids)
    positions = PROMPT_TOKENS + np.arange(TOKENS)
    following = np.asarray(text)[positions[:, None] + 1 + np.arange(proposer.depth)]
    tree = build_tree(logits, ids[positions], width=WIDTH, budget=BUCKETS[-1])
    # The choice at a node is the text's own token there; nobody asks where the path is another.
    choices = np.take_along_axis(
        np.pad(following, ((0, 0), (0, 1)), constant_values=-1), np.asarray(tree.depths), axis=1
    )
    path = accept(tree, choices, max_depth=proposer.depth).path
    return jax.tree.map(np.asarray, reach_of(tree.scores, path, tree_buckets(BUCKETS[-1], 16)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits_everywhere(config, proposer, weights, head_weights, ids):
    """Draft logits below each generated token: one forward of the target shows the head all of the text."""
    target = bind(config, weights)
    taps = _forward(target, ids[None], taps=proposer.taps).taps
    state = proposer.empty_state(1, len(ids), target.embed_tokens[...].dtype)
    slots = Slots.of(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    state = proposer.commit(head_weights, state, taps, slots, jnp.full(1, len(ids), jnp.int32))

    def draft(positions):
        # All read one page, each only the rows before its anchor.
        slots = Slots.of(jnp.zeros((CHUNK, 1), jnp.int32), positions)
        return proposer.propose(head_weights, state, target, ids[positions], slots)

    positions = PROMPT_TOKENS + jnp.arange(TOKENS, dtype=jnp.int32).reshape(-1, CHUNK)
    return jax.lax.map(draft, positions).reshape(TOKENS, proposer.depth, -1)


def check(target, head, text, of_text):
    """A few positions by themselves, the slow way."""
    for position in (0, 100, TOKENS - 1):
        end = PROMPT_TOKENS + position + 1
        tree = build_tree(
            draft_logits(target, head, [text[:end]]), text[end - 1 : end], width=WIDTH, budget=BUCKETS[-1]
        )
        drafted = np.exp(np.asarray(tree.scores)[0, 1:])
        expected = [drafted[: bucket - 1].sum() for bucket in tree_buckets(BUCKETS[-1], 16)]
        np.testing.assert_allclose(of_text.expected[position], expected, rtol=1e-3)


if __name__ == "__main__":
    main()
