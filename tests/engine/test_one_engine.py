"""A target's one idle engine: who shares it, what replaces it, and when it goes."""

import _thread
import dataclasses
import gc
import threading
import weakref

import jax
import pytest

from jetspec_jax import LLM, Head, SamplingParams, TreeDecoder, generate, generate_tree
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine import runner
from jetspec_jax.engine.loop import loop_for
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.tiny import TINY, random_head, random_target, random_weights, with_windows, word_tokenizer
from tests.engine.halting import begun, halted
from tests.events import join, until

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
    engine = loop_for(target).engine
    for again in (
        lambda: generate_tree(target, head, [PROMPT], SHORT, **TREE),
        lambda: generate_tree(target, head, [PROMPT[::-1]], SHORT, depth=2, **TREE),
        lambda: generate_tree(target, head, [PROMPT], SHORT, budget=9, width=3),
        lambda: LLM(target, head, **TREE).generate([PROMPT], SHORT),
        lambda: generate_tree(target, head, [PROMPT] * 3, SHORT, **TREE),
        lambda: generate_tree(target, head, [PROMPT] * 20, SHORT, **TREE),
        lambda: generate_tree(target, head, [PROMPT] * 3, SHORT, **TREE, max_slots=2),
        lambda: generate_tree(target, head, [PROMPT], SHORT, **TREE, max_slots=9),
    ):
        again()
        assert loop_for(target).engine is engine


@pytest.mark.wide
@pytest.mark.parametrize(
    "other",
    [
        lambda target, head: generate(target, [PROMPT], PARAMS),
        lambda target, head: generate_tree(target, head, [PROMPT] * 9, PARAMS, **TREE, max_slots=9)[:1],
        lambda target, head: generate_tree(
            target, Head(head.config, random_weights(head.config, 3)), [PROMPT], PARAMS, **TREE
        ),
    ],
    ids=["plain", "slots", "head"],
)
def test_other_settings_replace_it_and_stores_never_coexist(target, head, expected, monkeypatch, other):
    generate_tree(target, head, [PROMPT], SHORT, **TREE)
    old = weakref.ref(loop_for(target).engine)
    stores = [weakref.ref(leaf) for leaf in jax.tree.leaves(old().runner.state)]
    alive, empty_state = [], runner.empty_state

    def allocate(*own):
        alive.append(old() is not None or any(leaf() is not None for leaf in stores))
        return empty_state(*own)

    monkeypatch.setattr(runner, "empty_state", allocate)
    assert tokens_of(other(target, head)) == expected
    assert alive == [False]
    assert loop_for(target).engine is not None


def test_an_engine_is_freed_with_its_target(head):
    target = random_target(CONFIG, 0)
    generate_tree(target, head, [PROMPT], SHORT, **TREE)
    engine, weights = weakref.ref(loop_for(target).engine), weakref.ref(target.weights["embed_tokens"])
    loop_for(target).settle()  # its thread, which uses both, ends a moment after the call
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
    with halted(begun(1)) as halt:
        stream = llm.stream(PROMPT, PARAMS)
        text, got = next(stream), []
        engine = loop_for(target).engine
        other = threading.Thread(target=lambda: got.extend(llm.generate([PROMPT], PARAMS)))
        other.start()
        until(lambda: loop_for(target).open_requests == 2)
        halt.set()
        join(other)
    # One slot: the other call waited for it, and the stream's text is all there.
    assert tokens_of(got) == expected
    assert loop_for(target).engine is engine
    text += "".join(stream)
    assert stream.completion.token_ids == expected
    assert stream.completion.text == text


def test_calls_that_need_another_engine_wait_for_an_open_stream(target, head, expected):
    """In one thread: the stream is decoded whether it is read or not."""
    stream = LLM(target, head, **TREE).stream(PROMPT, PARAMS)
    text = next(stream)
    engine = loop_for(target).engine
    trace = trace_rounds(target, head, PROMPT, PARAMS, TreeSettings(16, 3))
    assert len(list(trace)) > 0
    assert trace.completion.token_ids == expected
    assert tokens_of(generate(target, [PROMPT], PARAMS)) == expected
    assert loop_for(target).engine is not engine
    assert engine.broken
    text += "".join(stream)
    assert (stream.completion.token_ids, stream.completion.text) == (expected, text)


@pytest.mark.wide
def test_beside_a_stream_s_engine_that_is_too_small():
    config = dataclasses.replace(CONFIG, max_position_embeddings=4096)
    llm = LLM(random_target(config, 0, tokenizer=word_tokenizer(64)), **TREE)
    long = [1] * 1100
    with llm.stream(PROMPT, SHORT) as stream:
        next(stream)
        engine = loop_for(llm.target).engine
        [beside] = llm.generate([long], SHORT)
        assert loop_for(llm.target).engine is not engine
        list(stream)
    assert (engine.plan.size.capacity, len(stream.completion.token_ids)) == (1024, SHORT.max_tokens)
    with llm.stream(long, SHORT) as alone:
        next(alone)
        assert loop_for(llm.target).engine.plan.size.capacity == 2048
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


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_after_an_interrupt_the_same_engine_serves(target, head, expected, monkeypatch, name):
    """It strikes the caller, who waits; the engine's thread goes on."""
    generate_tree(target, head, [PROMPT], SHORT, **TREE)
    before, run = loop_for(target).engine, getattr(TreeDecoder, name)

    def interrupting(*arguments):
        _thread.interrupt_main()
        return run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TreeDecoder, name, interrupting)
        with pytest.raises(KeyboardInterrupt):
            generate_tree(target, head, [PROMPT[::-1]], PARAMS, **TREE)
    assert not before.busy
    assert tokens_of(generate_tree(target, head, [PROMPT], PARAMS, **TREE)) == expected
    assert loop_for(target).engine is before
    assert before.scheduler.free_pages == before.plan.size.num_pages
    trace = trace_rounds(target, head, PROMPT, PARAMS, TreeSettings(16, 3))
    assert sum(len(one.committed) for one in trace) >= len(expected) - 1
    assert trace.completion.token_ids == expected


@pytest.mark.parametrize(
    ("owner", "name"), [(TreeDecoder, "decode"), (TreeDecoder, "prefill"), (jax, "device_get")]
)
def test_after_an_error_of_the_device_all_calls_work(target, head, expected, monkeypatch, owner, name):
    generate_tree(target, head, [PROMPT], SHORT, **TREE)
    before = loop_for(target).engine

    def fail(*_):
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="the device is gone"):
            generate_tree(target, head, [PROMPT[::-1]], PARAMS, **TREE)
    assert before.broken
    assert not before.busy
    assert tokens_of(generate_tree(target, head, [PROMPT], PARAMS, **TREE)) == expected
    engine = loop_for(target).engine
    assert engine is not before
    assert engine.scheduler.free_pages == engine.plan.size.num_pages
