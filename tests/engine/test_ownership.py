"""Engines and their owners: whatever happens to a caller, or to a thread, nobody waits for ever."""

import _thread
import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import jax
import pytest

from jetspec_jax import LLM, SamplingParams, TreeDecoder, generate, generate_tree
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine import engine as engine_module
from jetspec_jax.engine import runner
from jetspec_jax.engine.admission import make_requests
from jetspec_jax.engine.engine import CLOSED, Engine, State
from jetspec_jax.engine.request import EngineFailed
from jetspec_jax.engine.runner import Runner
from jetspec_jax.engine.scheduler import Scheduler
from jetspec_jax.inspect import trace as trace_module
from jetspec_jax.inspect.trace import trace_request, trace_rounds
from tests.decode.compilations import compilations
from tests.decode.tiny import TINY, free_pages, random_target, with_windows, word_tokenizer
from tests.engine.halting import begun, halted, paused
from tests.events import PATIENCE, join, until

CONFIG = with_windows(TINY, None)
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
TREE = {"budget": 16, "width": 3}


@pytest.fixture(scope="module")
def expected(models):
    return generate(models[0], [PROMPT], PARAMS)[0].token_ids


@pytest.fixture
def llm(models):
    """One whose engine has no request and no page in the end."""
    with LLM(*models, **TREE) as llm:
        yield llm
        [engine] = llm.engines.engines()
        engine.run(lambda: None)
        until(lambda: engine.open_requests == 0)
        assert engine.run(lambda: free_pages(engine.scheduler)) == engine.plan.size.num_pages


def engine_of(llm):
    [engine] = llm.engines.engines()
    return engine


def open_requests(llm):
    return engine_of(llm).open_requests


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "jetspec-engine"]


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


def test_a_reset_empties_the_prefix_cache(llm):
    prompt = [number % 64 for number in range(130)]
    with llm.stream(PROMPT, LONG) as other:
        next(other)
        hits = [llm.generate([prompt], SHORT)[0] for _ in range(2)]
        assert llm.reset_prefix_cache()
        hits += [llm.generate([prompt], SHORT)[0] for _ in range(2)]
    assert [each.num_cached_tokens for each in hits] == [0, 128, 0, 128]
    assert {tuple(each.token_ids) for each in hits} == {tuple(hits[0].token_ids)}


class TestLifetime:
    def test_an_engine_and_its_thread_end_with_their_owner(self):
        target = random_target(CONFIG, 1)
        llm, before = LLM(target), threads()
        llm.generate([PROMPT], PARAMS)
        engine = weakref.ref(engine_of(llm))
        stores = [weakref.ref(leaf) for leaf in jax.tree.leaves(engine().runner.state)]
        [thread] = set(threads()) - set(before)
        weights = weakref.ref(target.weights["embed_tokens"])
        del llm, target
        thread.join(PATIENCE)
        assert not thread.is_alive()
        gc.collect()
        assert engine() is weights() is None
        assert not any(store() is not None for store in stores)

    def test_ten_owners_in_a_row_have_the_stores_of_one(self, models, monkeypatch):
        alive, empty_state = [], runner.empty_state

        def counted(plan):
            gc.collect()
            alive.append(sum(engine.state is State.SERVING for engine in engine_module._SERVING))
            return empty_state(plan)

        monkeypatch.setattr(runner, "empty_state", counted)
        for _ in range(10):
            llm = LLM(*models, **TREE)
            llm.generate([PROMPT], SHORT)
            thread = engine_of(llm)._thread
            del llm
            thread.join(PATIENCE)
        assert alive == [alive[0]] * 10

    def test_functions_leave_no_engine_behind_and_compile_once(self, models, expected):
        before = threads()
        assert tokens_of(generate_tree(*models, [PROMPT], PARAMS, **TREE)) == expected
        with compilations() as seen:
            assert tokens_of(generate_tree(*models, [PROMPT], PARAMS, **TREE)) == expected
        assert seen == []
        assert threads() == before

    def test_a_target_is_freed_after_an_error_of_its_engine(self, monkeypatch):
        """No error that is kept holds the frames of a caller. What the engine did is counted nevertheless."""

        def broken(*_):
            raise RuntimeError("the device is gone")

        def called(llm):
            with contextlib.suppress(RuntimeError):
                llm.generate([PROMPT], PARAMS)
                raise AssertionError("the call has not failed")

        llm = LLM(random_target(CONFIG, 1))
        monkeypatch.setattr(Runner, "collect", broken)
        called(llm)
        until(lambda: llm.engines.failed)
        assert llm.engines.stats().prefix_queries == len(PROMPT)
        found = weakref.ref(llm.target)
        del llm
        until(lambda: gc.collect() >= 0 and found() is None)

    def test_a_closed_owner_says_so(self, models):
        with LLM(*models, **TREE) as llm:
            stream = llm.stream(PROMPT, LONG)
            next(stream)
        with pytest.raises(RuntimeError, match=CLOSED):
            list(stream)
        with pytest.raises(RuntimeError, match="is closed"):
            llm.generate([PROMPT], PARAMS)
        llm.close()

    def test_two_owners_of_a_target_have_stores_each(self, models, expected):
        with LLM(*models, **TREE) as one, LLM(models[0]) as other:
            for _ in range(2):
                assert tokens_of(one.generate([PROMPT], PARAMS)) == expected
                assert tokens_of(other.generate([PROMPT], PARAMS)) == expected
            assert engine_of(one) is not engine_of(other)

    def test_a_lack_of_memory_names_what_has_stores(self, llm, models, monkeypatch):
        llm.generate([PROMPT], SHORT)

        def refuse(plan, **_):
            raise DeviceMemoryError("too little memory")

        other = LLM(*models, **TREE)
        monkeypatch.setattr(engine_module, "check_engine_memory", refuse)
        with pytest.raises(
            DeviceMemoryError, match=r"too little memory\n\d+ engines .* have stores: close\(\)"
        ):
            other.generate([PROMPT], SHORT)
        other.close()

    def test_a_longer_request_makes_an_idle_engine_anew(self):
        config = dataclasses.replace(CONFIG, max_position_embeddings=4096)
        with LLM(random_target(config, 0, tokenizer=word_tokenizer(64)), **TREE) as llm:
            long = [1] * 1100
            refused = pytest.raises(ValueError, match=r"needs 1104 tokens.* slots have 1024.*capacity=2048")
            with halted(begun(1)), llm.stream(PROMPT, SHORT) as stream, refused:
                llm.generate([long], SHORT)
            assert list(stream) == []
            before = engine_of(llm)
            until(lambda: not before.open_requests)
            [beside] = llm.generate([long], SHORT)
            assert before.state is State.CLOSED
            assert engine_of(llm).plan.size.capacity == 2048
            assert len(beside.token_ids) == 4
            before = engine_of(llm)
            llm.generate([PROMPT], SHORT)
            assert engine_of(llm) is before


class TestCallers:
    def test_a_callback_that_raises_ends_its_request_alone(self, llm, expected):
        def fail():
            raise ZeroDivisionError("a mistake of the caller")

        with halted(begun(2)) as halt:
            other, got = in_thread(lambda: llm.generate([PROMPT], PARAMS))
            until(lambda: open_requests(llm) == 1)
            halt.set()
            [request] = make_requests(llm.target, llm.engines.plan, llm.settings, [PROMPT], PARAMS)
            request.on_update = fail
            llm.engines.submit([request])
            join(other)
            until(lambda: not request.open)
        assert isinstance(request.error, ZeroDivisionError)
        assert tokens_of(got[0]) == expected

    @pytest.mark.parametrize("of", ["the same", "another"])
    def test_a_call_from_inside_of_an_engine_is_refused(self, llm, expected, of):
        """Of its own engine, for which it would wait for ever; or of one that waits for the first."""
        other = llm if of == "the same" else LLM(random_target(CONFIG, 1))
        [request] = make_requests(llm.target, llm.engines.plan, llm.settings, [PROMPT], PARAMS)
        request.on_update = lambda: other.generate([PROMPT], PARAMS)
        llm.engines.submit([request])
        until(lambda: not request.open)
        assert isinstance(request.error, RuntimeError)
        assert "cannot wait for one" in str(request.error)
        assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
        until(lambda: open_requests(other) == 0)

    def test_context_managers_of_the_callers_thread_do_not_reach_the_engine(self, llm, expected, monkeypatch):
        """They are settings of one thread, and the engine has its own; an engine serves all threads."""
        seen, decode = [], TreeDecoder.decode

        def noted(*arguments):
            seen.append(jax.config.jax_default_matmul_precision)
            return decode(*arguments)

        monkeypatch.setattr(TreeDecoder, "decode", noted)
        llm.generate([PROMPT], PARAMS)
        with jax.default_matmul_precision("highest"):
            assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
        assert set(seen) == {jax.config.jax_default_matmul_precision}

    def test_a_function_runs_alone_and_its_error_is_the_callers(self, llm, expected):
        engine = engine_of(llm)
        with paused(llm.engines):
            thread, got = in_thread(lambda: llm.generate([PROMPT], PARAMS))
            until(lambda: open_requests(llm) == 1)
            assert engine.scheduler.requests == []
        join(thread)
        assert tokens_of(got[0]) == expected
        with pytest.raises(ZeroDivisionError):
            engine.run(lambda: 1 // 0)
        assert engine.run(lambda: threading.current_thread().name) == "jetspec-engine"

    @pytest.mark.parametrize("name", ["decode", "prefill"])
    def test_an_interrupt_strikes_the_caller_who_waits(self, llm, expected, monkeypatch, name):
        llm.generate([PROMPT], SHORT)
        before, run = engine_of(llm), getattr(TreeDecoder, name)

        def interrupting(*arguments):
            _thread.interrupt_main()
            return run(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(TreeDecoder, name, interrupting)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT[::-1]], PARAMS)
        assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
        assert engine_of(llm) is before


class TestStreams:
    def test_one_that_is_dropped_frees_its_slot(self, llm):
        with halted(begun(1)):
            stream = llm.stream(PROMPT, LONG)
            next(stream)
            assert open_requests(llm) == 1
            del stream
            gc.collect()
            assert open_requests(llm) == 0

    def test_one_goes_on_while_nobody_reads(self, llm, expected):
        stream = llm.stream(PROMPT, PARAMS)
        until(lambda: open_requests(llm) == 0)
        assert len(list(stream)) == 1
        assert stream.completion.token_ids == expected

    def test_one_is_over_after_an_interrupt(self, llm, expected, monkeypatch):
        stream, decode = llm.stream(PROMPT, LONG), TreeDecoder.decode
        next(stream)

        def interrupting(*arguments):
            _thread.interrupt_main()
            return decode(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(TreeDecoder, "decode", interrupting)
            with pytest.raises(KeyboardInterrupt):
                list(stream)
        assert list(stream) == []
        assert stream.completion is None
        assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected

    def test_one_that_another_thread_closes(self, llm):
        with halted(begun(1)):
            stream = llm.stream(PROMPT, LONG)
            next(stream)
            thread, got = in_thread(lambda: list(stream))
            stream.close()
            join(thread)
        assert got == [[]]

    def test_one_in_a_fork_is_refused(self, llm):
        with halted(begun(1)), llm.stream(PROMPT, LONG) as stream:
            next(stream)
            engine, process = engine_of(llm), os.getpid()
            engine._process = process + 1  # as in a fork of that process
            with pytest.raises(RuntimeError, match="is a fork"):
                list(stream)
            with pytest.raises(RuntimeError, match="is a fork"):
                engine.submit([])
            engine._process = process


class TestErrors:
    @pytest.mark.parametrize(
        ("owner", "name", "error"),
        [
            (Engine, "_take_commands", SystemExit(3)),
            (Scheduler, "next_batch", KeyboardInterrupt()),
            (Runner, "launch", SystemExit(3)),
            (Runner, "collect", KeyboardInterrupt()),
        ],
    )
    def test_a_thread_that_dies_says_so_and_the_next_call_works(
        self, llm, expected, monkeypatch, owner, name, error
    ):
        """Also to those who wait for their turn."""
        run, struck = getattr(owner, name), threading.Event()
        engine = engine_of(llm)

        def strike(*arguments, **settings):
            if engine.open_requests == 2 and not struck.is_set():
                struck.set()
                raise error
            return run(*arguments, **settings)

        with paused(llm.engines):
            calls = [in_thread(lambda: llm.generate([PROMPT], PARAMS)) for _ in range(2)]
            until(lambda: engine.open_requests == 2)
            monkeypatch.setattr(owner, name, strike)
        for thread, got in calls:
            join(thread)
            assert isinstance(got[0], EngineFailed)
            assert got[0].__cause__ is error
            assert "the engine's thread has ended" in str(got[0])
        assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
        assert engine_of(llm) is not engine

    @pytest.mark.parametrize(
        ("owner", "name"), [(TreeDecoder, "decode"), (TreeDecoder, "prefill"), (jax, "device_get")]
    )
    def test_after_an_error_of_the_device_all_calls_work(self, llm, expected, monkeypatch, owner, name):
        llm.generate([PROMPT], SHORT)
        before = engine_of(llm)

        def fail(*_):
            raise OSError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(OSError, match="the device is gone"):
                llm.generate([PROMPT[::-1]], PARAMS)
            until(lambda: llm.engines.failed)
        assert before.state is State.CLOSED
        assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
        assert not llm.engines.failed
        assert engine_of(llm) is not before

    def test_an_error_of_a_batch_in_flight_fails_the_requests_of_both(self, models, expected, monkeypatch):
        monkeypatch.setattr(engine_module, "overlaps", lambda plan: True)
        collect, count = Runner.collect, []

        def failing(runner):
            count.append(len(runner.in_flight))
            if len(count) == 3:
                raise RuntimeError("the device is lost")
            return collect(runner)

        with LLM(*models, **TREE) as llm:
            monkeypatch.setattr(Runner, "collect", failing)
            with pytest.raises(RuntimeError, match="the device is lost"):
                llm.generate([PROMPT] * 2, LONG)
            assert count == [2, 2, 2]
            assert llm.engines.stats().prefix_queries == 2 * len(PROMPT)
            assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
            assert llm.engines.stats().prefix_queries == 3 * len(PROMPT), "counters only grow"

    def test_an_engine_that_is_closed_while_somebody_waits(self, llm, expected):
        with halted(begun(1)) as halt:
            engine = engine_of(llm)
            thread, got = in_thread(lambda: list(llm.stream(PROMPT, LONG)))
            until(lambda: engine.state is State.SERVING and begun(1)(engine.scheduler.requests))
            closing, _ = in_thread(engine.close)
            until(lambda: not engine._commands.empty())
            halt.set()
            join(thread, closing)
        assert [str(error) for error in got] == [CLOSED]
        assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected


class TestTraces:
    SETTINGS = TreeSettings(16, 3)

    def test_one_takes_a_slot_and_others_go_on(self, llm, expected):
        """In one thread: the stream is decoded between the rounds of two traces."""
        engine_of(llm).run(lambda: None)
        before = threads()
        stream = llm.stream(PROMPT, PARAMS)
        one, other = (trace_request(llm.engines, llm.settings, PROMPT, PARAMS) for _ in range(2))
        rounds = [next(one), next(other), next(other)]
        assert tokens_of(llm.generate([PROMPT], PARAMS)) == expected
        rounds += [*one, *other]
        assert one.completion.token_ids == other.completion.token_ids == expected
        assert sum(len(each.committed) for each in rounds) >= 2 * len(expected) - 2
        list(stream)
        assert stream.completion.token_ids == expected
        assert threads() == before, "no trace has an engine of its own"

    def test_more_traces_than_slots_wait_for_one_that_ends(self, models, expected):
        with LLM(*models, **TREE, max_slots=1) as llm:
            first = trace_request(llm.engines, llm.settings, PROMPT, PARAMS)
            next(first)
            thread, got = in_thread(lambda: tokens_of(llm.generate([PROMPT], PARAMS)))
            until(lambda: open_requests(llm) == 2)
            first.close()
            join(thread)
            assert got == [expected]

    def test_a_plain_budget_has_plain_rounds(self, llm, expected):
        trace = trace_request(llm.engines, TreeSettings(1), PROMPT, PARAMS)
        assert {len(each.tokens) for each in trace} == {1}
        assert trace.completion.token_ids == expected

    @pytest.mark.parametrize("name", ["Output", "sorted"])  # before and after its request is made
    def test_an_interrupted_beginning_is_dropped_in_silence(self, llm, monkeypatch, name):
        def interrupted(*_):
            raise KeyboardInterrupt

        unraisable = []
        monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
        monkeypatch.setattr(trace_module, name, interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            trace_request(llm.engines, llm.settings, PROMPT, PARAMS)
        gc.collect()
        assert unraisable == []

    def test_a_trace_of_its_own_ends_its_engine(self, models, expected):
        before = threads()
        trace = trace_rounds(*models, PROMPT, PARAMS, self.SETTINGS)
        assert len(list(trace)) > 0
        assert trace.completion.token_ids == expected
        assert threads() == before


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
