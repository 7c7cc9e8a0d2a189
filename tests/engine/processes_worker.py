"""One of several processes that decode together: ``python -m tests.engine.processes_worker SETTINGS``.

Keys of the settings, in JSON: "process" as ``[index, count, port]``, "cases" as names of functions below, in
the order in which they run, and "out", a folder for their results: ``CASE-INDEX.json``.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np

import tests.processes  # noqa: F401  (programs are compiled as in the tests)
from jetspec_jax import (
    LLM,
    AsyncLLM,
    Head,
    SamplingParams,
    StructuredOutputsParams,
    Target,
    generate_tree,
    join_processes,
    load_target,
    logits,
)
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.device import memory
from jetspec_jax.device.mesh import make_mesh
from jetspec_jax.device.processes import is_first
from jetspec_jax.engine import runner
from jetspec_jax.engine.runner import Runner
from jetspec_jax.engine.scheduler import Scheduler
from jetspec_jax.inspect.forward import next_token_logits
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.tiny import TINY, random_head, random_target, with_windows, word_tokenizer

PROMPT = [3, 1, 4]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, seed=1000)
SCORED = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=1)
TREES = {"budget": 16, "width": 3}


def pair(mesh=None, config=TINY):
    target, head = random_target(config, 0, tokenizer=word_tokenizer(64)), random_head(config, 0)
    return placed(target, head, mesh)


def placed(target, head, mesh):
    """The pair on a mesh, if there is one."""
    if mesh is None:
        return target, head
    weights = place(target.weights, target.config, mesh), place(head.weights, head.config, mesh)
    target = Target(target.config, weights[0], target.eos_token_ids, target.tokenizer, mesh)
    return target, Head(head.config, weights[1], mesh)


def led(llm, run):
    """Process 0 runs a function of the LLM; the others follow it, and find nothing."""
    with llm:
        if is_first():
            return run(llm)
        llm.follow()
        return {}


def tree_llm(mesh, config=TINY, **settings):
    return LLM(*pair(mesh, config), **{**TREES, **settings})


def decoded(llm, params, prompt=PROMPT):
    [completion] = llm.generate([prompt], params)
    return completion.token_ids, completion.tree_sizes


def stopping(text):
    """Stops a greedy text in its middle."""
    return dataclasses.replace(GREEDY, stop=text[10:12])


def together(mesh):
    """Tokens, budgets that clocks choose, stop strings, and streams that are closed or left open."""
    still = types.SimpleNamespace(perf_counter=lambda: 0.0)  # a clock whose use would be noticed
    with contextlib.nullcontext() if is_first() else mock.patch.object(runner, "time", still):
        found = led(tree_llm(mesh), _together)
        auto = led(tree_llm(mesh, algorithm="auto"), lambda llm: {"auto": decoded(llm, GREEDY)})
        return found | auto


def _together(llm):
    found = {"greedy": decoded(llm, GREEDY), "sampled": decoded(llm, SAMPLED)}
    text = llm.target.tokenizer.decode(found["greedy"][0])
    found["stop"] = decoded(llm, stopping(text))
    with llm.stream(PROMPT, GREEDY) as stream:
        next(stream)
    one, two = llm.stream(PROMPT, GREEDY), llm.stream([*PROMPT, 1], GREEDY)
    found["pieces"] = [next(one), *two, *one]
    found["scored"] = len(llm.generate([PROMPT], SCORED)[0].prompt_logprobs)
    return found | {"again": decoded(llm, SAMPLED)}


def killed(mesh):
    return _ending(mesh, lambda: os.kill(os.getpid(), signal.SIGKILL))


def failing(mesh):
    def fail():
        raise ZeroDivisionError("a mistake of process 1")

    return _ending(mesh, fail)


def _ending(mesh, end):
    """Process 1 ends in its own way while it follows; the other would go on for ever."""
    llm, launch, count = tree_llm(mesh), Runner.launch, itertools.count()

    def launched(runner, *arguments, **settings):
        if next(count) == 20:
            end()
        return launch(runner, *arguments, **settings)

    if not is_first():
        Runner.launch = launched
        llm.follow()
    while True:
        llm.generate([PROMPT], GREEDY)


def waiting(mesh):
    """Process 1 dies while no program runs, and the other waits for its devices."""
    llm = tree_llm(mesh)
    if not is_first():
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return decoded(llm, GREEDY)


def leaving(mesh):
    """Process 0 ends without closing anything."""
    llm = tree_llm(mesh)
    if not is_first():
        llm.follow()
        return "the end"
    next(llm.stream(PROMPT, GREEDY))
    return decoded(llm, GREEDY)


def first_killed(mesh):
    """Process 0 is killed while the other follows."""
    llm = tree_llm(mesh)
    if not is_first():
        llm.follow()
    llm.generate([PROMPT], GREEDY)
    os.kill(os.getpid(), signal.SIGKILL)


def unlike(mesh):
    """Configs and settings that differ, calls of a process that does not follow, and functions."""
    index, errors = jax.process_index(), {}
    target, head = pair(mesh)

    def attempt(name, call):
        try:
            call()
        except ValueError as error:
            errors[name] = str(error)

    theta = dataclasses.replace(TINY.layers[0].rope, theta=5e5 + index)
    layers = tuple(dataclasses.replace(layer, rope=theta) for layer in TINY.layers)
    attempt("config", lambda: tree_llm(mesh, dataclasses.replace(TINY, layers=layers)))
    attempt("settings", lambda: tree_llm(mesh, width=2 + index))
    attempt("function", lambda: generate_tree(target, head, [PROMPT], GREEDY, **TREES))
    attempt("trace", lambda: trace_rounds(target, head, PROMPT, GREEDY, TreeSettings(16, 3)))
    llm = tree_llm(mesh)
    attempt("follow" if is_first() else "call", llm.follow if is_first() else lambda: decoded(llm, GREEDY))
    return errors


def no_device(mesh):
    """A mesh of the devices of process 0."""
    return repr(load_target(DEMO_TARGET, mesh=make_mesh(2)))


def memory_verdict(mesh):
    """Process 1 has less room than it needs, process 0 has much."""
    models = pair(mesh)
    free = 10**12 if is_first() else 1000
    try:
        with mock.patch.object(memory, "free_bytes", return_value=free):
            LLM(*models, **TREES)
    except memory.DeviceMemoryError as error:
        return str(error)


def recovering(mesh):
    """Calls that fail in process 0, and after each one that works."""

    def run(llm):
        found = []
        for patched in (
            mock.patch.object(Scheduler, "update", side_effect=ZeroDivisionError("a mistake")),
            mock.patch.object(Runner, "collect", side_effect=OSError("a device")),
        ):
            try:
                with patched:
                    llm.generate([PROMPT], GREEDY)
            except Exception as error:
                found.append([f"{type(error).__name__}: {error}", decoded(llm, GREEDY)[0]])
        return found

    return led(tree_llm(mesh), run)


def looking(mesh):
    """Forwards, which all processes call alike."""
    target, _ = pair(mesh)
    whole = np.asarray(logits(target, [PROMPT]))
    return {"logits": whole.tolist(), "last": np.asarray(next_token_logits(target, PROMPT)).tolist()}


def asked(count=20):
    """Prompts of which some begin alike, how they go on, and which are cancelled."""
    rng = np.random.default_rng(5)
    begin = rng.integers(0, 64, 70).tolist()
    wants = [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"presence_penalty": 1.5, "repetition_penalty": 1.2},
        {"logit_bias": {5: 3.0}, "min_tokens": 4, "bad_words": ["ab"]},
        {"temperature": 0.7, "allowed_token_ids": list(range(40))},
    ]
    return [
        (
            begin * (number % 3 == 0) + rng.integers(0, 64, int(rng.integers(1, 20))).tolist(),
            SamplingParams(seed=number, max_tokens=int(rng.integers(5, 30)), **wants[number % len(wants)]),
            number % 6 == 5,
        )
        for number in range(count)
    ]


def served(mesh):
    """Process 0 serves what comes, the other follows."""
    target, head = pair(mesh, with_windows(TINY, None))
    llm = AsyncLLM(target, head, max_slots=4, algorithm="top_nodes", **TREES)
    if not is_first():
        try:
            asyncio.run(anext(llm.generate(PROMPT)))
        except ValueError as error:
            refused = str(error)
        llm.follow()
        return {"refused": refused}

    async def one(number, prompt, params, leaves):
        await asyncio.sleep(0.02 * number)
        tokens = []
        async with contextlib.aclosing(llm.generate(prompt, params)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                if leaves:
                    break
        return tokens

    async def run():
        await asyncio.sleep(1.5)  # the other waits longer than it does at a time
        got = await asyncio.gather(*[one(number, *own) for number, own in enumerate(asked())])
        figures = llm.stats()
        await llm.close()
        return got, figures.prefix_hits

    got, hits = asyncio.run(run())
    return {"got": got, "hits": hits}


def forms(mesh):
    """Why a request with a grammar is refused."""
    llm = LLM(*placed(random_target(TINY, 3), random_head(TINY, 4), mesh), max_slots=4, **TREES)

    def ask(llm):
        params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="a+"))
        try:
            llm.generate([[5, 9]], params)
        except ValueError as error:
            return {"error": str(error)}

    return led(llm, ask)


def main(settings):
    jax.config.update("jax_num_cpu_devices", 2)
    index, count, port = settings["process"]
    join_processes(f"127.0.0.1:{port}", count, index)
    mesh, out = make_mesh(2 * count), Path(settings["out"])
    for case in settings["cases"]:
        found = globals()[case](mesh)
        (out / f"{case}-{index}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
