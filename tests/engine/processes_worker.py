"""One of several processes that decode together: ``python -m tests.engine.processes_worker SETTINGS``.

Keys of the settings, in JSON: "process" as ``[index, count, port]``, "cases" as names of functions below, in
the order in which they run, and "out", a folder for their results: ``CASE-INDEX.json``.
"""

import asyncio
import contextlib
import dataclasses
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
    EngineFailed,
    Head,
    SamplingParams,
    StructuredOutputsParams,
    Target,
    enable_compilation_cache,
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
from jetspec_jax.engine import admission, runner
from jetspec_jax.engine.scheduler import Scheduler
from jetspec_jax.inspect.forward import next_token_logits
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.tiny import TINY, random_head, random_target, with_windows, word_tokenizer
from tests.sampling.byte_tokenizer import byte_tokenizer

PROMPT = [3, 1, 4]
#: The seed that process 0 draws, and the others do not.
DRAWN = 1000
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0)
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


def decoded(target, head, params, **trees):
    [completion] = generate_tree(target, head, [PROMPT], params, **{**TREES, **trees})
    return completion.token_ids, completion.tree_sizes


def stopping(text):
    """Stops a greedy text in its middle."""
    return dataclasses.replace(GREEDY, stop=text[10:12])


def together(mesh):
    """All that should be the same in all processes."""
    still = types.SimpleNamespace(perf_counter=lambda: 0.0)  # a clock whose use would be noticed
    with (
        mock.patch.object(admission, "draw_seed", return_value=DRAWN + jax.process_index()),
        contextlib.nullcontext() if is_first() else mock.patch.object(runner, "time", still),
    ):
        return _together(*pair(mesh))


def _together(target, head):
    found = {
        "greedy": decoded(target, head, GREEDY),
        "drawn": decoded(target, head, SAMPLED),
        "auto": decoded(target, head, GREEDY, algorithm="auto"),
    }
    text = target.tokenizer.decode(found["greedy"][0])
    found["stop"] = decoded(target, head, stopping(text))
    pieces = []
    with LLM(target, head, **TREES).stream(PROMPT, GREEDY) as stream:
        for piece in stream:
            pieces.append(piece)
            if is_first():
                break
        else:
            found["completion"] = stream.completion
    found["pieces"] = pieces
    try:
        generate_tree(target, head, [PROMPT, [5] * (2 + jax.process_index())], GREEDY, **TREES)
    except ValueError as error:
        found["refused"] = str(error)
    found["again"] = decoded(target, head, SAMPLED)
    return found


def killed(mesh):
    return _ending(mesh, lambda: os.kill(os.getpid(), signal.SIGKILL))


def failing(mesh):
    def fail():
        raise ZeroDivisionError("a mistake of process 1")

    return _ending(mesh, fail)


def interrupted(mesh):
    return _ending(mesh, lambda: os.kill(os.getpid(), signal.SIGINT))


def _ending(mesh, end):
    """Process 1 ends in its own way while it decodes; the other would go on for ever."""
    llm = LLM(*pair(mesh), **TREES)
    for turn in range(10**6):
        llm.generate([PROMPT], GREEDY)
        if turn == 2 and not is_first():
            end()


def waiting(mesh):
    """Process 1 dies while no program runs, and the other waits for what it says."""
    if not is_first():
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return decoded(*pair(mesh), GREEDY)


def unlike(mesh):
    """Configs and settings that differ, and a request that one process refuses."""
    index, errors = jax.process_index(), {}
    target, head = pair(mesh)

    def attempt(name, call):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            errors[name] = str(error)

    theta = dataclasses.replace(TINY.layers[0].rope, theta=5e5 + index)
    layers = tuple(dataclasses.replace(layer, rope=theta) for layer in TINY.layers)
    other = pair(mesh, dataclasses.replace(TINY, layers=layers))
    attempt("config", lambda: decoded(*other, GREEDY))
    attempt("settings", lambda: decoded(target, head, GREEDY, width=2 + index))
    attempt("params", lambda: decoded(target, head, dataclasses.replace(GREEDY, seed=index)))
    attempt("one", lambda: generate_tree(target, head, [[3, 1] if is_first() else []], GREEDY, **TREES))
    return errors


def out_of_step(mesh):
    """The same request with engines of one size, in different ways."""
    models = pair(mesh)
    return decoded(*models, GREEDY, max_slots=1) if is_first() else traced(*models, GREEDY)


def traced(target, head, params):
    trace = trace_rounds(target, head, PROMPT, params, TreeSettings(16, 3))
    rounds = [one.committed.tolist() for one in trace]
    return rounds, trace.completion.token_ids


def no_device(mesh):
    """A mesh of the devices of process 0."""
    return repr(load_target(DEMO_TARGET, mesh=make_mesh(2)))


def memory_verdict(mesh):
    """Process 1 has less room than it needs, process 0 has much."""
    target, head = pair(mesh)
    free = 10**12 if is_first() else 1000
    try:
        with mock.patch.object(memory, "free_bytes", return_value=free):
            decoded(target, head, GREEDY)
    except memory.DeviceMemoryError as error:
        return str(error)


class FailingBar:
    """A progress bar of process 0 with a mistake."""

    def __init__(self, **_):
        self.close = lambda: None

    def update(self, count):
        raise ZeroDivisionError("a mistake in a bar")


def recovering(mesh):
    """Calls of all processes that fail in process 0, and after each one that works."""
    target, head = pair(mesh)
    llm, found = LLM(target, head, **TREES), []
    more = {**TREES, "max_slots": 4}
    failing = [
        (lambda: llm.generate([PROMPT], GREEDY, use_tqdm=FailingBar), contextlib.nullcontext()),
        (
            lambda: generate_tree(target, head, [PROMPT] * 4, GREEDY, **{**more, "width": 2}),
            mock.patch.object(memory, "free_bytes", return_value=1000),
        ),
        (
            lambda: llm.generate([PROMPT], GREEDY),
            mock.patch.object(Scheduler, "update", side_effect=ZeroDivisionError("a mistake")),
        ),
    ]
    for call, patched in failing:
        try:
            with patched:
                call()
        except Exception as error:
            found.append([f"{type(error).__name__}: {error}", llm.generate([PROMPT], GREEDY)[0].token_ids])
    return found


def turns(mesh):
    """Streams that are read in turns, beside other calls; one is dropped in process 0, one in both."""
    target, head = pair(mesh)
    llm, pieces = LLM(target, head, **TREES), []
    one, two, three = (llm.stream([*PROMPT, number], GREEDY) for number in range(3))
    for turn in range(3):
        pieces += [next(one), next(two)]
        if turn == 1:
            found = np.asarray(logits(target, [PROMPT]))[0, -1].argmax()
            pieces.append(next(three))
            _, seen = traced(target, head, GREEDY)  # beside the streams' engine, which it must leave alone
            other = generate_tree(target, head, [PROMPT], GREEDY, budget=8, width=2)[0].token_ids
    three.close()
    if is_first():
        one = None
    pieces += list(two)
    assert one is None or list(one) == []
    completion = two.completion.token_ids
    again = llm.generate([PROMPT], GREEDY)[0].token_ids
    return {
        "seen": seen,
        "pieces": pieces,
        "found": int(found),
        "other": other,
        "two": completion,
        "again": again,
    }


def looking(mesh):
    """Forwards and traces."""
    target, head = pair(mesh)
    whole = np.asarray(logits(target, [PROMPT]))
    last = np.asarray(next_token_logits(target, PROMPT))
    rounds, ids = traced(target, head, GREEDY)
    trace = trace_rounds(target, head, PROMPT, GREEDY, TreeSettings(16, 3))
    next(trace)
    if is_first():
        trace.close()
    left = len(list(trace))
    return {
        "logits": whole.tolist(),
        "last": last.tolist(),
        "rounds": rounds,
        "ids": ids,
        "left": left,
        "again": decoded(target, head, GREEDY)[0],
    }


def cache(mesh, out):
    """A folder that all see, and one of each process's own."""
    found = []
    for folder in (out / "shared", out / f"own-{jax.process_index()}"):
        jax.config.update("jax_compilation_cache_dir", None)
        enable_compilation_cache(folder, together=True)
        found.append(jax.config.jax_compilation_cache_dir)
    return found


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


def led(mesh):
    """Process 0 serves what comes, the other follows; before and after both make calls together."""
    target, head = pair(mesh, with_windows(TINY, None))
    before = decoded(target, head, GREEDY)
    llm = AsyncLLM(target, head, max_slots=4, algorithm="top_nodes", **TREES)
    if not is_first():
        try:
            asyncio.run(anext(llm.generate(PROMPT)))
        except ValueError as error:
            refused = str(error)
        llm.follow()
        return {"refused": refused, "before": before, "again": decoded(target, head, GREEDY)}

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
    again = decoded(target, head, GREEDY)
    return {"got": got, "hits": hits, "before": before, "again": again}


def of_forms(mesh=None):
    """A pair whose tokens are bytes, prompts, and how they go on: with grammars and without."""
    tokenizer = byte_tokenizer("")
    config = dataclasses.replace(with_windows(TINY, None), vocab_size=len(tokenizer) + 6)
    target = random_target(config, 3, eos=(len(tokenizer) - 1,), tokenizer=tokenizer)
    forms = [{"regex": "(ab|é){2,9}!"}, None, {"choice": ["yes", "no"]}, {"regex": "[a-z ]{60}"}, None]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=40,
            structured_outputs=None if form is None else StructuredOutputsParams(**form),
        )
        for number, form in enumerate(forms)
    ]
    prompts = [[5, 9, number] * (1 + 9 * number) for number in range(len(forms))]
    return placed(target, random_head(config, 4), mesh), prompts, params


def forms(mesh):
    """Calls of both processes, and then the first serves."""
    (target, head), prompts, params = of_forms(mesh)
    made = generate_tree(target, head, prompts, params, **TREES)
    together = [completion.token_ids for completion in made]
    llm = AsyncLLM(target, head, max_slots=4, algorithm="top_nodes", **TREES)
    if not is_first():
        llm.follow()
        return {"together": together}

    async def one(prompt, own):
        async for delta in llm.generate(prompt, own):
            last = delta
        return last.completion.token_ids

    async def run():
        got = await asyncio.gather(*[one(*own) for own in zip(prompts, params, strict=True)])
        await llm.close()
        return got

    return {"together": together, "got": asyncio.run(run())}


def led_astray(mesh):
    """Process 0 fails while it serves."""
    llm = AsyncLLM(*pair(mesh), max_slots=1, algorithm="top_nodes", **TREES)
    if not is_first():
        llm.follow()

    def fail(*_):
        raise ZeroDivisionError("a mistake of process 0")

    async def run():
        stream = llm.generate(PROMPT, GREEDY)
        await anext(stream)
        Scheduler.update = fail
        try:
            async for _ in stream:
                pass
        except EngineFailed:
            await asyncio.sleep(600)

    asyncio.run(run())


def main(settings):
    jax.config.update("jax_num_cpu_devices", 2)
    index, count, port = settings["process"]
    join_processes(f"127.0.0.1:{port}", count, index)
    mesh, out = make_mesh(2 * count), Path(settings["out"])
    for case in settings["cases"]:
        found = cache(mesh, out) if case == "cache" else globals()[case](mesh)
        (out / f"{case}-{index}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
