"""``python -m train data``: documents for training a draft head, from prompts or conversations."""

import argparse
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.pairs import PAIR_NAMES
from jetspec_jax.cli.options import (
    MODELS,
    PARALLEL,
    add_ignore_option,
    add_target_option,
    json_object,
    parallel_mesh,
)
from jetspec_jax.cli.parser import accept_formerly
from train.data.keys import IGNORE_DATA_OPTION
from train.data.make_data import LAST, MAX_TOKENS, REFUSED, TURNS, Made, make_data
from train.data.manifest import MODES, REGENERATE
from train.data.mixing import DEDUPLICATIONS, NONE
from train.loop.stages import Deadline


def add_command(commands: Any) -> None:
    """Adds the command line."""
    parser = commands.add_parser("data", help="make documents for training a draft head", description=__doc__)
    parser.set_defaults(run=run)
    add_target_option(parser, f"folder or hub id, or a pair: {PAIR_NAMES}", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of documents, begun or new")
    parser.add_argument("--draft-head", help="for speed: folder, hub id or a pair's name (default: none)")
    add_ignore_option(parser)
    add_generation_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--shard-documents", type=int, default=256, help="written at a time (default: 256)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    MODELS.add(parser, PARALLEL[:-1])
    parser.add_argument(
        "--minutes", type=float, help="start no shard after so many minutes; run again to resume"
    )


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments shared by the commands that make documents from prompts."""
    parser.add_argument(
        "--prompts",
        required=True,
        action="append",
        help='JSONL with "messages", "text" or "prompt" in each line, a log of requests, ShareGPT, a folder '
        'of text files, or a data set: "owner/name:split"; repeatable',
    )
    parser.add_argument(
        "--weights",
        type=weights,
        metavar="W,W",
        help="shares of the sources, as in 2,1 (default: all of each)",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=REGENERATE,
        help="let the target write the answers, or take the texts as they are (default: regenerate)",
    )
    parser.add_argument(
        "--turns",
        choices=TURNS,
        default=LAST,
        help="which turns of a conversation the target answers (default: last)",
    )
    parser.add_argument(
        "--deduplicate",
        choices=DEDUPLICATIONS,
        default=NONE,
        help="learn equal answers to an equal history once, or one answer to each history (default: none)",
    )
    parser.add_argument(
        "--budget",
        type=int,
        help="nodes of the head's trees; 1 decodes without the head (default: 64, and 1 on a CPU, where that "
        "is faster)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    parser.add_argument("--top-p", type=float, help="keep the likeliest tokens up to this probability")
    parser.add_argument("--top-k", type=int, help="keep the k likeliest tokens")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="of a continuation (default: 1024)"
    )
    parser.add_argument(
        "--heldout",
        type=int,
        help="about how many documents for validation, equal prompts together (default: 1 in 8, at most 64)",
    )
    slots = parser.add_argument(
        "--max-num-seqs",
        dest="slots",
        type=int,
        default=32,
        metavar="N",
        help="documents generated at a time (default: 32)",
    )
    accept_formerly(parser, slots, "--slots")
    parser.add_argument("--limit", type=int, help="number of prompts to read, from the first (default: all)")
    parser.add_argument("--skip-too-long", action="store_true", help="drop texts that do not fit the context")
    parser.add_argument(
        "--template-arguments",
        type=json_object,
        metavar="JSON",
        help="object passed to the chat template",
    )
    parser.add_argument(
        IGNORE_DATA_OPTION,
        dest="ignore_data_keys",
        action="append",
        default=[],
        metavar="KEY",
        help="accept this unknown key of rows and messages, without effect; repeatable",
    )


def generation_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of `add_generation_arguments`, except the prompts, as keyword arguments of `make_data`."""
    names = (
        *("mode", "turns", "weights", "deduplicate", "budget", "temperature", "top_p", "top_k", "max_tokens"),
        *("heldout", "slots", "limit", "skip_too_long", "template_arguments", "ignore_data_keys"),
    )
    return {name: getattr(arguments, name) for name in names}


def run(arguments: argparse.Namespace) -> int:
    """Makes the folder and prints a summary of it; raises the errors of `make_data`."""
    made = make_data(
        arguments.target,
        arguments.prompts,
        arguments.out,
        draft_head=arguments.draft_head,
        ignore_config_keys=arguments.ignore_config_key,
        seed=arguments.seed,
        shard_documents=arguments.shard_documents,
        dtype=arguments.dtype,
        deadline=Deadline(arguments.minutes),
        mesh=parallel_mesh(arguments),
        **generation_settings(arguments),
    )
    print(summary(made))
    print("to train a draft head on them: python -m train head --help")
    return 0


def summary(made: Made) -> str:
    """A few lines about the contents of a folder."""
    lines = [
        f"{made.folder} is finished{' already' if made.was_finished else ''}: {made.documents:,} documents, "
        f"{made.documents - made.heldout:,} to train on and {made.heldout:,} held out",
        f"  {made.tokens:,} tokens, of which {made.learn_tokens / made.tokens:.0%} are to be learnt",
        f"  duplicates: {made.duplicates:,} documents repeat the prompt or text of an earlier one",
    ]
    if made.ended is not None:
        share = made.ended / made.documents
        lines.append(f"  {share:.0%} ended by an end-of-sequence token, {1 - share:.0%} by their length")
    if made.skipped:
        lines.append(f"  dropped because they are too long: {made.skipped:,}")
    if made.unusable:
        where = made.folder / REFUSED
        lines.append(
            f"  dropped because they are excluded or cannot be used: {made.unusable:,}, listed in {where}"
        )
    return "\n".join(lines)


def weights(text: str) -> list[float]:
    """The numbers of a list such as ``2,1``.

    Raises:
        argparse.ArgumentTypeError: The text is not a list of numbers.
    """
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers as in 2,1, not {text!r}") from None
