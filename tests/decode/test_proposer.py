"""Proposers that a caller gives in place of a draft head."""

import asyncio
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import LLM, AsyncLLM, DeviceMemoryError, SamplingParams, generate, generate_tree
from jetspec_jax.device import memory
from jetspec_jax.progress import log_once
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import TINY, random_head, random_target, with_windows
from tests.meshes import mesh_of

CONFIG = with_windows(TINY, None)
PROMPT, PARAMS = [3, 1, 4, 1, 5], SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
ORACLE = OracleProposer(CONFIG.vocab_size)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0)


@pytest.fixture(scope="module")
def drafts(target):
    """A proposer of the continuation, and the tokens that it proposes."""
    tokens = generate(target, [PROMPT], PARAMS)[0].token_ids
    weights = plant([[*PROMPT, *tokens]] * 8, 64)
    return {"proposer": ORACLE, "proposer_weights": weights}, tokens


def test_its_drafts_are_accepted(target, drafts):
    given, expected = drafts

    async def served():
        async with AsyncLLM(target, budget=16, **given) as llm:
            return [delta async for delta in llm.generate(PROMPT, PARAMS)][-1].completion

    with LLM(target, budget=16, **given) as llm:
        found = [
            *llm.generate([PROMPT], PARAMS, use_tqdm=False),
            *generate_tree(target, None, [PROMPT], PARAMS, budget=16, **given),
            asyncio.run(served()),
        ]
    for completion in found:
        assert completion.token_ids == expected
        assert completion.mean_acceptance_length > 2


class Changeable(OracleProposer):
    __hash__ = None


class Depth:
    depth = 4


class Flat(OracleProposer):
    def propose(self, weights, state, target, anchors, slots, depth=None):
        return super().propose(weights, state, target, anchors, slots, depth)[:, 0]


class Nothing(OracleProposer):
    """Drafts one number everywhere."""

    value = math.nan

    def propose(self, weights, state, target, anchors, slots, depth=None):
        drafts = super().propose(weights, state, target, anchors, slots, depth)
        return jnp.full_like(drafts, self.value)


class Undecided(Nothing):
    value = -math.inf


class OneToken(OracleProposer):
    """One token of the second row is NaN."""

    def propose(self, weights, state, target, anchors, slots, depth=None):
        drafts = super().propose(weights, state, target, anchors, slots, depth)
        return drafts.at[:, 1, 7].set(math.nan)


@pytest.mark.parametrize("algorithm", ["top_nodes", "accum_logp", "hybrid", "auto"])
@pytest.mark.parametrize(
    ("proposer", "said", "least", "most"),
    [(Nothing, 1, 1, 1), (Undecided, 0, 1, 1), (OneToken, 1, 1.5, 2)],
    ids=["all", "infinite", "one"],
)
def test_drafts_that_are_not_numbers_warn_once(
    target, drafts, proposer, said, least, most, algorithm, caplog
):
    given, expected = drafts
    log_once.cache_clear()
    with LLM(
        target, budget=16, algorithm=algorithm, **given | {"proposer": proposer(CONFIG.vocab_size)}
    ) as llm:
        found = llm.generate([PROMPT] * 2, PARAMS, use_tqdm=False)
    assert [one.token_ids for one in found] == [expected] * 2
    assert [one.levelname for one in caplog.records if "NaN" in one.message] == ["WARNING"] * said
    # A row with a NaN has no candidates, and the rows above have theirs. The other algorithms fill their
    # trees with impossible tokens, which may be right by chance.
    if algorithm in ("top_nodes", "auto"):
        assert all(least <= one.mean_acceptance_length <= most for one in found)


def test_parameters_may_be_numpy_arrays(target, drafts):
    given, expected = drafts
    given = given | {"proposer_weights": jax.tree.map(np.asarray, given["proposer_weights"])}
    with LLM(target, budget=16, **given) as llm:
        assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].token_ids == expected
    assert generate_tree(target, None, [PROMPT], PARAMS, budget=16, **given)[0].token_ids == expected


def test_what_is_refused(target, drafts):
    given, head = drafts[0], random_head(CONFIG, 0)
    copies = dataclasses.replace(target, copies=(target,))
    split = dataclasses.replace(target, mesh=mesh_of(1, 2))
    for call in (LLM, lambda target, head=None, **given: generate_tree(target, head, [PROMPT], **given)):
        with pytest.raises(ValueError, match="give a draft head or another proposer, not both"):
            call(target, head, budget=16, **given)
        with pytest.raises(TypeError, match=r"proposer must be .* methods of Proposer"):
            call(target, budget=16, proposer=head)
        with pytest.raises(TypeError, match=r"has no taps, empty_state, prepare, propose, commit"):
            call(target, budget=16, proposer=Depth())
        with pytest.raises(TypeError, match="not the class OracleProposer: make an object of it"):
            call(target, budget=16, proposer=OracleProposer)
        with pytest.raises(ValueError, match=r"proposer_weights .*: give proposer=…, too"):
            call(target, head, budget=16, proposer_weights=given["proposer_weights"])
        with pytest.raises(
            ValueError, match=rf"taps .* lie in 0\.\.{CONFIG.num_layers - 1}, not {CONFIG.num_layers}"
        ):
            call(
                target,
                budget=16,
                **given | {"proposer": dataclasses.replace(ORACLE, taps=(0, CONFIG.num_layers))},
            )
        with pytest.raises(TypeError, match=r"proposer must be hashable, .*'Changeable'"):
            call(target, budget=16, proposer=Changeable(64))
        with pytest.raises(ValueError, match="data_parallel_size must be 1 for a proposer"):
            call(copies, budget=16, **given)
        with pytest.raises(ValueError, match="OracleProposer does not say how a mesh splits it"):
            call(split, budget=16, **given)
    with pytest.raises(ValueError, match=r"depth must lie in 1\.\.9"):
        LLM(target, budget=16, depth=10, **given)
    flat = given | {"proposer": Flat(CONFIG.vocab_size)}
    with pytest.raises(
        ValueError, match=r"Flat\.propose must give logits \[B, D, V\] of shape \(1, 9, 64\), not"
    ):
        generate_tree(target, None, [PROMPT], PARAMS, budget=16, **flat)


def test_its_arrays_are_counted(target, monkeypatch):
    class Wide(OracleProposer):
        def empty_state(self, num_pages, page_size, dtype):
            return jnp.zeros((num_pages, page_size, 2**20), dtype)

        def prepare(self, weights):
            return weights, jnp.zeros(2**28)

    monkeypatch.setattr(memory, "free_bytes", lambda mesh=None: 2**20)
    with pytest.raises(DeviceMemoryError) as error:
        LLM(target, budget=16, max_slots=1, proposer=Wide(64), proposer_weights=plant([[]], 64))
    parts = [line.split() for line in str(error.value).splitlines()]
    assert ["prepared", "weights", "of", "the", "proposer", "1.00", "GiB"] in parts
    assert ["stores", "of", "1", "x", "256", "tokens", "in", "4", "pages", "1.00", "GiB"] in parts
