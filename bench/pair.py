"""A target, its draft head and prompts: what the benchmarks that decode prompts have in common."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.prompts import encode_prompts, load_prompts, template_arguments
from bench.report import check_writable
from jetspec_jax import Head, SamplingParams, Target, load_draft_head, load_target
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.engine import TreeSettings
from jetspec_jax.tree import Hints, algorithm_names
from pallas_kernels.dispatch import gpu_problem

# Arguments that are no part of a report.
_LOCAL = ("run", "compilation_cache", "json", "plot")
# Arguments that may be paths: of these the report has the last part alone.
_PATHS = ("target", "draft_head", "prompts")


class Pair(NamedTuple):
    """What decodes, and what it goes on with.

    Attributes:
        target: The target.
        head: Its draft head.
        prompts: Token ids of each prompt.
        tasks: What the prompt set says of each: "math", "code", "chat", or None.
    """

    target: Target
    head: Head
    prompts: list[list[int]]
    tasks: tuple[str | None, ...]

    @property
    def routing(self) -> list[Hints | None]:
        """The tasks, as tree algorithms that route are told of them."""
        return [None if task is None else {"task": task} for task in self.tasks]


def add_pair_arguments(parser: argparse.ArgumentParser, *, prompts: int, max_tokens: int) -> None:
    """Adds the arguments that name a pair, its prompts and how they are decoded, with usual numbers."""
    add = parser.add_argument
    add("--target", default=str(DEMO_TARGET), help="folder or hub id (default: the demo)")
    add("--draft-head", default=str(DEMO_DRAFT_HEAD), help="folder or hub id")
    add("--prompts", default="demo", help='"demo", or JSONL with "messages", "text" or "prompt" in each line')
    add("--num-prompts", type=int, default=prompts, help=f"how many (default: {prompts})")
    add("--max-tokens", type=int, default=max_tokens, help=f"for each prompt (default: {max_tokens})")
    add("--width", type=int, default=7, help="of the trees (default: 7)")
    # Named in every report, also where nobody chose one.
    best = "xla" if gpu_problem() else "pallas_triton"
    add("--implementation", default=best, help=f"of tree attention (default: here {best})")
    add("--compilation-cache", default="auto", help='folder, "auto" or "off" (default: auto)')


def add_round_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds how the rounds of a measurement are run: one tree, one temperature, one type."""
    names = ", ".join(algorithm_names())
    add = parser.add_argument
    add("--budget", type=int, default=64, help="of the trees (default: 64)")
    add("--algorithm", default="accum_logp", metavar="NAME", help=f"{names} (default: accum_logp)")
    add("--temperature", type=float, default=0.0, help="prompt i has seed i (default: 0)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16")


def requests_of(arguments: argparse.Namespace, temperature: float | None = None) -> list[SamplingParams]:
    """How each prompt is sampled: prompt i has seed i.

    Args:
        arguments: With those of `add_pair_arguments`.
        temperature: None is that of `add_round_arguments`.
    """
    own = arguments.temperature if temperature is None else temperature
    return [
        SamplingParams(temperature=own, seed=i, max_tokens=arguments.max_tokens)
        for i in range(arguments.num_prompts)
    ]


def add_report_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds where the report and its picture go."""
    parser.add_argument("--json", type=Path, default=Path(f"results/{name}.json"), help="where to")
    parser.add_argument("--plot", type=Path, help="where to (default: a PNG beside the JSON)")


def check_arguments(arguments: argparse.Namespace, *numbers: str) -> None:
    """Checks numbers and paths before anything is loaded, and says where the picture goes.

    Args:
        arguments: Of the command line; ``plot`` is filled in.
        numbers: Further arguments that must be at least 1.

    Raises:
        ValueError: A number is less than 1.
        OSError: A report cannot be written where it should go.
    """
    for name in ("num_prompts", "max_tokens", "width", *numbers):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    arguments.plot = arguments.plot or arguments.json.with_suffix(".png")
    check_writable(arguments.json, arguments.plot)


def load_pair(arguments: argparse.Namespace, dtype: str, settings: Sequence[TreeSettings] = ()) -> Pair:
    """Loads models and prompts.

    Args:
        arguments: With those of `add_pair_arguments`.
        dtype: Of the weights.
        settings: Trees that the pair must be able to grow.

    Raises:
        FileNotFoundError: A checkpoint or the prompts are not there.
        ValueError: They are not what they should be, the target has no tokenizer, or a tree is out of range.
    """
    prompts = load_prompts(arguments.prompts, arguments.num_prompts)
    target = load_target(arguments.target, dtype=dtype)
    head = load_draft_head(arguments.draft_head, dtype=dtype, target=target)
    if target.tokenizer is None:
        raise ValueError(f"{arguments.target} has no tokenizer, so it cannot read prompts")
    for own in settings:
        own.check(target.config, head.config.depth)
    # As published evaluations do, without thinking where a template asks.
    ids = encode_prompts(target, prompts, template_arguments(target, None))
    return Pair(target, head, ids, tuple(prompt.task for prompt in prompts))


def describe_pair(pair: Pair) -> dict[str, Any]:
    """Shapes of the models and type of the weights, for a report."""
    target, head = pair.target.config, pair.head.config
    return {
        "shapes": {
            "layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "head_layers": head.layers.num_layers,
            "block_size": head.block_size,
            "causal_head": head.causal,
        },
        "dtype": str(pair.target.weights["embed_tokens"].dtype),
        "prompt_tokens": [min(map(len, pair.prompts)), max(map(len, pair.prompts))],
    }


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments, without folders of this machine."""
    given = {key: value for key, value in vars(arguments).items() if key not in _LOCAL}
    return {key: Path(value).name if key in _PATHS else value for key, value in given.items()}
