"""``python -m bench decode``: plain decoding, a chain, and trees, on one set of prompts."""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.prompts import load_prompts
from bench.report import machine, show, write_json
from jetspec_jax import (
    Completion,
    Head,
    SamplingParams,
    Target,
    enable_compilation_cache,
    generate,
    generate_tree,
    load_draft_head,
    load_target,
)
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.exactness import TIE_GAP, first_divergence
from pallas_kernels.dispatch import gpu_problem

Decode = Callable[[], list[Completion]]


def add_command(commands: Any) -> None:
    """Adds the command line of this benchmark."""
    parser = commands.add_parser("decode", help="plain decoding, a chain, and trees", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("--target", default=str(DEMO_TARGET), help="folder or hub id (default: the demo)")
    parser.add_argument("--draft-head", default=str(DEMO_DRAFT_HEAD), help="folder or hub id")
    parser.add_argument("--prompts", default="demo", help='"demo", or JSONL with a "text" in each line')
    parser.add_argument("--num-prompts", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="for each prompt (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="prompt i has seed i (default: 0)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64, 128], help="of the trees")
    parser.add_argument("--width", type=int, default=7, help="of the trees (default: 7)")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded at a time (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, interleaved (default: 3)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    # Named in every report, also where nobody chose one.
    best = "xla" if gpu_problem() else "pallas_triton"
    parser.add_argument("--implementation", default=best, help=f"of tree attention (default: here {best})")
    parser.add_argument("--compilation-cache", default="auto", help='folder, "auto" or "off" (default: auto)')
    parser.add_argument("--json", type=Path, default=Path("results/decode.json"), help="where to")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table and writes the JSON."""
    enable_compilation_cache(arguments.compilation_cache)
    target = load_target(arguments.target, dtype=arguments.dtype)
    head = load_draft_head(arguments.draft_head, dtype=arguments.dtype, target=target)
    if target.tokenizer is None:
        raise ValueError(f"{arguments.target} has no tokenizer, so it cannot read prompts")
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, not {arguments.repeats}")
    texts = load_prompts(arguments.prompts, arguments.num_prompts)
    prompts = [target.tokenizer.encode(text) for text in texts]
    params = [
        SamplingParams(temperature=arguments.temperature, seed=i, max_tokens=arguments.max_tokens)
        for i in range(len(prompts))
    ]
    methods = _methods(target, head, prompts, params, arguments)

    # Every method runs once before any is timed: compilation, and the outputs to compare.
    outputs, seconds = {}, {name: [] for name in methods}
    with tqdm(total=len(methods) * (1 + arguments.repeats), desc="decode", unit="run") as bar:
        for name, decode in methods.items():
            outputs[name] = decode()
            bar.update()
        for _ in range(arguments.repeats):
            # Interleaved, so that a slow moment of the machine falls on all methods alike.
            for name, decode in methods.items():
                started = time.perf_counter()
                decode()
                seconds[name].append(time.perf_counter() - started)
                bar.update()

    plain = outputs["plain"]
    divergences = {
        name: _divergences(target, prompts, params, completions, plain)
        for name, completions in tqdm(outputs.items(), desc="compare", unit="method")
    }
    base = statistics.median(seconds["plain"])
    rows = []
    for name, completions in outputs.items():
        median = statistics.median(seconds[name])
        rows.append({"method": name, **_measures(completions, plain), **_speed(completions, median, base)})
    report = {
        "benchmark": "decode",
        **machine(),
        "dtype": str(target.weights["embed_tokens"].dtype),
        "implementation": arguments.implementation,
        "arguments": _arguments(arguments),
        "rows": rows,
        # Every output that differs from plain decoding's: where, and how far apart the two likeliest were.
        "divergences": divergences,
        "seconds": seconds,
    }
    notes = _notes(rows, divergences)
    show(
        f"{len(prompts)} prompts x {arguments.max_tokens} tokens, T = {arguments.temperature:g}, batch "
        f"{arguments.batch}, {report['dtype']}, {report['device']}, JAX {report['jax']}",
        rows,
        notes,
    )
    write_json(arguments.json, {**report, "notes": notes})
    return 0


def _arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings, without paths of this machine."""
    given = {key: value for key, value in vars(arguments).items() if key not in ("run", "json")}
    return {**given, "target": Path(given["target"]).name, "draft_head": Path(given["draft_head"]).name}


def _methods(
    target: Target,
    head: Head,
    prompts: list[list[int]],
    params: list[SamplingParams],
    arguments: argparse.Namespace,
) -> dict[str, Decode]:
    def tree(budget: int, width: int) -> Decode:
        return lambda: generate_tree(
            target,
            head,
            prompts,
            params,
            budget=budget,
            width=width,
            max_slots=arguments.batch,
            implementation=arguments.implementation,
        )

    return {
        "plain": lambda: generate(
            target, prompts, params, max_slots=arguments.batch, implementation=arguments.implementation
        ),
        # All that the head drafts, one node a depth.
        "chain": tree(head.config.block_size, 1),
        **{f"tree {budget}": tree(budget, arguments.width) for budget in arguments.budgets},
    }


def _measures(completions: list[Completion], plain: list[Completion]) -> dict[str, Any]:
    rounds = sum(c.rounds for c in completions)
    tokens = sum(len(c.token_ids) for c in completions)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(completions, plain, strict=True))
    return {
        # tau: tokens committed per round, over all rounds, before any cut.
        "tau": sum(sum(c.accept_lengths) for c in completions) / max(rounds, 1),
        # The prompts' own forwards count too: each yields a token.
        "tokens/forward": tokens / (rounds + len(completions)),
        "nodes/round": sum(sum(c.tree_sizes) for c in completions) / max(rounds, 1),
        "exact match": equal / len(completions),
    }


def _speed(completions: list[Completion], seconds: float, base: float) -> dict[str, float]:
    tokens = sum(len(c.token_ids) for c in completions)
    return {"tokens/s": tokens / seconds, "speed-up": base / seconds}


def _divergences(
    target: Target,
    prompts: list[list[int]],
    params: list[SamplingParams],
    completions: list[Completion],
    plain: list[Completion],
) -> list[dict[str, Any]]:
    """The first difference of each output that is not plain decoding's."""
    found = []
    for i, (prompt, own, ours, theirs) in enumerate(zip(prompts, params, completions, plain, strict=True)):
        difference = first_divergence(target, prompt, own, ours.token_ids, theirs.token_ids)
        if difference is not None:
            found.append({"prompt": i, **asdict(difference)})
    return found


def _notes(rows: list[dict[str, Any]], divergences: dict[str, list[dict[str, Any]]]) -> list[str]:
    slower = [row["method"] for row in rows if row["speed-up"] < 1]
    notes = []
    if slower:
        notes.append(
            f"Slower than plain decoding here: {', '.join(slower)}. A tree trades arithmetic for forwards; "
            "where arithmetic is scarce, as on a CPU, or where few drafts are accepted, that can lose."
        )
    gaps = [found["gap"] for method in divergences.values() for found in method]
    if gaps:
        notes.append(
            f"{len(gaps)} outputs differ from plain decoding's; the two likeliest choices were at most "
            f"{max(gaps):.1e} apart where they part. In float32 anything above {TIE_GAP:.0e} is a mistake."
        )
    return notes
