"""The gate of a server with keys, before an app that answers every request; no server runs."""

import asyncio
from types import SimpleNamespace

from starlette.responses import PlainTextResponse

from jetspec_jax.serve.middleware import Gate
from jetspec_jax.serve.settings import ServeSettings

# One is the beginning of another.
KEYS = ("sk-one", "sk-one-more", "ключ")


def gate(app, **settings):
    settings = ServeSettings(api_key=KEYS, **settings)
    return Gate(app, SimpleNamespace(settings=settings, draining=False))


async def status(gate, key):
    """The status of a request with a key, as bytes."""
    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", b"Bearer " + key)]
    await gate({"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}, None, send)
    return sent[0]["status"]


def test_only_whole_keys_pass():
    passing = gate(PlainTextResponse("yes"))
    known = {key.encode() for key in KEYS}
    wrong = {key[start:stop] for key in known for start in range(len(key)) for stop in range(len(key) + 1)}
    wrong |= {key + more for key in known for more in (b"x", b"-more-more", b",sk-one")}
    wrong |= {key.swapcase() for key in known if key.isascii()}
    for key in known:
        assert asyncio.run(status(passing, key)) == 200, key
    for key in wrong - known:
        assert asyncio.run(status(passing, key)) == 401, key


def test_requests_at_the_same_time_are_counted_by_key():
    async def main():
        going = asyncio.Event()

        async def app(scope, receive, send):
            await going.wait()
            await PlainTextResponse("yes")(scope, receive, send)

        passing = gate(app, max_requests_per_key=2)
        first, other, *_ = (key.encode() for key in KEYS)
        *running, refused = [
            asyncio.create_task(status(passing, key)) for key in (first, first, other, other, first)
        ]
        await asyncio.sleep(0)  # each waits in the app or has an answer
        assert [task.done() for task in (*running, refused)] == [False] * 4 + [True]
        assert refused.result() == 429
        going.set()
        assert await asyncio.gather(*running) == [200] * 4
        assert await status(passing, first) == 200

    asyncio.run(main())
