"""Copies of a target on devices of their own: requests are dealt among them."""

import asyncio
import contextlib
import threading

import jax
import pytest

from jetspec_jax import LLM, AsyncLLM, Head, SamplingParams, Target
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.device.mesh import make_mesh
from jetspec_jax.engine.engine import Engine
from tests.decode.tiny import TINY, random_head, random_target, with_windows, word_tokenizer
from tests.events import PATIENCE, until
from tests.meshes import need_devices

CONFIG = with_windows(TINY, None)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3], [5, 8, 9, 7], [9, 3, 2], [3, 8], [4, 6, 2, 6]]
# The first goes on while all others come and go.
LENGTHS = [150, 6, 6, 6, 6, 6, 6]
TREE = {"budget": 16, "width": 3, "max_slots": 1}


def params_of(lengths):
    return [
        SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=length, ignore_eos=True)
        for seed, length in enumerate(lengths)
    ]


def tokens(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def pair():
    """A tiny pair twice, on a device each."""
    need_devices(2)
    one, head = random_target(CONFIG, 0, tokenizer=word_tokenizer(CONFIG.vocab_size)), random_head(CONFIG, 1)
    targets, heads = [], []
    for device in jax.devices()[1::-1]:
        mesh = make_mesh(devices=[device])
        placed = place(one.weights, CONFIG, mesh)
        targets.append(Target(CONFIG, placed, (), one.tokenizer, mesh, tuple(targets)))
        heads.append(Head(head.config, place(head.weights, head.config, mesh), mesh, tuple(heads)))
    return targets[-1], heads[-1]


@pytest.fixture(scope="module")
def llm(pair):
    with LLM(*pair, **TREE) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected():
    one = LLM(random_target(CONFIG, 0), random_head(CONFIG, 1), **TREE)
    return tokens(one.generate(PROMPTS, params_of(LENGTHS)))


@pytest.fixture
def served(monkeypatch):
    """The requests that each engine was given, by its device."""
    seen, submit = {0: [], 1: []}, Engine.submit

    def watched(engine, requests, *arguments):
        seen[engine.plan.decoder.mesh.devices.item().id] += [each.prompt.tolist() for each in requests]
        return submit(engine, requests, *arguments)

    monkeypatch.setattr(Engine, "submit", watched)
    return seen


def test_requests_are_dealt_evenly_when_they_are_submitted(llm, expected, served):
    assert tokens(llm.generate(PROMPTS, params_of(LENGTHS))) == expected
    assert served == {0: PROMPTS[::2], 1: PROMPTS[1::2]}


def test_engines_work_at_the_same_time(llm, expected, monkeypatch):
    """Both are launched before one is waited for."""
    collect, both = Engine._collect, threading.Barrier(2, timeout=PATIENCE)
    first = threading.Semaphore(2)

    def collected(engine):
        if first.acquire(blocking=False):
            both.wait()
        return collect(engine)

    monkeypatch.setattr(Engine, "_collect", collected)
    assert tokens(llm.generate(PROMPTS[:2], params_of(LENGTHS)[:2])) == expected[:2]
    assert not first.acquire(blocking=False), "each was collected"


def test_one_request_needs_one_engine(llm, expected, served):
    assert tokens(llm.generate(PROMPTS[:1], params_of(LENGTHS)[:1])) == expected[:1]
    assert served == {0: PROMPTS[:1], 1: []}


def test_streams_go_where_the_least_work_is(llm, expected, served):
    params = params_of(LENGTHS)
    first, second = (llm.stream(PROMPTS[i], params[0]) for i in (0, 1))
    pieces = [next(first)]
    until(lambda: served == {0: PROMPTS[:1], 1: PROMPTS[1:2]})
    second.close()
    # The other engine has no work any more.
    assert tokens(llm.generate(PROMPTS[2], params[2])) == expected[2:3]
    assert served == {0: PROMPTS[:1], 1: PROMPTS[1:3]}
    pieces += first
    assert first.completion.token_ids == expected[0]
    assert "".join(pieces) == first.completion.text


def test_a_broken_engine_is_replaced_and_the_others_go_on(llm, expected, monkeypatch):
    llm.generate(PROMPTS[:2], params_of([4, 4]))
    first, second = llm.engines.engines()
    first.run(lambda: None)  # the slot of the last request is free

    def fail():
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(first.runner, "collect", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            llm.generate(PROMPTS, params_of(LENGTHS))
    until(lambda: not second.open_requests)
    assert (first.failed, second.failed) == (True, False)
    assert tokens(llm.generate(PROMPTS, params_of(LENGTHS))) == expected
    assert llm.engines.engines()[0] is not first
    assert llm.engines.engines()[1] is second


def test_a_call_from_inside_of_a_wait(llm, expected):
    """As a bar of the caller's or a signal's handler makes it."""
    inside = []

    class Bar:
        def __init__(self, **_):
            pass

        def update(self, _):
            if not inside:
                inside.append(tokens(llm.generate(PROMPTS[1:3], params_of(LENGTHS)[1:3])))

        def close(self):
            pass

    assert tokens(llm.generate(PROMPTS, params_of(LENGTHS), use_tqdm=Bar)) == expected
    assert inside == [expected[1:3]]


@pytest.mark.wide
def test_callers_of_a_loop_are_served_by_all_copies(pair, expected, served):
    """Also those of a call, and one leaves; nothing compiles, and the figures are those of both."""
    params = params_of(LENGTHS)

    async def run():
        async with AsyncLLM(*pair, **{**TREE, "max_slots": 2, "algorithm": "top_nodes"}) as llm:
            await llm.warm_up()
            for requests in served.values():
                requests.clear()

            async def one(number, most=None):
                tokens = []
                async with contextlib.aclosing(llm.generate(PROMPTS[number], params[number])) as deltas:
                    async for delta in deltas:
                        tokens += delta.token_ids
                        if len(tokens) > (most or 1000):
                            break
                return tokens

            call = asyncio.to_thread(llm.llm.generate, PROMPTS, params)
            *got, whole = await asyncio.gather(one(0, 20), *map(one, range(7)), call)
            return got, tokens(whole), llm.stats()

    (left, *got), whole, stats = asyncio.run(run())
    assert left == expected[0][: len(left)]
    assert len(left) < 150
    assert got == whole == expected
    assert min(map(len, served.values())) > 1
    assert sum(map(len, served.values())) == 15
    assert stats.compilations == 0
    assert stats.pages == 2 * 2 * 4
    assert stats.prefix_queries >= sum(map(len, PROMPTS)) * 2
