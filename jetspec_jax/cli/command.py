"""The command ``jetspec-jax``: generate text, see trees, and look at checkpoints."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from jetspec_jax.cli.options import (
    add_decoding_options,
    add_ignore_option,
    load_llm,
    read_prompt,
    routing_hints,
    sampling_params,
)
from jetspec_jax.cli.view import add_tree_command
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.engine.output import Completion
from jetspec_jax.generate import generate
from jetspec_jax.inspect.describe import describe
from jetspec_jax.inspect.exactness import first_divergence
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:
        return 141  # the reader left, as `head` does
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        # Code 1 is a failed check, so no other failure may have it.
        print(f"jetspec-jax: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jetspec-jax", description="Tree speculative decoding in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    gen = commands.add_parser("generate", help="complete a prompt", description=_generate.__doc__)
    gen.set_defaults(run=_generate)
    add_decoding_options(gen, max_tokens=256)
    gen.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    gen.add_argument("--check", action="store_true", help="compare with plain decoding, token by token")
    gen.add_argument("--stats", action="store_true", help="print figures of the run to standard error")

    add_tree_command(commands)

    info = commands.add_parser("info", help="describe a checkpoint", description=_info.__doc__)
    info.set_defaults(run=_info)
    info.add_argument("path", metavar="PATH", help="folder or hub id, or demo")
    info.add_argument("--target", help="for a draft head: the target that it should fit")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    add_ignore_option(info)
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    """Completes a prompt; the text appears as it is accepted."""
    prompt, params = read_prompt(arguments), sampling_params(arguments)
    llm = load_llm(arguments)
    ids, routing = llm.encode(prompt), routing_hints(arguments, prompt)
    if arguments.json or arguments.stats:
        # Begin once before the clock runs, so that the figures are those of decoding, not of compiling.
        with llm.stream(ids, params, routing=routing) as warm_up:
            next(warm_up, None)

    started = time.perf_counter()
    stream = llm.stream(ids, params, routing=routing)
    for piece in stream:
        if not arguments.json:
            print(piece, end="", flush=True)
    seconds = time.perf_counter() - started
    completion = stream.completion
    assert completion is not None, "the stream has ended"
    if arguments.json:
        print(json.dumps({**_report(completion, seconds), "seed": params.seed}))
    else:
        print()
    if arguments.stats:
        print(_stats(completion, seconds), file=sys.stderr)
    if arguments.check:
        return _check(llm, ids, params, completion, arguments.implementation)
    return 0


def _check(
    llm: LLM, ids: list[int], params: SamplingParams, completion: Completion, implementation: str | None
) -> int:
    """Decodes plainly with the same seed; exit code 1 and the first difference if there is one."""
    [plain] = generate(llm.target, [ids], params, implementation=implementation)
    difference = first_divergence(llm.target, ids, params, completion.token_ids, plain.token_ids)
    if difference is None:
        print(f"check: all {len(plain.token_ids)} tokens equal plain decoding's", file=sys.stderr)
        return 0

    def name(token: int | None) -> str:
        return "nothing" if token is None else f"{token} ({llm.target.tokenizer.decode([token])!r})"

    print(
        f"check failed: token {difference.position} is {name(difference.token)}, plain decoding's is "
        f"{name(difference.expected)}; the two likeliest are {difference.gap:.1e} apart there"
        f"{', a near-tie' if difference.is_tie else ''} (seed {params.seed})",
        file=sys.stderr,
    )
    if llm.target.dtype != "float32":
        print(
            f"in {llm.target.dtype} rounding flips near-ties; --dtype float32 is the exact check",
            file=sys.stderr,
        )
    return 1


def _report(completion: Completion, seconds: float) -> dict[str, object]:
    tau = completion.mean_acceptance_length
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "rounds": completion.rounds,
        "accept_lengths": completion.accept_lengths,
        "mean_acceptance_length": None if math.isnan(tau) else tau,  # JSON has no NaN
        "seconds": seconds,
        "tokens_per_second": len(completion.token_ids) / seconds,
    }


def _stats(completion: Completion, seconds: float) -> str:
    count = len(completion.token_ids)
    nodes = sum(completion.tree_sizes) / max(completion.rounds, 1)
    return (
        f"{count} tokens in {completion.rounds} rounds, {completion.mean_acceptance_length:.2f} tokens per "
        f"round from trees of {nodes:.0f} nodes; {seconds:.2f} s after warm-up "
        f"({count / seconds:.1f} tokens/s); finished by {completion.finish_reason}"
    )


def _info(arguments: argparse.Namespace) -> int:
    """Describes a target or a draft head: shapes, bytes, and whether a head fits a target."""
    ignored = arguments.ignore_config_key
    if arguments.path == "demo":
        target = arguments.target or DEMO_TARGET
        reports = [describe(DEMO_TARGET), describe(DEMO_DRAFT_HEAD, target, ignore_config_keys=ignored)]
    else:
        reports = [describe(arguments.path, arguments.target, ignore_config_keys=ignored)]
    if arguments.json:
        print(json.dumps(reports if len(reports) > 1 else reports[0]))
    else:
        print("\n\n".join(_table(report) for report in reports))
    return 0 if all(report.get("fits", True) for report in reports) else 1


def _table(report: dict[str, Any]) -> str:
    """Two columns, byte counts in a unit that people read."""
    shown = {}
    for key, value in report.items():
        if key == "fit_problem" or (key == "unused_tensors" and not value):
            continue
        if key == "fits":
            value = "yes" if value else f"no: {report['fit_problem']}"
        elif key == "parameters":
            value = f"{value:,}"
        elif key == "unused_tensors":
            value = ", ".join(f"{count:,} ({reason})" for reason, count in value.items())
        elif key in ("file_bytes", "weight_bytes_bf16"):
            value = f"{value:,} ({value / 2**20:,.1f} MiB)"
        shown[key.replace("_", " ")] = value
    width = max(map(len, shown))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in shown.items())
