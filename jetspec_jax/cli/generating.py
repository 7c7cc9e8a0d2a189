"""``jetspec-jax generate``: completes prompts, and compares what came out with plain decoding."""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from jetspec_jax.cli.prompts import GivenPrompt, encode, read_prompts, routing_hints
from jetspec_jax.cli.settings import add_decoding_options, load_llm, sampling_params
from jetspec_jax.engine.output import Completion
from jetspec_jax.generate import generate
from jetspec_jax.inspect.exactness import first_divergence
from jetspec_jax.llm import LLM
from jetspec_jax.progress import waiting
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import Hints


def add_generate_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``jetspec-jax``."""
    parser = commands.add_parser("generate", help="complete prompts", description=_generate.__doc__)
    parser.set_defaults(run=_generate)
    add_decoding_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each completion instead of the text"
    )
    parser.add_argument("--check", action="store_true", help="compare with plain decoding, token by token")
    parser.add_argument("--stats", action="store_true", help="print figures of the run to standard error")


class _Run(NamedTuple):
    """Requests and what came of them.

    Attributes:
        completions: Of each prompt.
        seconds: For all of them.
        warm: Whether everything was compiled before.
    """

    completions: list[Completion]
    seconds: float
    warm: bool


def _generate(arguments: argparse.Namespace) -> int:
    """Completes prompts; the text of a single one appears as it is accepted."""
    prompts, params = read_prompts(arguments), sampling_params(arguments)
    llm = load_llm(arguments)
    ids = [encode(llm, prompt, arguments) for prompt in prompts]
    hints = [routing_hints(arguments, prompt) for prompt in prompts]
    alone = len(ids) == 1 and params.n == 1 and llm.target.tokenizer is not None
    if warm := alone and (arguments.json or arguments.stats):
        # Begin once before the clock runs, so that the figures are those of decoding, not of compiling.
        with llm.stream(ids[0], params, routing=hints[0]) as warm_up:
            next(warm_up, None)
    started = time.perf_counter()
    if alone and not arguments.json:
        completions = [_stream(llm, ids[0], params, hints[0])]
    else:
        completions = llm.generate(ids, params, routing=hints)
    if params.n > 1:
        prompts = [prompt.numbered(index) for prompt in prompts for index in range(params.n)]
    run = _Run(completions, time.perf_counter() - started, warm)
    if arguments.json:
        for prompt, completion, own in zip(prompts, completions, [*params.each()] * len(ids), strict=True):
            print(json.dumps({"prompt": prompt.name, **_report(completion, run), "seed": own.seed}))
    elif not alone:
        print("\n".join(_texts(prompts, completions)))
    if arguments.stats:
        print(_stats(run), file=sys.stderr)
    if not arguments.check:
        return 0
    asked = itertools.product(ids, params.each())
    checks = [
        _check(llm, prompt, own, completion, arguments.implementation)
        for (prompt, own), completion in zip(asked, completions, strict=True)
    ]
    return max(checks)


def _stream(llm: LLM, ids: list[int], params: SamplingParams, hints: Hints) -> Completion:
    """Prints the text as it comes."""
    stream = llm.stream(ids, params, routing=hints)
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    assert stream.completion is not None, "the stream has ended"
    return stream.completion


def _texts(prompts: list[GivenPrompt], completions: list[Completion]) -> Iterator[str]:
    """What is printed of several completions; token ids where the target has no tokenizer."""
    for prompt, completion in zip(prompts, completions, strict=True):
        if len(prompts) > 1:
            yield f"==> {prompt.name} <=="
        yield ",".join(map(str, completion.token_ids)) if completion.text is None else completion.text


def _check(
    llm: LLM, ids: list[int], params: SamplingParams, completion: Completion, implementation: str | None
) -> int:
    """Decodes plainly with the same seed; exit code 1 and the first difference if there is one."""
    [plain] = generate(llm.target, [ids], params, implementation=implementation)
    with waiting("looking at the first difference"):
        difference = first_divergence(llm.target, ids, params, completion.token_ids, plain.token_ids)
    if difference is None:
        print(f"check: all {len(plain.token_ids)} tokens equal plain decoding's", file=sys.stderr)
        return 0
    tokenizer = llm.target.tokenizer

    def name(token: int | None) -> str:
        if token is None:
            return "nothing"
        return f"{token} ({tokenizer.decode([token])!r})" if tokenizer else str(token)

    print(
        f"check failed: token {difference.position} is {name(difference.token)}, plain decoding's is "
        f"{name(difference.expected)}; the two likeliest are {difference.gap:.1e} apart there"
        f"{', a near-tie' if difference.is_tie else ''} (seed {params.seed})",
        file=sys.stderr,
    )
    if str(llm.target.dtype) != "float32":
        print("in bfloat16 rounding flips near-ties; --dtype float32 is the exact check", file=sys.stderr)
    return 1


def _report(completion: Completion, run: _Run) -> dict[str, object]:
    """A completion as JSON values; the times are those of the whole run."""
    tau = completion.mean_acceptance_length
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "rounds": completion.rounds,
        "accept_lengths": completion.accept_lengths,
        "mean_acceptance_length": None if math.isnan(tau) else tau,  # JSON has no NaN
        "seconds": run.seconds,
        "tokens_per_second": _count(run) / run.seconds,
    }


def _count(run: _Run) -> int:
    return sum(len(completion.token_ids) for completion in run.completions)


def _stats(run: _Run) -> str:
    count, rounds = _count(run), sum(completion.rounds for completion in run.completions)
    committed = sum(sum(completion.accept_lengths) for completion in run.completions)
    nodes = sum(sum(completion.tree_sizes) for completion in run.completions)
    several = f" for {len(run.completions)} prompts" if len(run.completions) > 1 else ""
    reasons = ", ".join(sorted({completion.finish_reason for completion in run.completions}))
    return (
        f"{count} tokens{several} in {rounds} rounds, {committed / max(rounds, 1):.2f} tokens per round from "
        f"trees of {nodes / max(rounds, 1):.0f} nodes; {run.seconds:.2f} s "
        f"{'after warm-up' if run.warm else 'with compiling'} ({count / run.seconds:.1f} tokens/s); finished "
        f"by {reasons}"
    )
