"""The options that all commands share which decode a prompt, and what is made of them."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jetspec_jax.config import IGNORE_OPTION, read_json
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams, draw_seed
from jetspec_jax.tree import Algorithm, Hints, Profile, algorithm_names, get_algorithm
from pallas_kernels.tree_attention import implementations


def add_decoding_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds the prompt and the options for models, trees and sampling.

    Args:
        parser: Of the command.
        max_tokens: Default of ``--max-tokens``.
    """
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="read from standard input when absent")
    add("--target", default="demo", help="folder or hub id (default: the embedded demo)")
    add("--draft-head", help="folder or hub id (default: the demo's; else decode plainly)")
    add("--budget", type=int, default=128, help="most nodes of a tree, 1..256 (default: 128)")
    add("--width", type=int, default=7, help="most children of a node (default: 7)")
    add("--depth", type=int, help="largest depth of a tree (default: all the head drafts)")
    add(
        "--algorithm",
        default="accum_logp",
        help=f"how trees are built: {', '.join(algorithm_names())} (default: accum_logp)",
    )
    add(
        "--algorithm-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the algorithm, its value in JSON, as beta=2.0; may recur",
    )
    add("--profile", type=Path, help="JSON table of measured acceptance, for its algorithms")
    add("--task", help="what is asked for, for the routers: math, code, chat, reasoning, ...")
    add(
        "--max-tokens",
        type=int,
        default=max_tokens,
        help=f"most tokens to generate (default: {max_tokens})",
    )
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    add("--top-p", type=float, help="keep the likeliest tokens up to this probability")
    add("--top-k", type=int, help="keep the k likeliest tokens")
    add("--stop", action="append", default=[], help="string that ends the text; may recur")
    add("--seed", type=int, help="seed of the sampling noise (default: drawn)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    add("--implementation", help=f"of tree attention: {' or '.join(implementations())} (default: the best)")
    add(
        "--compilation-cache",
        default="auto",
        metavar="DIR|auto|off",
        help="where compiled programs are kept (default: auto, on a GPU the user's cache folder)",
    )
    add_ignore_option(parser)
    add_allow_option(parser)


def add_allow_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that every command has which reads weights for a person to look at."""
    parser.add_argument(
        "--allow-nonfinite", action="store_true", help="read weights that are NaN or infinite all the same"
    )


def add_ignore_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that every command has which reads the config of a checkpoint."""
    parser.add_argument(
        IGNORE_OPTION,
        action="append",
        default=[],
        metavar="KEY",
        help="unknown key of a config.json that has no effect; not for keys that are understood; may recur",
    )


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt, from standard input if none was given.

    Raises:
        UnicodeDecodeError: Standard input is no UTF-8.
    """
    # Bytes, decoded strictly: Python's own reading would smuggle invalid ones through.
    return sys.stdin.buffer.read().decode() if arguments.prompt is None else arguments.prompt


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """How the request is sampled, with a seed in any case."""
    return SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=draw_seed() if arguments.seed is None else arguments.seed,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
    )


def load_llm(arguments: argparse.Namespace) -> LLM:
    """Loads the models; says so if there is no draft head among them."""
    llm = LLM(
        arguments.target,
        arguments.draft_head,
        budget=arguments.budget,
        width=arguments.width,
        depth=arguments.depth,
        algorithm=_algorithm(arguments),
        dtype=arguments.dtype,
        implementation=arguments.implementation,
        ignore_config_keys=arguments.ignore_config_key,
        allow_nonfinite=arguments.allow_nonfinite,
        compilation_cache=arguments.compilation_cache,
    )
    if llm.draft_head is None:
        print("jetspec-jax: no --draft-head for this target: decoding plainly", file=sys.stderr)
    return llm


def routing_hints(arguments: argparse.Namespace, prompt: str) -> Hints:
    """What the tree algorithms are told of the prompt."""
    return {"text": prompt} if arguments.task is None else {"task": arguments.task}


def parse_option(text: str, form: str = "NAME=VALUE") -> tuple[str, Any]:
    """Name and value of an ``--algorithm-option``.

    Args:
        text: What was given.
        form: What errors say it must look like.

    Raises:
        ValueError: It has no name, or its value is no JSON.
    """
    name, _, value = text.partition("=")
    try:
        if not name:
            raise ValueError("no name")
        return name, json.loads(value)
    except ValueError as error:
        raise ValueError(f"--algorithm-option takes {form} with a JSON value, not {text!r}") from error


def _algorithm(arguments: argparse.Namespace) -> Algorithm:
    """The tree algorithm that the arguments name, with its options."""
    options = dict(parse_option(text) for text in arguments.algorithm_option)
    path = arguments.profile
    profile = None if path is None else Profile.parse(read_json(path), where=str(path))
    return get_algorithm(arguments.algorithm, options, profile)
