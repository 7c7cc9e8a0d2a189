"""Some slots of a state by themselves: prompts prefilled together, live slots, slots that wait for pages."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import DecodeWeights, DraftHeadProposer, SamplingParams, SlotSettings, TreeDecoder, generate
from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.engine.size import cut_prompts
from jetspec_jax.models import abstract, weights_of
from tests.decode.compilations import compilations
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import HYBRID, TINY, head_config, random_head, random_target, with_nan, with_windows
from tests.marks import wide

FLOAT32 = jnp.dtype(jnp.float32)
SLOTS, PAGE, PAGES, CHUNK = 4, 8, 12, 16
# Stores with pages, rings beside them, and recurrent states.
CONFIGS = {"paged": TINY, "rings": with_windows(TINY, 6, None, 20), "recurrent": HYBRID}
LENGTHS, NEW = (5, 1, 40, 17), 30
TABLES = np.random.default_rng(0).permutation(SLOTS * PAGES).astype(np.int32).reshape(SLOTS, PAGES)
PROMPTS = [np.random.default_rng(i).integers(0, 64, length).tolist() for i, length in enumerate(LENGTHS)]
PARAMS = [
    SamplingParams(max_tokens=NEW, temperature=float(i % 2), seed=i, ignore_eos=True) for i in range(SLOTS)
]


class Case:
    """A target, the oracle that knows what it will say, and a decoder of trees."""

    def __init__(self, config):
        self.target = random_target(config, 7)
        oracle = OracleProposer(config.vocab_size)
        longer = [dataclasses.replace(own, max_tokens=NEW + oracle.depth + 1) for own in PARAMS]
        # Each alone, plainly.
        found = [generate(self.target, [p], own)[0].token_ids for p, own in zip(PROMPTS, longer, strict=True)]
        self.expected = [tokens[:NEW] for tokens in found]
        truth = plant([[*p, *tokens] for p, tokens in zip(PROMPTS, found, strict=True)], 128)
        self.weights = DecodeWeights(self.target.weights, truth)
        self.decoder = TreeDecoder(config, oracle, 16, width=2, max_rounds=32)

    def begin(self, shapes=((1, CHUNK), (2, CHUNK)), pages=(PAGES,) * SLOTS):
        """All slots after their prompts, with so many pages; what no commit has written is NaN."""
        decoder = self.decoder
        state = decoder.empty_state(
            SLOTS, num_pages=SLOTS * PAGES, pages_per_slot=PAGES, page_size=PAGE, dtype=FLOAT32
        )
        state = dataclasses.replace(state, stores=with_nan(state.stores))
        for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            settings = SlotSettings.of(params, (), vocab_size=64, budget=16, depth=decoder.depth)
            begins = np.int32(prompt[-1]), np.int32(0), np.bool_(len(prompt) == 1)
            state = decoder.insert(state, np.int32(slot), table(slot, pages[slot]), settings, *begins)
        left = {slot: np.array(prompt[:-1], np.int32) for slot, prompt in enumerate(PROMPTS)}
        for chunk in cut_prompts(left, shapes, SLOTS):
            state = decoder.prefill(self.weights, state, *chunk)
        return state

    def serve(self, state, turns, rounds=2):
        """The tokens of all slots, whose dispatches are for these slots in turn; and the state."""
        tokens = [[] for _ in range(SLOTS)]
        for live in turns:
            if not state.active.any():
                break
            own = np.array(live, np.int32)
            state, records = self.decoder.decode(self.weights, state, np.int32(rounds), own)
            assert records.tokens.shape[1] == len(live)
            for place, slot in enumerate(live):
                tokens[slot] += [
                    t for t in np.asarray(records.tokens[:, place]).reshape(-1).tolist() if t >= 0
                ]
        return [own[:NEW] for own in tokens], state


def table(slot, pages):
    """A slot's block table once it has so many pages."""
    return np.where(np.arange(PAGES) < pages, TABLES[slot], NO_PAGE)


@pytest.fixture(scope="module", params=[wide("paged"), "rings", "recurrent"])
def case(request):
    return Case(CONFIGS[request.param])


def kept(state):
    """What a state holds of each slot, without its pages' places: bits of what is committed."""
    return jax.tree.map(np.asarray, (state.slots.lengths, state.anchors, state.active))


def test_prompts_that_are_prefilled_together(case):
    """In any number, beside a prompt that has ended, one that has no token to prefill, and longer ones."""
    alone = case.begin([(1, CHUNK)])
    for shapes in ([(2, CHUNK)], [(1, CHUNK), (3, 24)]):
        state = case.begin(shapes)
        jax.tree.map(np.testing.assert_array_equal, kept(state), kept(alone))
        assert state.slots.lengths.tolist() == [length - 1 for length in LENGTHS]
        assert state.active.all()
        tokens, _ = case.serve(state, [(3, 1), (0, 2)] * 40)
        assert tokens == case.expected


@pytest.mark.parametrize(
    "turns",
    [
        [(2,), (3, 0), (1,), (0, 2)],
        [(3, 1), (0, 2)],
        wide([(2, 0, 3), (1, 2)]),
    ],
    ids=str,
)
def test_live_slots_in_any_order(case, turns):
    tokens, state = case.serve(case.begin(), turns * 40)
    assert tokens == case.expected
    assert not state.active.any()
    assert state.slots.lengths.tolist() == [length - 1 + NEW for length in LENGTHS]
    assert state.slots.numbers.tolist() == list(range(SLOTS))


def test_the_others_keep_every_bit(case):
    before = case.begin()
    held = jax.tree.map(np.asarray, (before.slots, before.anchors, before.settings, before.active))
    states = [np.asarray(store.state) for store in before.stores if hasattr(store, "state")]
    state, _ = case.decoder.decode(case.weights, before, np.int32(3), np.array([2, 1], np.int32))
    after = jax.tree.map(np.asarray, (state.slots, state.anchors, state.settings, state.active))
    for slot in (0, 3):
        jax.tree.map(lambda a, b, s=slot: np.testing.assert_array_equal(a[s], b[s]), after, held)
        own = [np.asarray(store.state) for store in state.stores if hasattr(store, "state")]
        for ours, theirs in zip(own, states, strict=True):
            np.testing.assert_array_equal(ours[slot], theirs[slot])
    assert (after[0].lengths[[1, 2]] > held[0].lengths[[1, 2]]).all()


def test_single_rounds_are_the_loop(case):
    single = dataclasses.replace(case.decoder, max_rounds=1)
    expected, seen = case.decoder.decode(case.weights, case.begin(), np.int32(32))
    state, found = case.begin(), [[] for _ in range(SLOTS)]
    for _ in range(32):
        state, records = single.decode(case.weights, state, np.int32(0))
        assert records.tokens.shape[0] == 1
        for slot, ran in zip(found, rounds_of(records), strict=True):
            slot += ran
    assert not state.active.any()
    assert not records.counts.any()
    assert (records.tokens == -1).all()
    assert found == rounds_of(seen)
    jax.tree.map(np.testing.assert_array_equal, kept(state), kept(expected))


def test_each_number_of_live_slots_is_one_program(case):
    state = case.begin()
    for live in ((1, 0), (2,)):
        state, _ = case.decoder.decode(case.weights, state, np.int32(1), np.array(live, np.int32))
    with compilations() as seen:
        for live in ((2, 3), (0,), (0, 1)):
            state, _ = case.decoder.decode(case.weights, state, np.int32(2), np.array(live, np.int32))
        case.begin()
    assert seen == []


def rounds_of(records):
    """The rounds of each slot: what each committed, and how large its tree was."""
    tokens, sizes = np.asarray(records.tokens), np.asarray(records.tree_sizes)
    return [
        [
            (row[row >= 0].tolist(), size)
            for row, size in zip(tokens[:, b], sizes[:, b].tolist(), strict=True)
            if size
        ]
        for b in range(tokens.shape[1])
    ]


@pytest.mark.parametrize("live", [None, (3, 1)], ids=str)
def test_pausing_and_growing_is_never_pausing(case, live):
    """Round for round. Slots get a page when they have paused, and the others go on meanwhile."""
    decoder, members = case.decoder, range(SLOTS) if live is None else live
    own = () if live is None else (np.array(live, np.int32),)
    state, records = decoder.decode(case.weights, case.begin(), np.int32(32), *own)
    expected, end = rounds_of(records), kept(state)
    assert all(sum(len(tokens) for tokens, _ in rounds) >= NEW for rounds in expected)

    pages = [-(-length // PAGE) for length in LENGTHS]
    state, found, paused = case.begin(pages=pages), [[] for _ in members], 0
    for _ in range(60):
        if not np.asarray(state.active)[list(members)].any():
            break
        waits = np.asarray(state.active & ~decoder.decodes(state))
        before = state.slots.lengths.tolist()
        state, records = decoder.decode(case.weights, state, np.int32(3), *own)
        for seen, rounds in zip(found, rounds_of(records), strict=True):
            seen += rounds
        after = state.slots.lengths.tolist()
        for slot in members:
            if waits[slot]:
                # It has kept all that it had, and gets one more.
                assert after[slot] == before[slot]
                pages[slot] += 1
                paused += 1
        grown = [slot if waits[slot] and slot in members else SLOTS for slot in range(SLOTS)]
        tables = np.stack([table(slot, pages[slot]) for slot in range(SLOTS)])
        state = decoder.grow(state, np.array(grown, np.int32), tables)
    assert found == expected
    assert paused > len(members)
    # No slot ever had more pages than all of it fills.
    assert all(pages[slot] <= -(-(LENGTHS[slot] - 1 + NEW) // PAGE) for slot in members)
    jax.tree.map(np.testing.assert_array_equal, kept(state), end)


def test_a_dispatch_ends_when_all_wait(case):
    pages = [-(-length // PAGE) for length in LENGTHS]
    state, records = case.decoder.decode(case.weights, case.begin(pages=pages), np.int32(32))
    assert state.active.all()
    assert not case.decoder.decodes(state).any()
    before = kept(state)
    state, records = case.decoder.decode(case.weights, state, np.int32(32))
    assert not records.tree_sizes.any()
    assert (records.tokens == -1).all()
    jax.tree.map(np.testing.assert_array_equal, kept(state), before)


@pytest.mark.parametrize(
    ("length", "pages", "changes", "decodes"),
    [
        (6, 2, {}, True),  # 6 + 10 = 16
        (7, 2, {}, False),
        (8, 2, {"depth": 8}, False),
        (12, 2, {"budget": 4}, True),  # no deeper than 3
        (13, 2, {"budget": 4}, False),
        (16, 2, {"budget": 1}, False),
        (12, 2, {"remaining": 4}, True),  # all that it may ever get
        (13, 2, {"remaining": 4}, False),
        (0, 0, {}, False),
    ],
)
def test_the_room_that_a_round_needs(length, pages, changes, decodes):
    decoder = TreeDecoder(TINY, OracleProposer(TINY.vocab_size), 16)
    state = decoder.empty_state(2, num_pages=4, pages_per_slot=3, page_size=PAGE, dtype=FLOAT32)
    settings = SlotSettings.of(SamplingParams(max_tokens=NEW), (), vocab_size=64, budget=16, depth=9)
    settings = settings._replace(**{name: np.int32(value) for name, value in changes.items()})
    own = np.array([2, 0, 3], np.int32)
    own[pages:] = NO_PAGE
    state = decoder.insert(state, np.int32(1), own, settings, np.int32(5), np.int32(length), np.bool_(True))
    assert decoder.decodes(state).tolist() == [False, decodes]
    state = decoder.grow(state, np.array([1], np.int32), np.array([[2, 0, 3]], np.int32))
    assert state.room.tolist() == [0, 24]
    assert decoder.decodes(state).tolist() == [False, True]
    assert decoder.release(state, np.int32(1)).room.tolist() == [0, 0]


@pytest.mark.parametrize("prompt", [PROMPTS[2], PROMPTS[3]], ids=["a part", "all but the last token"])
def test_pages_that_another_slot_filled(prompt):
    """Target and head know their tokens without a prefill: the rounds are those of the other slot."""
    target, head = random_target(TINY, 7), random_head(TINY, 1)
    decoder = TreeDecoder(TINY, DraftHeadProposer(head.config), 8, width=3, max_rounds=32)
    weights, params = DecodeWeights(target.weights, head.weights), PARAMS[1]
    state = decoder.empty_state(2, num_pages=20, pages_per_slot=10, page_size=PAGE, dtype=FLOAT32)
    state = dataclasses.replace(state, stores=with_nan(state.stores), proposer=with_nan(state.proposer))
    settings = SlotSettings.of(params, (), vocab_size=64, budget=8, depth=7)
    pages, found = np.random.default_rng(0).permutation(20).astype(np.int32), []
    for slot, own, length in ((0, pages[:10], 0), (1, [*pages[:2], *pages[10:18]], 2 * PAGE)):
        begins = np.int32(prompt[-1]), np.int32(length), np.bool_(len(prompt) - 1 == length)
        state = decoder.insert(state, np.int32(slot), np.array(own, np.int32), settings, *begins)
        left = {slot: np.array(prompt[length:-1], np.int32)}
        for chunk in cut_prompts(left, [(1, CHUNK)], 2):
            state = decoder.prefill(weights, state, *chunk)
        state, records = decoder.decode(weights, state, np.int32(32), np.array([slot], np.int32))
        found += rounds_of(records)
    [expected] = generate(target, [prompt], params)
    assert found[0] == found[1]
    assert [token for tokens, _ in found[0] for token in tokens][:NEW] == expected.token_ids


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("rings", "live"),
        ("rings", "plain"),
        ("rings", "prefill"),
        ("recurrent", "live"),
        ("recurrent", "all"),
        wide("recurrent", "prefill"),
        wide("paged", "live"),
    ],
)
def test_no_store_is_copied(kind, program):
    """States are gathered before the loop and scattered after it, once; what has pages stays where it is."""
    config, slots, live, pages = CONFIGS[kind], 5, 2, 37
    weights = DecodeWeights(*(weights_of(abstract(own)) for own in (config, head_config(config))))
    decoder = TreeDecoder(
        config, DraftHeadProposer(head_config(config)), 1 if program == "plain" else 16, width=3
    )
    size = {"num_pages": pages, "pages_per_slot": 23, "page_size": 16, "dtype": FLOAT32}
    state = jax.eval_shape(lambda: decoder.empty_state(slots, **size))
    shaped = jax.ShapeDtypeStruct
    some = shaped((live,), jnp.int32)
    if program == "prefill":
        chunk = some, shaped((live, 32), jnp.int32), some, shaped((live,), bool)
        lowered = prefill.lower(decoder.models, weights, state, *chunk)
    else:
        own = (some,) if program == "live" else ()
        lowered = decoder.program.lower(decoder, weights, state, shaped((), jnp.int32), *own)
    text = lowered.compile().as_text()
    heads, length = TINY.layers[0].num_kv_heads, TINY.layers[0].head_dim
    shapes = []
    for count in {pages, *(store.k.shape[0] for store in state.stores if hasattr(store, "ring"))}:
        rows = count * 16
        shapes.append(rf"{count},16,{heads},{length}|{rows},{heads},{length}|{rows},{heads * length}")
    states = [store.state.shape for store in state.stores if hasattr(store, "state")]
    shapes += [",".join(map(str, shape)) for shape in states]
    for shape in shapes:
        assert re.search(rf"f32\[({shape})\]", text)
        assert re.findall(rf"= f32\[({shape})\]\S* copy(?:-start)?\(.*", text) == []
    if kind == "recurrent" and program == "all":
        whole = rf"= f32\[({'|'.join(shapes[-len(states) :])})\]\S* "
        assert not re.search(rf"{whole}(?:gather|scatter|dynamic-slice|dynamic-update-slice)\(", text)
    # Whatever touches the states of all slots stands outside of the rounds' loop, which is the largest.
    if kind == "recurrent" and program == "live":
        state_shape = state.stores[1].state.shape[1:]
        whole = rf"f32\[{slots},{','.join(map(str, state_shape))}\]"
        names = re.findall(r"body=%?([\w.]+)", text)
        bodies = [re.search(rf"%?{re.escape(name)} \(.*?\n}}", text, re.DOTALL)[0] for name in names]
        rounds = max(bodies, key=len)
        assert f"= f32[{live}," in rounds
        assert not re.search(rf"= {whole}", rounds)
