"""Minutes of streams from a server of the demo pair, a third of whose clients leave. See ``--help``.

Every text is compared with what plain decoding alone gives. Now and then no new streams begin: then the
server must be idle, its pages back, and its memory, threads and open files are looked at.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.demo import DEMO_PROMPTS, DEMO_TARGET
from tests.events import PATIENCE
from tests.fuzz.soak import MOST_GROWTH, PAUSE, SETTLING
from tests.serve.servers import Command

#: Clients that leave, of all.
LEAVING = 1 / 3
# Seconds that an idle server has to give all back.
_GIVES_BACK = 120
# Counters of the server that are reported.
_REPORTED = (
    *("generation_tokens", "num_preemptions", "compilations", "dispatches", "prefix_cache_hits"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
# What is sampled how; programs for these are compiled before the server listens.
_KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0, "stop": ["\n\n"]},
    {"temperature": 1.0, "min_p": 0.05, "stop": ["self"]},
)


class Case(NamedTuple):
    """A request, and what plain decoding alone makes of it."""

    body: dict[str, Any]
    text: str
    finish_reason: str


class State(NamedTuple):
    """A process by now: bytes that are resident, threads, and open files."""

    memory: int
    threads: int
    files: int


def make_cases(count: int, seed: int) -> list[Case]:
    """Requests of several kinds and lengths, decoded one after the other."""
    rng = random.Random(seed)
    prompts = [json.loads(line)["text"] for line in DEMO_PROMPTS.read_text(encoding="utf-8").splitlines()]
    # Before half of them, longer than a page of the cache.
    shared = "".join(prompts[:8])
    alone = LLM(DEMO_TARGET, dtype="float32", max_slots=1)
    cases = []
    for number in range(count):
        own = {**_KINDS[number % len(_KINDS)], "seed": number, "max_tokens": rng.choice([4, 16, 48, 96])}
        prompt = rng.choice(["", shared]) + rng.choice(prompts)
        [completion] = alone.generate([prompt], SamplingParams(**own), use_tqdm=False)
        cases.append(Case({"prompt": prompt, **own}, completion.text or "", completion.finish_reason))
    return cases


class Soak:
    """Clients of a server, each with one stream at a time."""

    def __init__(self, url: str, cases: Sequence[Case], seed: int):
        """Nothing runs yet."""
        self.url, self.cases, self.seed = url, cases, seed
        self.done: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []
        self.figures: dict[str, float] = {}

    async def wait_until_warm(self) -> None:
        """Until nothing compiles in the background any more, which takes memory and threads."""
        end = time.monotonic() + PATIENCE
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as client:
            while not (health := (await client.get("/health")).json())["warm"]:
                if time.monotonic() > end:
                    raise TimeoutError(f"the server still compiles: {health}")
                await asyncio.sleep(0.1)

    async def spell(self, seconds: float, streams: int) -> None:
        """So many clients for a while; once they have read what they asked for, the server must be idle."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=limits) as client:
            await asyncio.gather(*(self._use(client, end, number) for number in range(streams)))
            await self._idle(client)

    async def _use(self, client: httpx.AsyncClient, end: float, number: int) -> None:
        rng = random.Random(f"{self.seed} {number} {end}")
        while time.monotonic() < end and not self.errors:
            try:
                self.done[await self._stream(client, rng)] += 1
            except Exception as error:
                self.errors.append(repr(error))

    async def _stream(self, client: httpx.AsyncClient, rng: random.Random) -> str:
        """One stream, read to its end, or left after some pieces or some time, maybe while it waits."""
        case, text, reason = rng.choice(self.cases), "", None
        seconds = pieces = None
        if rng.random() < LEAVING:
            seconds, pieces = rng.choice([(rng.uniform(0, 2), None), (None, rng.randint(1, 4))])
        count, whole = 0, False
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds),
                contextlib.aclosing(self._chunks(client, case.body)) as chunks,
            ):
                async for choice in chunks:
                    text, reason, count = text + choice["text"], choice["finish_reason"], count + 1
                    if count == pieces:
                        break
                else:
                    whole = True
        if reason is not None:
            if (text, reason) != (case.text, case.finish_reason):
                raise AssertionError(
                    f"{case.body}: {text!r}, {reason}, not {case.text!r}, {case.finish_reason}"
                )
            return "finished"
        if whole:
            raise AssertionError(f"{case.body}: ended after {text!r} without a reason")
        if not case.text.startswith(text):
            raise AssertionError(f"{case.body}: {text!r} is no beginning of {case.text!r}")
        return "left while it streamed" if count else "left before the first piece"

    async def _chunks(
        self, client: httpx.AsyncClient, body: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as got:
            if got.status_code != 200:
                raise AssertionError(f"{got.status_code}: {await got.aread()!r}")
            async for line in got.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise AssertionError(line)
                for choice in event["choices"]:
                    yield choice

    async def _idle(self, client: httpx.AsyncClient) -> None:
        end, left = time.monotonic() + _GIVES_BACK, {"": 1.0}
        while left and time.monotonic() < end:
            self.figures = await figures_of(client)
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            left = {name: value for name in names if (value := self.figures[f"jetspec:{name}"])}
            await asyncio.sleep(0.1)
        if left:
            self.errors.append(f"the server is not idle: {left}")


async def figures_of(client: httpx.AsyncClient) -> dict[str, float]:
    """Figures of the server by name, those with several labels added up."""
    figures: collections.defaultdict[str, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            figures[sample.name] += sample.value
    return figures


def state_of(process: int) -> State:
    """Looks at a process."""
    folder = Path(f"/proc/{process}")
    memory = int((folder / "statm").read_text().split()[1]) * 4096
    return State(memory, len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir())))


async def run(command: Command, soak: Soak, seconds: float, streams: int) -> list[tuple[float, State]]:
    """Spells with a pause after each; when each ended, and how the server was then."""
    await soak.wait_until_warm()
    started, states = time.monotonic(), []
    with tqdm(total=round(seconds), unit=" s", disable=None) as bar:
        while (gone := time.monotonic() - started) < seconds and not soak.errors:
            await soak.spell(min(PAUSE, seconds / 6, seconds - gone), streams)
            await asyncio.sleep(0.5)
            # The server hears of closed connections a little later.
            end = time.monotonic() + _GIVES_BACK
            while (state := state_of(command.process.pid)).files > (states or [(0, state)])[0][1].files:
                if time.monotonic() > end:
                    break
                await asyncio.sleep(0.1)
            states.append((time.monotonic() - started, state))
            bar.update(round(min(states[-1][0], seconds)) - bar.n)
    return states


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one JSON object; its exit code is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak_serve", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: 10)")
    parser.add_argument("--streams", type=int, default=64, help="at the same time (default: 64)")
    parser.add_argument("--slots", type=int, default=8, help="of the server (default: 8)")
    parser.add_argument("--algorithm", default="auto", help="of the server's trees (default: auto)")
    parser.add_argument("--cases", type=int, default=48, help="requests to choose among (default: 48)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    cases, seconds = make_cases(options.cases, options.seed), 60 * options.minutes
    words = ("--dtype", "float32", "--budget", "32", "--algorithm", options.algorithm)
    command = Command(*words, "--max-num-seqs", str(options.slots), output=subprocess.DEVNULL)
    try:
        soak = Soak(command.url, cases, options.seed)
        states = asyncio.run(run(command, soak, seconds, options.streams))
        command.process.send_signal(signal.SIGTERM)
        code = command.process.wait(PATIENCE)
    finally:
        command.process.kill()
        command.process.communicate()
    settled = [state for when, state in states if when <= max(SETTLING * seconds, states[0][0])]
    growth = max(state.memory for _, state in states) - max(state.memory for state in settled)
    if growth > MOST_GROWTH:
        soak.errors.append(f"memory grew by {growth} bytes")
    for name in ("threads", "files"):
        most = max(getattr(state, name) for state in settled)
        if any(getattr(state, name) > most for _, state in states):
            soak.errors.append(f"more {name} than the {most} of the first minutes")
    counted = {name: round(soak.figures[f"jetspec:{name}_total"]) for name in _REPORTED}
    if not counted["spec_decode_num_accepted_tokens"]:
        soak.errors.append("no drafted token was accepted: trees were not tried")
    if code:
        soak.errors.append(f"the server's exit code is {code}")
    report = {
        "seconds": round(states[-1][0]),
        "seed": options.seed,
        "streams": options.streams,
        "slots": options.slots,
        "algorithm": options.algorithm,
        "ended": dict(sorted(soak.done.items())),
        "server": counted,
        "errors": soak.errors,
        "growth_mib": round(growth / 2**20, 1),
        "memory_mib": [[round(when), round(state.memory / 2**20)] for when, state in states],
        "threads": [state.threads for _, state in states],
        "files": [state.files for _, state in states],
        "passed": not soak.errors,
    }
    print(json.dumps(report))
    sys.exit(not report["passed"])


if __name__ == "__main__":
    main()
