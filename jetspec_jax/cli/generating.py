"""``jetspec-jax generate``: completes prompts, and compares completions with plain decoding."""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from jetspec_jax.cli.figures import figures, token_count
from jetspec_jax.cli.prompts import GivenPrompt, encode, read_prompts
from jetspec_jax.cli.screen import on_screen
from jetspec_jax.cli.settings import add_decoding_options, load_llm, sampling_params
from jetspec_jax.engine.detokenizer import detokenizer_of
from jetspec_jax.engine.output import Completion, Logprob
from jetspec_jax.engine.prompts import EncodedPrompt
from jetspec_jax.engine.size import DEFAULT_CAPACITY
from jetspec_jax.inspect.exactness import first_divergence
from jetspec_jax.llm import LLM
from jetspec_jax.progress import waiting
from jetspec_jax.sampling.params import SamplingParams


def add_generate_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``jetspec-jax``."""
    parser = commands.add_parser("generate", help="complete prompts", description=_generate.__doc__)
    parser.set_defaults(run=_generate)
    add_decoding_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object per completion instead of the text"
    )
    parser.add_argument("--check", action="store_true", help="compare with plain decoding, token by token")
    parser.add_argument("--stats", action="store_true", help="print statistics of the run to standard error")


class _Request(NamedTuple):
    """A requested completion, with its name in a heading and its seed."""

    name: str
    prompt: EncodedPrompt
    params: SamplingParams


class _Run(NamedTuple):
    """A run over all requests; the programs of a ``warm`` one were compiled before."""

    completions: list[Completion]
    seconds: float
    warm: bool

    @property
    def figures(self) -> str:
        """Tokens, rounds and speed, in one line."""
        return figures(self.completions, self.seconds, warm=self.warm)

    @property
    def speed(self) -> float:
        """Tokens per second over all completions."""
        return token_count(self.completions) / self.seconds


def _generate(arguments: argparse.Namespace) -> int:
    """Completes prompts; a single completion is streamed."""
    given, params = read_prompts(arguments), sampling_params(arguments)
    llm = load_llm(arguments, len(given) * params.n)
    prompts = [encode(llm, prompt, arguments) for prompt in given]
    requests = list(_each(given, prompts, params))
    alone = len(requests) == 1 and llm.target.tokenizer is not None
    streamed = alone and not arguments.json

    def run(*, timed: bool, shown: bool, budget: int | None = None) -> _Run:
        warm = timed and _warm_up(llm, prompts, params, budget, alone=alone)
        started = time.perf_counter()
        if streamed:
            completions = [_stream(llm, prompts[0], params, budget, shown=shown)]
        else:
            outputs = llm.generate(prompts, params, budget=budget)
            completions = [each for output in outputs for each in output.outputs]
        return _Run(completions, time.perf_counter() - started, warm)

    found = run(timed=arguments.json or arguments.stats, shown=True)
    if arguments.json:
        for request, completion in zip(requests, found.completions, strict=True):
            seed = {"seed": request.params.seed}
            print(json.dumps({"prompt": request.name, **_report(completion, found), **seed}))
    elif not streamed:
        print(on_screen("\n".join(_texts(requests, found.completions))))
    if arguments.stats:
        print(found.figures, file=sys.stderr)
    if not arguments.check:
        return 0
    plain = run(timed=arguments.stats, shown=False, budget=1)
    if arguments.stats:
        print(f"plain decoding: {plain.figures}", file=sys.stderr)
        if llm.settings.budget > 1:
            print(f"{found.speed / plain.speed:.2f} times as fast as plain decoding", file=sys.stderr)
    return max(map(_check, itertools.repeat(llm), requests, found.completions, plain.completions))


def _each(
    given: list[GivenPrompt], prompts: list[EncodedPrompt], params: SamplingParams
) -> Iterator[_Request]:
    """The requests of all prompts, in the order of their completions."""
    for named, prompt in zip(given, prompts, strict=True):
        for number, child in enumerate(params.each(), start=1):
            several = f", {number} of {params.n}" if params.n > 1 else ""
            yield _Request(f"{named.name}{several}", prompt, child)


def _warm_up(
    llm: LLM, prompts: list[EncodedPrompt], params: SamplingParams, budget: int | None, *, alone: bool
) -> bool:
    """Compiles before the run is timed; returns whether that covers all programs of the run."""
    if alone:
        # Starting the stream once compiles the programs of long prompts, too.
        with llm.stream(prompts[0], params, budget=budget) as stream:
            next(stream, None)
        return True
    llm.warm_up(len(prompts) * params.n, params)
    longest = max(len(prompt.ids) for prompt in prompts)
    return params.max_tokens is not None and longest + params.max_tokens <= DEFAULT_CAPACITY


def _stream(
    llm: LLM, prompt: EncodedPrompt, params: SamplingParams, budget: int | None, *, shown: bool
) -> Completion:
    """Decodes one prompt, and streams the text to the output if ``shown``."""
    stream = llm.stream(prompt, params, budget=budget)
    for piece in stream:
        if shown:
            print(on_screen(piece), end="", flush=True)
    if shown:
        print()
    assert stream.completion is not None, "the stream has ended"
    return stream.completion


def _texts(requests: list[_Request], completions: list[Completion]) -> Iterator[str]:
    """The printed texts of completions; token ids if the target has no tokenizer."""
    for request, completion in zip(requests, completions, strict=True):
        if len(requests) > 1:
            yield f"==> {request.name} <=="
        yield ",".join(map(str, completion.token_ids)) if completion.text is None else completion.text


def _check(llm: LLM, request: _Request, completion: Completion, plain: Completion) -> int:
    """Compares with plain decoding; for a difference prints the first one and returns exit code 1."""
    _, prompt, params = request
    ids = prompt.ids.tolist()
    with waiting("looking at the first difference"):
        difference = first_divergence(llm.target, ids, params, completion.token_ids, plain.token_ids)
    if difference is None:
        print(f"check: all {len(plain.token_ids)} tokens equal plain decoding's", file=sys.stderr)
        return 0
    detokenizer = detokenizer_of(llm.target.tokenizer)

    def described(token: int | None) -> str:
        if token is None:
            return "nothing"
        return f"{token} ({detokenizer.token_text(token)!r})" if detokenizer else str(token)

    print(
        f"check failed: token {difference.position} is {described(difference.token)}, plain decoding's is "
        f"{described(difference.expected)}; the two likeliest are {difference.gap:.1e} apart there"
        f"{', a near-tie' if difference.is_tie else ''} (seed {params.seed})",
        file=sys.stderr,
    )
    if (dtype := str(llm.target.dtype)) != "float32":
        print(f"in {dtype} rounding flips near-ties; --dtype float32 is the exact check", file=sys.stderr)
    return 1


def _report(completion: Completion, run: _Run) -> dict[str, object]:
    """A completion as JSON values, with the times of the whole run."""
    logprobs = {"logprobs": completion.logprobs, "prompt_logprobs": completion.prompt_logprobs}
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "rounds": completion.rounds,
        "accept_lengths": completion.accept_lengths,
        "mean_acceptance_length": completion.mean_acceptance_length,
        "seconds": run.seconds,
        "tokens_per_second": run.speed,
        **{name: [_values(row) for row in rows] for name, rows in logprobs.items() if rows is not None},
    }


def _values(row: dict[int, Logprob] | None) -> dict[int, dict[str, object]] | None:
    """The log-probabilities at one position, as JSON values."""
    return None if row is None else {token: asdict(logprob) for token, logprob in row.items()}
