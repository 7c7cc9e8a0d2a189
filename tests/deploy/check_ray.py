"""Two replicas of the demo pair on Ray Serve, on CPUs: run by hand, with the extra ``ray``.

Checks that both serve, that streams arrive in pieces, that a client that leaves stops its replica's work, and
that a replica that is killed costs its own requests alone and is replaced.
"""

import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import ray
from ray import serve

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from deploy.ray_serve import Replicas, app  # noqa: E402  (found from here on)

SLOTS, LONG, SHORT = 2, 500, 60


def main() -> None:
    """Starts Ray, looks, and stops it."""
    port = free_port()
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(Replicas(budget=4, max_slots=SLOTS, min_replicas=2, max_replicas=2)))
        look(port)
    finally:
        ray.shutdown()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def look(port: int) -> None:
    """Checks all that the module says."""
    expected = read(port, LONG)
    assert expected is not None
    with ThreadPoolExecutor(2 * SLOTS) as threads:
        before = seconds()
        answers = list(threads.map(lambda _: read(port, LONG), range(2 * SLOTS)))
        used = [now - before[pid] for pid, now in seconds().items()]
        assert len(used) == 2, used
        assert min(used) > 0.2, f"one replica was idle: {used}"
        assert answers == [expected] * (2 * SLOTS), [answer and answer[-40:] for answer in answers]
        print("both replicas serve, and say the same, in pieces")

        next(pieces(port, LONG)).close()
        time.sleep(1.0)
        before = seconds()
        time.sleep(2.0)
        used = [now - before[pid] for pid, now in seconds().items()]
        assert max(used) < 0.5, f"a replica works on for nobody: {used}"
        print("a client that leaves stops its replica's work")

        running = [threads.submit(read, port, LONG) for _ in range(2 * SLOTS)]
        time.sleep(1.0)
        victim, survivor = seconds()
        os.kill(victim, signal.SIGKILL)
        ended = [one.result() for one in running]
        assert sorted(answer is None for answer in ended) == [False] * SLOTS + [True] * SLOTS, ended
        assert all(answer in (None, expected) for answer in ended)
        assert read(port, SHORT) is not None
        print("a replica that is killed costs its own requests alone")
    end = time.monotonic() + 300
    while serve.status().applications["default"].status != "RUNNING" or len(seconds()) < 2:
        assert time.monotonic() < end, "the killed replica is not replaced"
        time.sleep(1.0)
    assert survivor in seconds()
    print("and is replaced")


def seconds() -> dict[int, float]:
    """Processor time of each replica, by its process."""
    found = {}
    for process in psutil.process_iter(["pid", "cmdline", "cpu_times"]):
        if "ray::ServeReplica:default:jetspec" in " ".join(process.info["cmdline"] or ()):
            times = process.info["cpu_times"]
            found[process.info["pid"]] = times.user + times.system
    return found


def read(port: int, tokens: int) -> str | None:
    """The text of an answer, which came in several pieces; None if it broke off."""
    texts, ended = [], False
    try:
        for response in pieces(port, tokens):
            line = response.piece
            ended = line == "[DONE]"
            if not ended:
                texts += [choice["text"] for choice in json.loads(line).get("choices", ())]
    except (OSError, http.client.HTTPException):
        return None
    assert len(texts) > tokens / 100 or not ended, f"{tokens} tokens came in {len(texts)} pieces"
    return "".join(texts) if ended else None


class Piece:
    """A piece of a stream, and the connection that it came by."""

    def __init__(self, piece: str, connection: http.client.HTTPConnection):
        self.piece, self.close = piece, connection.close


def pieces(port: int, tokens: int) -> Iterator[Piece]:
    """The pieces of an answer as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    asked = {
        "prompt": "def f(x):",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: "):
            yield Piece(line.removeprefix(b"data: ").decode().strip(), connection)


if __name__ == "__main__":
    main()
