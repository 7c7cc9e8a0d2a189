"""What a server bears: slow, silent and leaving clients, crowds, errors of the engine, and its own end."""

import asyncio
import contextlib
import json
import logging
import socket
import threading

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jetspec_jax import TreeDecoder
from jetspec_jax.engine.request import EngineFailed
from jetspec_jax.serve.app import MORE, make_app
from jetspec_jax.serve.completions import CompletionWriter
from jetspec_jax.serve.logs import LOG, JsonLines
from tests.engine.halting import begun, halted, paused
from tests.events import PATIENCE, join, until
from tests.serve.conftest import small_target
from tests.serve.scripted import Scripted
from tests.serve.servers import served
from tests.serve.test_bad_input import COMPLETION, refused

LONG = {"prompt": "def f(x):", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def target():
    return small_target()


def raw_request(body, path=COMPLETION):
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode() + content


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_stream_arrives_in_pieces(target):
    body, gate = {"prompt": "a", "stream": True}, threading.Semaphore(1)
    with (
        served(Scripted(target, "abcdef", size=1, gate=gate)) as own,
        own.client() as http,
        http.stream("POST", COMPLETION, json=body) as got,
    ):
        assert got.headers["Content-Type"].startswith("text/event-stream")
        events = (json.loads(line[6:]) for line in got.iter_lines() if line.startswith("data: {"))
        for piece in "abcdef":
            assert next(events)["choices"][0]["text"] == piece
            gate.release()
        assert len(list(events)) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_slot_and_pages(server, llm, stream):
    with halted(begun(1)):
        with connect(server) as own:
            own.sendall(raw_request({**LONG, "stream": stream}))
            until(lambda: llm.stats().running == 1)
            scheduler = llm.llm.engines.engines()[0].scheduler
            [request] = until(lambda: [one for one in scheduler.requests if one.tokens])
            if stream:
                own.recv(200)
        until(lambda: request.cancelled)
    until(lambda: (llm.stats().running, llm.stats().waiting) == (0, 0))
    # A request for all slots finds them free.
    with server.client() as http:
        got = http.post(COMPLETION, json={"prompt": "a", "max_tokens": 2, "n": 4})
    assert len(got.json()["choices"]) == 4
    assert llm.stats().pages_used == 0


def test_too_many_are_told_when_to_come_again(server):
    with client_of(server) as client, pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="demo", prompt=["a"] * 60)
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["Retry-After"] == "1"


def test_a_deadline(llm):
    with served(llm, request_timeout=0.001) as own, own.client() as http:
        refused(http.post(COMPLETION, json=LONG), 504, None, "in its time")
    until(lambda: llm.stats().running == 0)


def test_bounds_of_bodies_and_prompts(target):
    with served(Scripted(target), max_body_bytes=100, max_prompt_tokens=3) as own, own.client() as http:
        refused(http.post(COMPLETION, json={"prompt": "a" * 200}), 413, None, "100 bytes")
        got = http.post(COMPLETION, json={"prompt": [1, 2, 3, 4]})
        refused(got, 400, "prompt", "the prompt is too long: 4 tokens, and this server takes at most 3")

        def chunks():
            for _ in range(50):
                yield b" " * 10

        # A client that still sends may see the connection end before it reads.
        with contextlib.suppress(httpx.TransportError):
            got = http.post(COMPLETION, content=chunks(), headers={"Content-Type": "application/json"})
            refused(got, 413, None, "100 bytes")


def test_who_sends_slowly_is_not_waited_for(target):
    """No headers of a first request, none of a second one, no body, none to a request that has its answer."""
    late = raw_request({"prompt": "a"})[:-3]
    answered = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", raw_request({"prompt": "a"}, "/no")[:-3]
    with served(Scripted(target), body_timeout=2) as own, contextlib.ExitStack() as stack:
        sent = late, b"POST /v1/comp", *answered
        slow, *silent = [stack.enter_context(connect(own)) for _ in sent]
        for one, part in zip((slow, *silent), sent, strict=True):
            one.sendall(part)
        for one, part in zip(silent[1:], (b"POST /v1/comp", b'"'), strict=True):
            assert one.recv(10_000).startswith(b"HTTP/1.1 ")
            one.sendall(part)
        got = slow.makefile("rb").read()
        assert got.startswith(b"HTTP/1.1 408")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"
        for one in silent:
            with contextlib.suppress(ConnectionResetError):
                while one.recv(10_000):
                    pass


HEAD = f"POST {COMPLETION} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def counted(server):
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return {
        sample.labels["status"]: sample.value
        for sample in samples
        if sample.name == "jetspec:http_requests_total" and sample.labels["path"] == COMPLETION
    }


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (raw_request({"prompt": "a"})[:-3], b""),
        (HEAD + b"Content-Length: 100\r\n\r\n", b""),
        (CHUNKED + b'4\r\n{"pr', b""),
        (CHUNKED + b"no number\r\n", b"HTTP/1.1 400 "),
        (CHUNKED + b'1\r\n{\r\n-1\r\n"\r\n', b"HTTP/1.1 400 "),
        (CHUNKED + b"1\r\n{no end", b"HTTP/1.1 400 "),
    ],
)
def test_who_leaves_amid_a_body_or_breaks_it_is_no_error_of_the_server(target, caplog, sent, answer):
    with served(Scripted(target)) as own, caplog.at_level(logging.WARNING):
        with connect(own) as client:
            client.sendall(sent)
            until(lambda: not answer or client.recv(20, socket.MSG_PEEK))
            client.shutdown(socket.SHUT_WR)
            assert client.makefile("rb").read().startswith(answer)
        until(lambda: counted(own))
        assert counted(own) == {"499": 1}
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_broken_body_behind_an_answer_closes_the_connection_alone(target, caplog):
    with served(Scripted(target)) as own, connect(own) as client, caplog.at_level(logging.WARNING):
        client.sendall(CHUNKED.replace(COMPLETION.encode(), b"/no"))
        assert client.recv(20).startswith(b"HTTP/1.1 404 ")
        client.sendall(b"no number\r\n")
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert b" 400 " not in client.makefile("rb").read()
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("path", [COMPLETION, "/no"])
def test_two_lengths_of_a_body_end_the_connection(target, path):
    """A proxy may have read the other one, and take what follows for another request."""
    body = b'{"prompt": "a"}'
    sent = HEAD.replace(COMPLETION.encode(), path.encode()) + b"Content-Length: 5\r\n"
    sent += b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with served(Scripted(target, "abc")) as own, connect(own) as client:
        client.sendall(sent + b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        got = client.makefile("rb").read()
    assert got.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in got.lower()


def test_who_reads_nothing_is_dropped(target):
    llm = Scripted(target, "x" * 40_000_000, size=1_000_000)
    with served(llm, send_timeout=0.5) as own:
        with connect(own) as deaf:
            deaf.sendall(raw_request({"prompt": "a", "stream": True}))
            until(lambda: llm.asked)
            until(lambda: llm.open == 0)
        assert httpx.get(f"{own.url}/health").is_success


def test_an_error_before_and_amid_a_text(target):
    llm = Scripted(target, error=RuntimeError("secret prompt"))
    with served(llm) as own, client_of(own) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="demo", prompt="a", stream=stream)
            assert caught.value.status_code == 500
            assert "secret" not in caught.value.message
        llm.text = "abcdef"
        with client.completions.create(model="demo", prompt="a", stream=True) as stream:
            assert next(stream).choices[0].text == "abc"
            with pytest.raises(openai.APIError, match="RuntimeError"):
                list(stream)


@pytest.mark.parametrize("chunks", ["feed", "end"])
def test_an_error_in_the_writing_of_a_stream_is_told(target, monkeypatch, chunks):
    def broken(*_):
        raise KeyError("secret")

    monkeypatch.setattr(CompletionWriter, chunks, broken)
    with served(Scripted(target, "abcdef")) as own, own.client() as http:
        text = http.post("/v1/completions", json={"prompt": "a", "stream": True}).text
    *_, error, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert json.loads(error)["error"]["code"] == "engine_error"
    assert "KeyError" in error
    assert "secret" not in error
    assert done == "[DONE]"


def test_an_error_s_type_says_whose_fault_it_is(target, monkeypatch):
    engine_s = EngineFailed("max_tokens")
    engine_s.__cause__ = ValueError("max_tokens")
    for error, errored, status, param, word in (
        (ValueError("max_tokens is wrong"), True, 400, "max_tokens", "is wrong"),
        (engine_s, False, 500, None, "ValueError"),
    ):
        llm = Scripted(target, error=error)
        monkeypatch.setattr(Scripted, "errored", errored)
        with served(llm) as own, own.client() as http:
            refused(http.post(COMPLETION, json={"prompt": "a"}), status, param, word)


def test_an_error_of_the_engine_ends_streams_that_run_and_requests_that_wait(server, llm, monkeypatch):
    def broken(*_):
        raise RuntimeError("the device is gone")

    streamed, waited = [[] for _ in range(4)], []
    # Token ids come at once; text may be held back, as a token may be a part of a character.
    body = {**LONG, "stream": True, "return_token_ids": True}
    with server.client() as http, monkeypatch.context() as patch, halted(begun(4)) as halt:

        def stream(own):
            with http.stream("POST", COMPLETION, json=body) as got:
                own.extend(line for line in got.iter_lines() if line.startswith("data: {"))

        def wait():
            waited.append(http.post(COMPLETION, json=LONG))

        threads = [threading.Thread(target=stream, args=(own,)) for own in streamed]
        threads += [threading.Thread(target=wait) for _ in range(3)]
        with paused(llm.llm.engines):  # nobody is served before all have come
            for count, some in ((4, threads[:4]), (7, threads[4:])):
                for thread in some:
                    thread.start()
                until(lambda count=count: llm.stats().waiting == count)
        until(lambda: all(streamed))
        patch.setattr(TreeDecoder, "decode", broken)
        halt.set()
        join(*threads)
        assert len(waited) == 3
        refused(http.get("/health"), 503, None, "engine")
    for lines in streamed:
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    for one in waited:
        refused(one, 500, None, "RuntimeError")
    with server.client() as http:
        assert http.post(COMPLETION, json={"prompt": "a"}).is_success
    assert (llm.stats().running, llm.stats().waiting, llm.stats().pages_used) == (0, 0, 0)


def test_a_server_that_ends_lets_streams_end_and_takes_no_more(target):
    gate = threading.Semaphore(0)
    llm = Scripted(target, "abcdefgh", size=1, gate=gate)
    texts = []
    with served(llm) as own, own.client() as http:

        def ask():
            with http.stream("POST", COMPLETION, json={"prompt": "a", "stream": True}) as got:
                texts.append([line for line in got.iter_lines() if line])

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: llm.open == 8)
        own.stop(15)
        until(lambda: http.get("/health").status_code == 503)
        got = http.post(COMPLETION, json={"prompt": "a"})
        assert refused(got, 503, None, "accepts no more")["code"] == "draining"
        gate.release(8 * len("abcdefgh"))
        join(*threads)
        own.join()
        own.stop = lambda _: None
    assert [lines[-1] for lines in texts] == ["data: [DONE]"] * 8
    said = ["".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) for lines in texts]
    assert said == ["abcdefgh"] * 8


def test_a_server_whose_time_is_over_ends_its_requests(target):
    gate = threading.Semaphore(1)
    llm = Scripted(target, "abcdef", size=1, gate=gate, error=RuntimeError("this AsyncLLM was closed"))

    async def close():
        gate.release(len("bcdef"))
        while llm.open:
            await asyncio.sleep(0)

    llm.close = close
    with served(llm, drain_seconds=0) as own, own.client() as http:
        with http.stream("POST", COMPLETION, json={"prompt": "a", "stream": True}) as got:
            lines = got.iter_lines()
            next(lines)
            own.stop(15)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        own.join()
        own.stop = lambda _: None
    assert events[-1]["error"]["code"] == "draining"


@pytest.mark.parametrize("what", ["none", "usual", "all"])
def test_programs_are_compiled_before_it_listens_and_beside(target, what):
    llm = Scripted(target, "yes")
    with served(llm, warm_up=what) as own, own.client() as http:
        assert http.get("/health").is_success
        warmed = {"none": [], "usual": [(None, True), (None, False)]}
        warmed["all"] = [*warmed["usual"], (MORE, False)]
        until(lambda: len(llm.warmed) == len(warmed[what]), lambda: llm.warmed)
    assert llm.warmed == warmed[what]


def test_the_log_says_how_much_is_left_before_it_listens(target, monkeypatch):
    class Slow(Scripted):
        async def warm_up(self, sampling_params=None, *, background=False):
            async with asyncio.timeout(PATIENCE):
                while not any('"compiling"' in line for line in lines):
                    await asyncio.sleep(0.01)

    monkeypatch.setattr("jetspec_jax.serve.app.LINE_SECONDS", 0.01)
    with logged() as lines, served(Slow(target), warm_up="usual"):
        line = json.loads(lines[0])
    assert (line["message"], line["programs_left"]) == ("compiling", 0)


def test_pages_of_other_origins(target):
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with (
        served(Scripted(target), allowed_origins=["https://a.example"], api_key=["k"]) as own,
        own.client() as http,
    ):
        got = http.options(COMPLETION, headers=asks)
        assert got.headers["Access-Control-Allow-Origin"] == "https://a.example"
        got = http.post(COMPLETION, json={}, headers={"Origin": "https://a.example"})
        refused(got, 401, None)
        assert got.headers["Access-Control-Allow-Origin"] == "https://a.example"
    with served(Scripted(target)) as own, own.client() as http:
        assert "Access-Control-Allow-Origin" not in http.get("/version", headers=asks).headers


@contextlib.contextmanager
def logged(*loggers):
    """The lines that the server's logger, and others, write meanwhile."""
    lines = []

    class Keeper(logging.Handler):
        def emit(self, record):
            lines.append(self.format(record))

    keeper = Keeper()
    keeper.setFormatter(JsonLines())
    for logger in (LOG, *loggers):
        logger.addHandler(keeper)
    LOG.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for logger in (LOG, *loggers):
            logger.removeHandler(keeper)


def test_lines_of_the_log_hold_no_texts(target):
    with logged() as lines, served(Scripted(target, "an answer")) as own, own.client() as http:
        http.post(COMPLETION, json={"prompt": "my secret"}, headers={"X-Request-Id": "me"})
        http.post(COMPLETION, json={"prompt": "my secret", "my secret": 1})
    assert "secret" not in "".join(lines)
    assert "an answer" not in "".join(lines)
    [line] = [json.loads(line) for line in lines if '"me"' in line]
    assert line["level"] == "info"
    assert {"method": "POST", "path": COMPLETION, "status": 200}.items() <= line.items()
    assert (line["prompt_tokens"], line["completion_tokens"]) == (4, 3)


def test_a_line_of_the_log_is_printable():
    """Paths come from anybody, and may hold what controls a terminal or turns the direction of text."""
    odd = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x61C, *range(0x2028, 0x202F), 0x2066, 0x2069)))
    record = logging.makeLogRecord({"msg": odd, "fields": {"path": odd, "é": ["\ud800"]}})
    line = JsonLines().format(record)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["path"] == json.loads(line)["message"] == odd


@pytest.mark.parametrize("trusted", [None, "*", "127.0.0.1"])
def test_neither_a_header_nor_the_environment_changes_a_clients_address(target, monkeypatch, trusted):
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    monkeypatch.setenv("WEB_CONCURRENCY", "not a number")
    headers = {"X-Request-Id": "me", "X-Forwarded-For": "10.1.2.3", "X-Forwarded-Proto": "https"}
    with logged() as lines, served(Scripted(target)) as own, own.client() as http:
        assert http.post(COMPLETION, json={}, headers={**headers, "Forwarded": "for=10.1.2.3"}).status_code
    [line] = [json.loads(line) for line in lines if '"me"' in line]
    assert line["client"] == "127.0.0.1"


def test_the_environment_turns_no_reports_on(target, monkeypatch):
    """FastAPI from 0.165 on can send traces to a host that the environment names."""
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    app = make_app(Scripted(target))
    assert not getattr(app, "_telemetry", {}).get("auto_configure")


@pytest.mark.parametrize("level", [logging.INFO, 5])
def test_what_a_client_says_is_cut_in_the_log(target, level):
    """The method, the path, the query and the headers, also in uvicorn's messages at its level "trace"."""
    long, uvicorn = "x" * 10_000, logging.getLogger("uvicorn")
    uvicorn.setLevel(level)
    try:
        with logged(uvicorn) as lines, served(Scripted(target)) as own:
            for start in (f"{long.upper()} /a", f"GET /{long}", f"GET /a?{long}"):
                with connect(own) as client:
                    fields = f"X-Request-Id: {long}\r\nX-Forwarded-For: {long}\r\nOrigin: {long}"
                    client.sendall(f"{start} HTTP/1.1\r\nHost: {long}\r\n{fields}\r\n\r\n".encode())
                    assert client.recv(2**16)
    finally:
        uvicorn.setLevel(logging.NOTSET)
    requests = [json.loads(line) for line in lines if '"request"' in line]
    assert [line["method"] for line in requests] == ["X" * 199 + "…", "GET", "GET"]
    assert requests[1]["path"] == "/" + "x" * 198 + "…"
    assert any("Started scope" in line for line in lines) == (level == 5)
    assert max(map(len, lines)) < 1500


def test_metrics(llm):
    def values(http):
        families = text_string_to_metric_families(http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        assert all(sample.labels["model_name"] == "demo" for sample in samples)
        found = {}
        for sample in samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[sample.name, *sorted(labels.values())] = sample.value
        return found

    with served(llm, per_request_spec_decode_metrics="summary") as own, own.client() as http:
        before = values(http)
        got = http.post(
            COMPLETION, json={"prompt": "a b c", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        )
        http.post(COMPLETION, json={"prompt": ""})
        grown = {name: value - before.get(name, 0) for name, value in values(http).items()}
    usage, drafting = got.json()["usage"], got.json()["metrics"]["speculative_decoding"]
    assert grown["jetspec:prompt_tokens_total",] == usage["prompt_tokens"]
    assert grown["jetspec:generation_tokens_total",] == 20
    assert grown["jetspec:request_success_total", "length"] == 1
    assert grown["jetspec:prefix_cache_queries_total",] == usage["prompt_tokens"]
    steps, accepted = drafting["num_spec_steps"], drafting["num_accepted_draft_tokens"]
    assert grown["jetspec:spec_decode_num_drafts_total",] >= steps > 0
    # Nodes, of which the longest path has fewer.
    assert grown["jetspec:spec_decode_num_draft_tokens_total",] >= 7 * steps > drafting["num_draft_tokens"]
    assert grown["jetspec:spec_decode_num_accepted_tokens_total",] >= accepted
    assert grown["jetspec:http_requests_total", "/v1/completions", "200"] == 1
    assert grown["jetspec:http_requests_total", "/v1/completions", "400"] == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert grown[f"jetspec:{name}_seconds_count",] == 1
    assert 0 < grown["jetspec:inter_token_latency_seconds_count",] < 20
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert grown[f"jetspec:{name}",] == 0
    for name in ("bucket", "live_slots", "compilations_total", "num_preemptions_total"):
        assert (f"jetspec:{name}",) in grown


def test_tokens(http, alone):
    ids = alone.encode("def f(x):")
    got = http.post("/tokenize", json={"prompt": "def f(x):", "return_token_strs": True}).json()
    assert (got["tokens"], got["count"], got["max_model_len"]) == (ids, len(ids), 1024)
    assert len(got["token_strs"]) == len(ids)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "def f(x):"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert (
        "<|im_start|>assistant" in http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    )
    refused(http.post("/detokenize", json={"tokens": [4096]}), 400, "tokens", "0..4095")
    refused(http.post("/detokenize", json={"tokens": [True]}), 400, "tokens[0]", "integer")
    refused(http.post("/tokenize", json={}), 400, "prompt", "either prompt or messages")
