"""Grammars that take too much: refused by a process that may die, while the server answers others."""

import asyncio
import json
import signal
import threading
import time

import httpx
import pytest

from jetspec_jax.sampling.structured import StructuredOutputsParams as Wanted
from jetspec_jax.serve import trials
from jetspec_jax.serve.errors import ApiError
from jetspec_jax.serve.trials import GrammarTrials
from tests.serve.conftest import small_target
from tests.serve.hostile import COMPLETION, HOSTILE
from tests.serve.servers import Command

JSON = {"Content-Type": "application/json"}
FINE = Wanted(json={"type": "object", "properties": {"a": {"type": "integer"}}})
#: What a trial cannot survive: time, memory, the stack.
DEADLY = {
    "time": Wanted(json={"type": "integer", "multipleOf": 999983}),
    "memory": Wanted(regex="a?" * 30_000),
    "stack": Wanted(grammar="start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(4000)) + 'a4000: "x"'),
}


@pytest.fixture(scope="module")
def target():
    return small_target()


def tried(target, *each, seconds=0.5):
    """What becomes of grammars: why each is refused, or None."""

    async def run():
        own, outcomes = GrammarTrials(target, seconds), []
        for wanted in each:
            try:
                await own.check(wanted)
                outcomes.append(None)
            except ValueError as error:
                outcomes.append(str(error))
        await own.close()
        return outcomes

    return asyncio.run(run())


def test_a_grammar_that_takes_too_much_ends_its_trial_alone(target):
    *refusals, fine = tried(target, *DEADLY.values(), FINE)
    assert fine is None
    for kind, said in zip(("json", "regex", "grammar"), refusals, strict=True):
        assert said.startswith(
            f"structured_outputs: {kind} takes more than 0.5 seconds or 256 MiB to compile"
        )


def test_what_does_not_compile_is_refused_in_the_words_of_llguidance(target):
    wrong, fine = tried(target, Wanted(regex="(a"), FINE)
    assert wrong.startswith("structured_outputs: regex does not compile: ")
    assert fine is None


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
NEXT = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
#: Two names are required of objects whose only name is "ab".
TWO_NAMES = {"patternProperties": {"^ab$": {}}, "required": ["ab"], "minProperties": 2}


@pytest.mark.parametrize("rigid", [False, True])
def test_what_no_text_can_end_is_refused(target, rigid):
    endless = (
        NEXT | {"required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        *(TWO_NAMES | NEXT | {"properties": {"ab": value}} for value in (INTEGER, TEXT)),
    )
    fine = (
        *(NEXT, {"type": "array", "items": {"$ref": "#"}}, {"type": "object"}, {}),
        TWO_NAMES | NEXT | {"properties": {"ab": INTEGER}, "minProperties": 1},
        {"type": "array", "items": TEXT, "minItems": 1000},
        {"type": "string", "minLength": 1000},
    )
    forms = [Wanted(json=schema, disable_any_whitespace=rigid) for schema in (*endless, *fine)]
    refusals = tried(target, *forms, seconds=60)
    for refusal in refusals[: len(endless)]:
        assert refusal.startswith("structured_outputs: json allows no text that ends: nothing may follow '")
    assert refusals[len(endless) :] == [None] * len(fine)
    others = Wanted(grammar='start: "a" "b" | "c"+'), Wanted(regex="a{1000}b*"), Wanted(choice=["a" * 3000])
    assert tried(target, *others, seconds=60) == [None] * len(others)


def test_a_grammar_is_tried_once(target, monkeypatch):
    made = []
    own = GrammarTrials._tried
    monkeypatch.setattr(
        GrammarTrials, "_tried", lambda self, wanted: made.append(wanted) or own(self, wanted)
    )
    wrong = Wanted(regex="(a")
    assert len({*tried(target, wrong, FINE, wrong, FINE)}) == 2
    assert made == [wrong, FINE]


def test_few_requests_wait_for_the_trials_of_others(target, monkeypatch):
    monkeypatch.setattr(trials, "MOST_WAITING", 1)

    async def run():
        own = GrammarTrials(target, 5)
        first = asyncio.create_task(own.check(FINE))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await own.check(Wanted(regex="a"))
        await first
        await own.check(Wanted(regex="a"))
        await own.close()
        return caught.value

    error = asyncio.run(run())
    assert (error.status, error.code) == (429, "queue_full")


def test_a_cancelled_request_leaves_no_trial_behind(target):
    async def run():
        own = GrammarTrials(target, 60)
        await own.check(FINE)
        process = own._process
        assert process is not None
        waits = asyncio.create_task(own.check(DEADLY["time"]))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert await process.wait() == -signal.SIGKILL
        await own.check(Wanted(regex="a"))
        await own.close()

    asyncio.run(run())


def ask(url, path, body, statuses):
    """Adds the status of a response, or 0 where the server ends instead."""
    try:
        statuses.append(httpx.post(f"{url}{path}", content=body, headers=JSON, timeout=None).status_code)
    except httpx.TransportError:
        statuses.append(0)


def slowest_health(http, url, path, body):
    """Asks for `/health` while a request is served: the longest wait in seconds, and the request's status."""
    statuses, longest = [], 0.0
    asks = threading.Thread(target=ask, args=(url, path, body, statuses))
    asks.start()
    while asks.is_alive():
        began = time.monotonic()
        assert http.get("/health").status_code == 200
        longest = max(longest, time.monotonic() - began)
        asks.join(0.02)
    return longest, statuses[0]


@pytest.mark.wide
def test_a_server_is_well_beside_a_hundred_hostile_requests_and_ends_on_a_signal():
    """`/health` answers within a second while each of them is read, compiled and served."""
    engine = ("--budget", "4", "--algorithm", "top_nodes", "--max-num-seqs", "2", "--warm-up", "none")
    own = Command(*engine, "--max-grammar-seconds", "0.5", "--drain-seconds", "1")
    slow, wrong = [], []
    try:
        # The engine is made and its programs are compiled before.
        for more in ({"structured_outputs": {"json_object": True}}, {"bad_words": ["a b c"]}):
            fine = {"prompt": "a", "max_tokens": 2, **more}
            assert httpx.post(f"{own.url}{COMPLETION}", json=fine, timeout=None).status_code == 200
        with httpx.Client(base_url=own.url, timeout=None) as http:
            for path, body in HOSTILE:
                # A busy machine may be slow once; a request that stops the server does so each time.
                for _ in range(3):
                    longest, status = slowest_health(http, own.url, path, body)
                    if longest < 1:
                        break
                else:
                    slow.append((path, body[:80], longest))
                if not 200 <= status < 500:
                    wrong.append((path, body[:80], status))
        assert (slow, wrong) == ([], [])
        # A signal ends the process while grammars wait to be compiled.
        forms = [{"regex": ".*" * (10_000 + number)} for number in range(8)]
        bodies = [json.dumps({"prompt": "a", "structured_outputs": form}).encode() for form in forms]
        asks = [threading.Thread(target=ask, args=(own.url, COMPLETION, body, [])) for body in bodies]
        for one in asks:
            one.start()
        own.process.send_signal(signal.SIGTERM)
        assert own.process.wait(600) == 0
        for one in asks:
            one.join()
    finally:
        own.process.kill()
        own.process.communicate()
