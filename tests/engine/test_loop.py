"""The loop of an engine: whatever happens to a caller, or to its thread, nobody waits for ever."""

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections import deque
from pathlib import Path

import jax
import pytest

from jetspec_jax import LLM, SamplingParams, TreeDecoder, generate
from jetspec_jax.decode.settings import PLAIN
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine import policy
from jetspec_jax.engine.admission import plan_requests
from jetspec_jax.engine.call import Call, Flag
from jetspec_jax.engine.engine import LOST, Engine
from jetspec_jax.engine.loop import EngineLoop, loop_for, wait
from jetspec_jax.engine.request import EngineFailed
from jetspec_jax.engine.serving import Group, complete
from tests.decode.tiny import TINY, random_head, random_target, with_windows, word_tokenizer
from tests.engine.halting import begun, halted, paused
from tests.events import PATIENCE, join, until

CONFIG = with_windows(TINY, None)
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
TREE = {"budget": 16, "width": 3}


@pytest.fixture(scope="module")
def models():
    return random_target(CONFIG, 0, tokenizer=word_tokenizer(CONFIG.vocab_size)), random_head(CONFIG, 0)


@pytest.fixture(scope="module")
def expected(models):
    return generate(models[0], [PROMPT], PARAMS)[0].token_ids


@pytest.fixture
def llm(models):
    """One whose loop leaves no thread, no request and no page behind."""
    yield LLM(*models, **TREE)
    loop = loop_for(models[0])
    until(lambda: loop._thread is None)
    assert loop.open_requests == 0
    if loop.engine is not None:
        assert loop.engine.scheduler.free_pages == loop.engine.plan.size.num_pages


def tokens_of(completions):
    [completion] = completions
    return completion.token_ids


def in_thread(call):
    """A thread that makes a call, and a list for what that returns or raises."""
    got = []

    def run():
        try:
            got.append(call())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


def test_targets_have_a_loop_each_and_heads_share_it(models):
    target, other = models[0], random_target(CONFIG, 1)
    assert loop_for(target) is loop_for(target) is Group(*models).loop
    assert loop_for(other) is not loop_for(target)


def test_a_loop_is_freed_with_its_target():
    target = random_target(CONFIG, 1)
    generate(target, [PROMPT], PARAMS)
    loop = weakref.ref(loop_for(target))
    loop().settle()
    engine = weakref.ref(loop().engine)
    del target
    gc.collect()
    assert loop() is engine() is None


def test_a_target_is_freed_after_an_error_of_its_engine(monkeypatch):
    """No error that is kept holds the frames of a caller. What the engine did is counted nevertheless."""

    def broken(engine):
        raise RuntimeError("the device is gone")

    def called(target):
        with contextlib.suppress(RuntimeError):
            generate(target, [PROMPT], PARAMS)
            raise AssertionError("the call has not failed")

    target = random_target(CONFIG, 1)
    monkeypatch.setattr(Engine, "collect", broken)
    called(target)
    loop = loop_for(target)
    assert loop.failed
    assert loop.stats(0).prefix_queries == len(PROMPT)
    found = weakref.ref(target)
    loop.settle()
    del target, loop
    gc.collect()
    assert found() is None


def test_a_flag_is_set_until_it_is_cleared():
    flag = Flag()
    flag.set()
    flag.set()
    flag.wait()
    flag.wait()  # at once: it is still set
    flag.clear()
    thread, got = in_thread(flag.wait)
    assert not got
    flag.set()
    join(thread)
    assert got == [None]


def test_calls_that_need_different_engines_are_served_as_they_came(models, expected, monkeypatch):
    """A busy engine is waited for, and those that come later do not pass, though it would suit them."""
    target, tree, served = models[0], LLM(*models, **TREE), []
    plain = LLM(target)
    admit = Engine.admit

    def noted(engine, request):
        served.append(engine.plan.decoder.bucket)
        return admit(engine, request)

    monkeypatch.setattr(Engine, "admit", noted)
    with halted(begun(1)) as halt:
        calls = [in_thread(lambda: list(tree.stream(PROMPT, LONG)))]
        until(lambda: served == [16])
        for number, own in enumerate([plain, tree, plain], 2):
            calls.append(in_thread(lambda own=own: own.generate([PROMPT], PARAMS)))
            until(lambda number=number: loop_for(target).open_requests == number)
        assert len(served) == 1
        halt.set()
        for thread, _ in calls:
            join(thread)
    assert served == [16, 1, 16, 1]
    assert [tokens_of(got[0]) for _, got in calls[1:]] == [expected] * 3


def test_nobody_starves_behind_calls_that_never_stop(models, expected):
    """Each of two threads needs another engine than the other."""
    tree, plain, done = LLM(*models, **TREE), LLM(models[0]), threading.Event()

    def on_and_on():
        while not done.is_set():
            assert tokens_of(tree.generate([PROMPT], PARAMS)) == expected

    threads = [in_thread(on_and_on) for _ in range(2)]
    for _ in range(5):
        assert tokens_of(plain.generate([PROMPT], PARAMS)) == expected
    done.set()
    for thread, got in threads:
        join(thread)
        assert got == [None]


@pytest.mark.parametrize("name", ["_has_work", "launch", "collect"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_thread_that_dies_says_so_and_the_next_call_works(llm, expected, monkeypatch, name, error):
    """Also to those who wait for their turn."""
    run, struck = getattr(EngineLoop, name), threading.Event()
    target = llm.target

    def strike(loop):
        if loop.open_requests == 2 and not struck.is_set():
            struck.set()
            raise error
        return run(loop)

    with paused(target):
        calls = [
            in_thread(lambda own=own: own.generate([PROMPT], PARAMS)) for own in (llm, LLM(target, budget=1))
        ]
        until(lambda: loop_for(target).open_requests == 2)
        monkeypatch.setattr(EngineLoop, name, strike)
    for thread, got in calls:
        join(thread)
        assert isinstance(got[0], EngineFailed)
        assert got[0].__cause__ is error
        assert "the engine's thread has ended" in str(got[0])
    assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected


def test_an_error_of_an_engine_is_not_that_of_calls_that_wait(llm, expected, monkeypatch):
    plain, decode = LLM(llm.target), TreeDecoder.decode

    def fail(decoder, *arguments):
        if decoder.bucket > 1:
            raise OSError("the device is gone")
        return decode(decoder, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TreeDecoder, "decode", fail)
        with paused(llm.target):
            first, failed = in_thread(lambda: llm.generate([PROMPT], PARAMS))
            until(lambda: loop_for(llm.target).open_requests == 1)
            second, got = in_thread(lambda: plain.generate([PROMPT], PARAMS))
            until(lambda: loop_for(llm.target).open_requests == 2)
        join(first, second)
    assert [str(error) for error in failed] == ["the device is gone"]
    assert type(failed[0]) is OSError
    assert tokens_of(got[0]) == expected
    assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected


def test_a_callback_that_raises_ends_its_request_alone(llm, models, expected):
    def fail():
        raise ZeroDivisionError("a mistake of the caller")

    with halted(begun(2)) as halt:
        other, got = in_thread(lambda: llm.generate([PROMPT], PARAMS))
        until(lambda: loop_for(llm.target).open_requests == 1)
        halt.set()
        plan, [request] = plan_requests(*models, llm.settings, [PROMPT], PARAMS)
        call = Group(*models).call(plan, [request])
        request.on_update = fail
        call.loop.submit(call)
        join(other)
        until(lambda: not request.open)
    assert isinstance(request.error, ZeroDivisionError)
    assert tokens_of(got[0]) == expected


@pytest.mark.parametrize("of", ["the same target", "another"])
def test_a_call_from_inside_of_an_engine_is_refused(llm, models, expected, of):
    """Of its own loop, for which it would wait for ever; or of one whose callback waits for the first."""
    other = llm if of == "the same target" else LLM(random_target(CONFIG, 1))
    plan, [request] = plan_requests(*models, llm.settings, [PROMPT], PARAMS)
    call = Group(*models).call(plan, [request])
    request.on_update = lambda: other.generate([PROMPT], PARAMS)
    call.loop.submit(call)
    until(lambda: not request.open)
    assert isinstance(request.error, RuntimeError)
    assert "cannot wait for one" in str(request.error)
    assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
    until(lambda: loop_for(other.target).open_requests == 0)


def test_two_loops_at_once(llm, expected):
    """Threads that use both in either order."""
    other = LLM(random_target(CONFIG, 0), random_head(CONFIG, 0), **TREE)

    def use(*both):
        return [tokens_of(own.generate([PROMPT], PARAMS)) for own in both * 3]

    threads = [in_thread(lambda: use(llm, other)), in_thread(lambda: use(other, llm))]
    for thread, got in threads:
        join(thread)
        assert got == [[expected] * 6]


def test_context_managers_of_the_callers_thread_do_not_reach_the_engine(llm, expected, monkeypatch):
    """They are settings of one thread, and the engine has its own; an engine serves all threads."""
    seen, decode = [], TreeDecoder.decode

    def noted(*arguments):
        seen.append(jax.config.jax_default_matmul_precision)
        return decode(*arguments)

    monkeypatch.setattr(TreeDecoder, "decode", noted)
    llm.generate([PROMPT], PARAMS)
    engine = loop_for(llm.target).engine
    with jax.default_matmul_precision("highest"):
        assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
    assert set(seen) == {jax.config.jax_default_matmul_precision}
    assert loop_for(llm.target).engine is engine


def test_a_stream_that_is_dropped_frees_its_slot(llm):
    with halted(begun(1)):
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        loop = loop_for(llm.target)
        assert loop.open_requests == 1
        del stream
        gc.collect()
        assert loop.open_requests == 0


def test_a_stream_goes_on_while_nobody_reads(llm, expected):
    stream = llm.stream(PROMPT, PARAMS)
    until(lambda: loop_for(llm.target)._thread is None)
    assert len(list(stream)) == 1
    assert stream.completion.token_ids == expected


def test_nothing_runs_for_a_call_that_a_stop_string_has_ended(llm, monkeypatch):
    """Its reader finds the string, and the loop hears of that before it launches again."""
    [whole] = llm.generate([PROMPT], LONG)
    stop = whole.text[8:12]
    launches, launch = [], Engine.launch
    monkeypatch.setattr("jetspec_jax.engine.loop._MOMENT", PATIENCE)
    monkeypatch.setattr(policy, "HURRIED_SECONDS", 1e9)  # so that one dispatch reaches the string
    monkeypatch.setattr(Engine, "launch", lambda *own: launches.append(own) or launch(*own))
    [cut] = llm.generate([PROMPT], SamplingParams(max_tokens=200, ignore_eos=True, stop=stop))
    assert cut.text == whole.text[: whole.text.index(stop)]
    loop_for(llm.target).settle()
    assert len(launches) == 1


def test_an_engine_that_is_closed_while_somebody_waits(llm, expected):
    with halted(begun(1)) as halt:
        thread, got = in_thread(lambda: list(llm.stream(PROMPT, LONG)))
        engine = until(lambda: loop_for(llm.target).engine)
        until(lambda: begun(1)(engine.scheduler.requests))
        engine.close()
        join(thread)
        halt.set()
    assert [(type(error), str(error)) for error in got] == [(RuntimeError, LOST)]
    assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected


def test_a_broken_engine_of_the_callers_is_refused(models):
    """No other one is made in its place."""
    plan, requests = plan_requests(models[0], None, PLAIN, [PROMPT], PARAMS)
    engine = Engine(plan, DecodeWeights(models[0].weights))
    engine.close()
    with pytest.raises(RuntimeError, match=LOST):
        complete([engine], requests, None, None)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_engine_that_does_not_fit_is_a_failure_of_a_server_alone(models, monkeypatch, persistent):
    def refuse(plan, weights, *, background):
        raise DeviceMemoryError("too large")

    monkeypatch.setattr("jetspec_jax.engine.loop.Engine", refuse)
    plan, requests = plan_requests(models[0], None, PLAIN, [PROMPT], PARAMS)
    loop = EngineLoop(None)
    plan = plan.for_many() if persistent else plan
    call = Call(loop, plan, DecodeWeights(models[0].weights), deque(requests))
    loop.submit(call)
    with pytest.raises(DeviceMemoryError, match="too large"):
        wait([call])
    loop.settle()
    assert loop.failed is persistent


def test_work_runs_alone_and_its_error_is_the_callers(llm, expected):
    loop, calls = loop_for(llm.target), []
    with paused(llm.target):
        thread, got = in_thread(lambda: llm.generate([PROMPT], PARAMS))
        until(lambda: loop.open_requests == 1)
        calls += loop.engine.scheduler.requests if loop.engine else []
    join(thread)
    assert calls == []
    assert tokens_of(got[0]) == expected
    with pytest.raises(ZeroDivisionError):
        loop.run(lambda: 1 // 0)
    assert loop.run(lambda: threading.current_thread().name) == "jetspec-engine"


PROGRAM = """
import dataclasses, threading
from jetspec_jax import LLM, SamplingParams
from tests.decode.tiny import TINY, random_target, with_windows, word_tokenizer
config = dataclasses.replace(with_windows(TINY, None), max_position_embeddings=2**16)
llm = LLM(random_target(config, 0, tokenizer=word_tokenizer(64)))
stream = llm.stream([3, 1, 4], SamplingParams(max_tokens=2**16 - 10, ignore_eos=True))
print(bool(next(stream)), flush=True)
def read():
    try:
        list(stream)
    except RuntimeError as error:
        print(error, flush=True)
threading.Thread(target=read, daemon=True).start()
"""


def test_a_program_ends_while_a_stream_is_open():
    """No abort and no complaint; a thread that waits is told, if it still gets to say so."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("True\n")
    assert "Traceback" not in ran.stderr
