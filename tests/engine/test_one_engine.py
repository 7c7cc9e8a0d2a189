"""A target's one idle engine: who shares it, what replaces it, and when it goes."""

import dataclasses
import gc
import threading
import weakref

import jax
import pytest

from jetspec_jax import LLM, Head, SamplingParams, TreeDecoder, generate, generate_tree
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine import runner
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.tiny import TINY, random_head, random_target, random_weights, with_windows, word_tokenizer
from tests.events import join

CONFIG = with_windows(TINY, None)
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
TREE = {"budget": 16, "width": 3}


@pytest.fixture
def target():
    return random_target(CONFIG, 0, tokenizer=word_tokenizer(CONFIG.vocab_size))


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 0)


@pytest.fixture(scope="module")
def expected():
    return generate(random_target(CONFIG, 0), [PROMPT], PARAMS)[0].token_ids


def tokens_of(completions):
    [completion] = completions
    return completion.token_ids


def test_equal_calls_share_an_engine(target, head):
    generate_tree(target, head, [PROMPT], SHORT, **TREE)
    engine = target.keeper.engine
    for again in (
        lambda: generate_tree(target, head, [PROMPT], SHORT, **TREE),
        lambda: generate_tree(target, head, [PROMPT[::-1]], SHORT, depth=2, **TREE),
        lambda: generate_tree(target, head, [PROMPT], SHORT, budget=9, width=3),
        lambda: LLM(target, head, **TREE).generate([PROMPT], SHORT),
        lambda: list(trace_rounds(target, head, PROMPT, SHORT, TreeSettings(16, 3))),
    ):
        again()
        assert target.keeper.engine is engine


@pytest.mark.wide
@pytest.mark.parametrize(
    "other",
    [
        lambda target, head: generate(target, [PROMPT], PARAMS),
        lambda target, head: generate_tree(target, head, [PROMPT] * 2, PARAMS, **TREE)[:1],
        lambda target, head: generate_tree(
            target, Head(head.config, random_weights(head.config, 3)), [PROMPT], PARAMS, **TREE
        ),
    ],
    ids=["plain", "slots", "head"],
)
def test_other_settings_replace_it_and_stores_never_coexist(target, head, expected, monkeypatch, other):
    generate_tree(target, head, [PROMPT], SHORT, **TREE)
    old = weakref.ref(target.keeper.engine)
    stores = [weakref.ref(leaf) for leaf in jax.tree.leaves(old().runner.state)]
    alive, empty_state = [], runner.empty_state

    def allocate(*own):
        alive.append(old() is not None or any(leaf() is not None for leaf in stores))
        return empty_state(*own)

    monkeypatch.setattr(runner, "empty_state", allocate)
    assert tokens_of(other(target, head)) == expected
    assert alive == [False]
    assert target.keeper.engine is not None


def test_an_engine_is_freed_with_its_target(head):
    target = random_target(CONFIG, 0)
    generate_tree(target, head, [PROMPT], SHORT, **TREE)
    engine, weights = weakref.ref(target.keeper.engine), weakref.ref(target.weights["embed_tokens"])
    del target
    gc.collect()
    assert engine() is weights() is None


def test_threads_take_turns(target, head, expected):
    got, calls = (
        [],
        [
            lambda: generate(target, [PROMPT], PARAMS),
            lambda: generate_tree(target, head, [PROMPT], PARAMS, **TREE),
        ],
    )

    def run(call):
        got.extend(tokens_of(call()) for _ in range(3))

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    join(*threads)
    assert got == [expected] * 6


def test_an_open_stream_shares_its_engine(target, head, expected):
    llm = LLM(target, head, **TREE)
    stream = llm.stream(PROMPT, PARAMS)
    text = next(stream)
    engine = target.keeper.engine
    # One slot: the stream goes on while others wait for it, and its text is all there.
    assert [c.token_ids for c in llm.generate([PROMPT] * 2, PARAMS)] == [expected] * 2
    assert target.keeper.engine is engine
    text += "".join(stream)
    assert stream.completion.token_ids == expected
    assert stream.completion.text == text


def test_beside_an_open_stream_others_get_engines_of_their_own(target, head, expected):
    stream = LLM(target, head, **TREE).stream(PROMPT, PARAMS)
    text = next(stream)
    engine = target.keeper.engine
    assert tokens_of(generate(target, [PROMPT], PARAMS)) == expected
    trace = trace_rounds(target, head, PROMPT, PARAMS, TreeSettings(16, 3))
    assert len(list(trace)) > 0
    assert trace.completion.token_ids == expected
    assert target.keeper.engine is engine
    text += "".join(stream)
    assert (stream.completion.token_ids, stream.completion.text) == (expected, text)


@pytest.mark.wide
def test_beside_a_stream_s_engine_that_is_too_small():
    config = dataclasses.replace(CONFIG, max_position_embeddings=4096)
    llm = LLM(random_target(config, 0, tokenizer=word_tokenizer(64)), **TREE)
    long = [1] * 1100
    with llm.stream(PROMPT, SHORT) as stream:
        engine = llm.target.keeper.engine
        [beside] = llm.generate([long], SHORT)
        assert llm.target.keeper.engine is engine
        list(stream)
    assert (engine.plan.size.capacity, len(stream.completion.token_ids)) == (1024, SHORT.max_tokens)
    with llm.stream(long, SHORT) as alone:
        assert llm.target.keeper.engine.plan.size.capacity == 2048
        list(alone)
    assert alone.completion.token_ids == beside.token_ids


def test_an_open_trace_is_left_alone(target, head, expected):
    settings = TreeSettings(16, 3)
    trace = trace_rounds(target, head, PROMPT, PARAMS, settings)
    next(trace)
    other = trace_rounds(target, head, PROMPT, PARAMS, settings)
    assert tokens_of(generate_tree(target, head, [PROMPT], PARAMS, **TREE)) == expected
    assert len([*trace]) + 1 == len([*other])
    assert trace.completion == other.completion
    assert trace.completion.token_ids == expected


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "name"), [(TreeDecoder, "decode"), (TreeDecoder, "prefill"), (jax, "device_get")]
)
def test_after_an_interrupt_all_calls_work(target, head, expected, monkeypatch, owner, name):
    """An engine that was interrupted while it waited goes on; another is replaced."""
    generate_tree(target, head, [PROMPT], SHORT, **TREE)
    before = target.keeper.engine
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate_tree(target, head, [PROMPT[::-1]], PARAMS, **TREE)
    assert not before.busy
    assert before.broken == (owner is TreeDecoder)
    trace = trace_rounds(target, head, PROMPT, PARAMS, TreeSettings(16, 3))
    assert sum(len(one.committed) for one in trace) >= len(expected) - 1
    assert trace.completion.token_ids == expected
    assert tokens_of(generate_tree(target, head, [PROMPT], PARAMS, **TREE)) == expected
    engine = target.keeper.engine
    assert (engine is before) == (owner is jax)
    assert engine.scheduler.free_pages == engine.plan.size.num_pages
