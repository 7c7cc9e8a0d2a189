"""An engine serves as soon as it can serve any request; the other programs are compiled beside."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections import deque

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jetspec_jax import LLM, AsyncLLM, SamplingParams, generate
from jetspec_jax.engine import engine as engine_module
from jetspec_jax.engine.batch import Kind, Program
from jetspec_jax.engine.compiler import REPLACED, Compiler
from jetspec_jax.engine.runner import Lowering
from jetspec_jax.engine.size import EngineSize, compile_order, first_programs
from tests.decode.compilations import compilations
from tests.engine.test_figures import batches_of, whole
from tests.events import PATIENCE, until
from tests.serve.servers import served

PROMPT, PARAMS = [3, 1, 4, 1, 5], SamplingParams(max_tokens=12, ignore_eos=True)
SLOTS, BUDGET = 4, 16
# The programs of an engine with these settings on a CPU that can serve any request, and the others.
FIRST = {("prompts", 1, 128), ("rounds", SLOTS, 1), ("rounds", SLOTS, BUDGET)}
REST = [("rounds", 1, BUDGET), ("rounds", 1, 1)]
SIZE = EngineSize(8, 1024, 128, ((1, 128), (1, 1024), (8, 128)), live=(1, 2, 4), most_rows=64)
BUCKETS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def expected(models):
    return generate(models[0], [PROMPT], PARAMS)[0].token_ids


@pytest.fixture(params=["top_nodes", "auto"])
def llm(models, request):
    yield (made := AsyncLLM(*models, budget=BUDGET, width=3, algorithm=request.param, max_slots=SLOTS))
    made.shutdown()
    until(lambda: not compiling())


def compiling():
    return [thread for thread in threading.enumerate() if thread.name == "jetspec-compiler"]


@contextlib.contextmanager
def held(error=None):
    """Other programs than the first ones are not compiled until the event that this gives is set."""
    compile, left = Lowering.compile, threading.Event()

    def late(lowering, program):
        if program not in FIRST:
            assert left.wait(PATIENCE)
            if error is not None:
                raise error
        compile(lowering, program)

    Lowering.compile = late
    try:
        yield left
    finally:
        left.set()
        until(lambda: not compiling())
        Lowering.compile = compile


def test_a_larger_shape_serves_until_the_right_one_is_there(llm, models, expected, monkeypatch):
    batches = batches_of(monkeypatch)

    async def run():
        with held() as left:
            await llm.warm_up(background=True)
            assert (llm.warm, llm.stats().programs_left) == (False, len(REST))
            assert (await whole(llm, PROMPT, PARAMS)).token_ids == expected
            assert {len(batch.live) for batch in batches if batch.rounds} == {SLOTS}
            assert {batch.bucket for batch in batches if batch.rounds} <= {1, BUDGET}
            left.set()
            await llm.warm_up()
        assert (llm.warm, llm.stats().programs_left) == (True, 0)
        batches.clear()
        with compilations() as seen:
            assert (await whole(llm, PROMPT, PARAMS)).token_ids == expected
            assert {len(batch.live) for batch in batches if batch.rounds} == {1}
            crowd = await asyncio.gather(*[whole(llm, PROMPT, PARAMS) for _ in range(SLOTS)])
        assert {tuple(each.token_ids) for each in crowd} == {tuple(expected)}
        assert seen == []

    asyncio.run(run())


def test_closing_ends_what_is_compiled(models):
    async def run():
        llm = AsyncLLM(*models, budget=BUDGET, width=3, algorithm="top_nodes", max_slots=SLOTS)
        with held() as left:
            await llm.warm_up(background=True)
            [engine] = llm.llm.engines.engines()
            compiler = engine.runner.compiler
            until(lambda: compiler.left - len(compiler._queue) == len(compiling()))
            waiting = asyncio.create_task(llm.warm_up())
            await asyncio.sleep(0)
            await llm.close()
            left.set()
            until(lambda: not compiling())
            assert compiler.left == 0
            with pytest.raises(RuntimeError, match="closed"):
                await waiting

    asyncio.run(run())


def test_what_cannot_be_compiled_ahead_is_replaced_by_a_larger_program(llm, expected, caplog, monkeypatch):
    batches = batches_of(monkeypatch)

    async def run():
        with held(ValueError("no room for the compiler")) as left:
            await llm.warm_up(background=True)
            left.set()
            with pytest.raises(ValueError, match="no room for the compiler"):
                await llm.warm_up()
            batches.clear()
            assert (await whole(llm, PROMPT, PARAMS)).token_ids == expected
            assert {len(batch.live) for batch in batches if batch.rounds} == {SLOTS}
            assert llm.warm

    asyncio.run(run())
    assert caplog.text.count("was not compiled ahead: no room for the compiler") >= 1


def test_a_server_says_whether_it_is_warm(llm):
    def left(http):
        [family] = [
            family
            for family in text_string_to_metric_families(http.get("/metrics").text)
            if family.name == "jetspec:programs_left"
        ]
        return family.samples[0].value

    with held() as event, served(llm, warm_up="usual") as own, own.client() as http:
        state = {"status": "ok", "warm": False, "programs_left": len(REST)}
        assert http.get("/health").json() == state
        assert left(http) == len(REST)
        answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4})
        assert answer.status_code == httpx.codes.OK
        event.set()
        until(lambda: http.get("/health").json() == {**state, "warm": True, "programs_left": 0})
        assert left(http) == 0


class TestCalls:
    """Engines whose programs are compiled when calls need them."""

    @pytest.fixture
    def own(self, models):
        # A width of its own, so that no other test has compiled what is needed.
        with LLM(*models, budget=BUDGET, width=6, max_slots=SLOTS) as llm:
            yield llm

    def rounds(self, llm):
        [engine] = llm.engines.engines()
        compiler = engine.runner.compiler
        until(lambda: compiler.left == 0)
        return {program for program in compiled_by(compiler) if program.kind != "prompts"}

    def test_a_call_compiles_its_programs_and_no_others(self, own):
        own.generate([PROMPT] * 3, PARAMS)
        assert self.rounds(own) == {("rounds", SLOTS, BUDGET)}

    def test_a_program_that_larger_ones_replace_for_long_is_compiled_beside(self, own, monkeypatch):
        monkeypatch.setattr("jetspec_jax.engine.policy.SLICE_SECONDS", 0.0)  # a round a dispatch
        monkeypatch.setattr("jetspec_jax.engine.compiler.REPLACED", 8)
        batches = batches_of(monkeypatch)
        own.generate([PROMPT] * SLOTS, PARAMS)
        own.generate([PROMPT], PARAMS)
        assert {len(batch.live) for batch in batches if batch.rounds} >= {SLOTS}
        assert self.rounds(own) == {("rounds", 1, BUDGET), ("rounds", SLOTS, BUDGET)}
        batches.clear()
        own.generate([PROMPT], PARAMS)
        assert {len(batch.live) for batch in batches if batch.rounds} == {1}

    def test_programs_of_parts_are_those_of_the_number_of_prompts(self, own):
        wants = SamplingParams(max_tokens=4, logprobs=1)
        own.generate([PROMPT], wants)
        own.generate([PROMPT] * SLOTS, wants)
        shapes = {("rounds logprobs", live, BUDGET) for live in (1, SLOTS)}
        assert self.rounds(own) == shapes


def test_programs_of_single_rounds_are_compiled_ahead(models, expected, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(engine_module, "overlaps", lambda plan: True)
    llm = AsyncLLM(*models, budget=BUDGET, width=7, algorithm="auto", max_slots=SLOTS)

    async def run():
        with held() as left:
            await llm.warm_up(background=True)
            assert not llm.warm
            assert (await whole(llm, PROMPT, PARAMS)).token_ids == expected
            left.set()
            await llm.warm_up()
        with compilations() as seen:
            crowd = await asyncio.gather(*[whole(llm, PROMPT, PARAMS) for _ in range(SLOTS)])
        assert {tuple(each.token_ids) for each in crowd} == {tuple(expected)}
        assert seen == []
        [engine] = llm.llm.engines.engines()
        assert engine.runner.overlapped
        await llm.close()

    asyncio.run(run())


def test_a_program_ends_while_others_are_compiled():
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.ready_program"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("compiling\n", 3), ran.stderr
    assert "Traceback" not in ran.stderr


def compiled_by(compiler):
    return {*compiler._compiled}


class TestOrder:
    def test_all_programs_are_compiled_once(self):
        shapes = {("rounds", *shape) for shape in SIZE.rounds(BUCKETS)}
        programs = compile_order(SIZE, BUCKETS, [Kind()])
        assert len(programs) == len(set(programs))
        assert set(programs) == shapes | {("prompts", *chunk) for chunk in SIZE.chunks}

    def test_first_come_programs_for_any_request_of_every_kind(self):
        kinds = [Kind(logprobs=True), Kind()]
        programs = compile_order(SIZE, BUCKETS, kinds)
        first = [("prompts", 1, 1024), ("rounds", 8, 1), ("rounds", 8, 8)]
        assert first_programs(SIZE, BUCKETS, Kind()) == first
        assert programs[:5] == [*first, ("rounds logprobs", 8, 1), ("rounds logprobs", 8, 8)]
        assert {program.kind for program in programs[5:7]} == {"prompts"}

    def test_few_slots_and_large_trees_come_before_others(self):
        programs = compile_order(SIZE, BUCKETS, [Kind()])
        rest = [program[1:] for program in programs[5:]]
        assert rest[:5] == [(1, 16), (1, 1), (1, 8), (1, 4), (1, 2)]
        assert [live for live, _ in rest] == sorted(live for live, _ in rest)


class TestCompiler:
    def compiler(self, *, threads=2):
        gates = {program: threading.Event() for program in compile_order(SIZE, BUCKETS, [Kind()])}
        compiler = Compiler(lambda program: gates[program].wait(PATIENCE), threads)
        compiler.add(gates)
        return compiler, gates

    def test_a_shape_is_replaced_by_the_smallest_larger_one(self):
        compiler, gates = self.compiler()

        def compiled(*shapes):
            for shape in shapes:
                gates[Program("rounds", *shape)].set()
                until(lambda shape=shape: Program("rounds", *shape) in compiled_by(compiler))

        gates[Program("prompts", 1, 1024)].set()
        compiled((8, 1), (8, 8))
        assert compiler.shape("rounds", 8, 8) == compiler.shape("rounds", 1, 4) == (8, 8)
        assert compiler.shape("rounds", 4, 16) == (8, 8), "no tree is as large"
        assert compiler.shape("rounds", 2, 1) == (8, 1)
        assert compiler.chunks(SIZE.chunks) == [(1, 1024)]
        for program in gates:
            if program.kind == "prompts":
                gates[program].set()
        compiled((1, 16))
        assert compiler.shape("rounds", 1, 4) == (1, 16)
        assert compiler.shape("rounds", 2, 4) == (8, 8)
        compiled((1, 8), (1, 4), (1, 2), (1, 1))
        assert compiler.shape("rounds", 1, 1) == (1, 1)
        # Nobody compiles these ahead.
        assert compiler.shape("rounds logprobs", 2, 4) == (2, 4)
        for gate in gates.values():
            gate.set()
        compiler.wait()
        assert compiler.left == 0
        assert compiler.shape("rounds", 2, 4) == (2, 4)
        assert tuple(compiler.chunks(SIZE.chunks)) == SIZE.chunks

    def test_a_program_that_is_needed_is_compiled_first_and_once(self):
        compiler, gates = self.compiler(threads=1)
        first, *_, last = gates
        until(lambda: first not in compiler._queue)
        gates[last].set()
        before = compiler.left
        compiler.compile([last])
        assert compiler.left == before - 1
        thread = threading.Thread(target=compiler.compile, args=([first],))
        thread.start()
        for gate in gates.values():
            gate.set()
        thread.join(PATIENCE)
        compiler.wait()
        assert compiled_by(compiler) == {*gates}

    def test_a_program_of_all_present_requests_is_compiled_at_once(self):
        compiler = Compiler(lambda program: None, 0)
        assert compiler.shape("rounds", 1, 4, 8) == (8, 4)
        compiler.compile([Program("rounds", 8, 4)])
        assert compiler.shape("rounds", 1, 4, 1) == (8, 4)
        assert compiler.shape("rounds", 1, 1, 1) == (1, 1), "trees of another size replace nothing"

    def test_a_program_is_queued_once_others_have_replaced_it_often(self):
        compiler = Compiler(lambda program: None, 1)
        compiler.compile([Program("rounds", 8, 4)])
        for _ in range(REPLACED - 1):
            assert compiler.shape("rounds", 1, 4) == (8, 4)
        assert compiled_by(compiler) == {("rounds", 8, 4)}
        compiler.shape("rounds", 1, 4)
        compiler.wait()
        assert compiler.shape("rounds", 1, 4) == (1, 4)

    def test_without_threads_the_caller_compiles_in_order(self):
        seen = []
        compiler = Compiler(seen.append, 0)
        programs = compile_order(SIZE, BUCKETS, [Kind()])
        compiler.add(programs)
        compiler.add(programs[:3])
        assert seen == []
        compiler.wait()
        assert seen == programs

    def test_a_program_that_failed_is_replaced_if_a_larger_one_exists(self):
        def compile(program):
            if program.size == 4:
                raise ValueError("too large")

        compiler = Compiler(compile, 0)
        compiler.add([Program("rounds", 1, 4), Program("rounds", 2, 4)])
        with pytest.raises(ValueError, match="too large"):
            compiler.wait()
        assert compiler.shape("rounds", 1, 4) == (1, 4), "it is tried again when it is needed"
        compiler.compile([Program("rounds", 4, 8)])
        assert compiler.shape("rounds", 1, 4) == compiler.shape("rounds", 2, 4) == (4, 8)

    def test_callers_that_wait_are_told_of_the_end(self):
        first, second = Program("rounds", 1, 4), Program("rounds", 2, 4)
        begun, gate = threading.Event(), threading.Event()
        compiler = Compiler(lambda program: begun.set() or gate.wait(PATIENCE), 1)
        compiler.add([first, second])
        assert begun.wait(PATIENCE)
        ended = []

        def wait():
            with pytest.raises(RuntimeError, match="closed before its programs were compiled"):
                compiler.wait([second])
            ended.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        compiler.stop()
        thread.join(PATIENCE)
        gate.set()
        assert ended

    def test_an_interrupt_of_a_caller_that_compiles_leaves_nothing_running(self):
        def compile(program):
            if program not in compiled:
                compiled.append(program)
                raise KeyboardInterrupt

        compiled: list[Program] = []
        compiler, program = Compiler(compile, 0), Program("rounds", 1, 4)
        with pytest.raises(KeyboardInterrupt):
            compiler.compile([program])
        assert compiler.left == 0
        compiler.compile([program])
        assert compiler.shape("rounds", 1, 4) == (1, 4)

    def test_a_thread_that_cannot_start_is_started_later(self, monkeypatch):
        def full(thread):
            raise RuntimeError("can't start new thread")

        first, second = Program("rounds", 1, 4), Program("rounds", 2, 4)
        compiler = Compiler(lambda program: None, 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", full)
            with pytest.raises(RuntimeError, match="can't start"):
                compiler.add([first])
        assert not compiler._threads
        compiler.compile([first, second])
        assert compiler.left == 0

    def test_a_program_is_left_from_its_addition_to_its_end(self):
        class Queue(deque):
            def remove(self, program):
                super().remove(program)
                seen.append(compiler.left)  # as another thread may read it now

        compiler, seen = Compiler(lambda program: seen.append(compiler.left), 0), []
        compiler._queue = Queue()
        compiler.add([Program("rounds", 1, 4), Program("rounds", 2, 4)])
        compiler.wait()
        assert seen == [2, 2, 1, 1]
        assert compiler.left == 0
