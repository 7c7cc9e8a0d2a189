"""Makes sampling parameters, the tree algorithm and models from the options of commands that decode."""

import argparse
import math
import sys
from dataclasses import replace
from typing import Any

import jax

from jetspec_jax.arguments import decode_utf8
from jetspec_jax.cli.options import (
    ALGORITHM,
    GROUPS,
    HEAD_GUIDE,
    MODELS,
    SAMPLING,
    STRUCTURED,
    parallel_sizes,
    parse_option,
)
from jetspec_jax.config import read_json
from jetspec_jax.engine.size import MAX_SLOTS
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams, draw_seed
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.tree import DEFAULT_ALGORITHM, Algorithm, Profile, get_algorithm
from jetspec_jax.tree.published import ReasoningRouter, TaskRouter


def add_decoding_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds the prompt and the options for sampling, models and trees; see `Group.add`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue")
    for group in GROUPS:
        group.add(parser, **defaults)


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling parameters, always with a seed."""
    given = {"seed": draw_seed(), **SAMPLING.given(arguments)}
    return SamplingParams(**given, structured_outputs=_form(arguments))


def _form(arguments: argparse.Namespace) -> StructuredOutputsParams | None:
    """The structured output, read from a file if the option names one; None without such an option."""
    given = STRUCTURED.given(arguments)
    if schema := given.get("json"):
        given["json"] = read_json(schema)
    if grammar := given.get("grammar"):
        given["grammar"] = decode_utf8(grammar.read_bytes(), str(grammar))
    return StructuredOutputsParams(**given) if given else None


def load_llm(arguments: argparse.Namespace, completions: int = 1) -> LLM:
    """Loads the models; prints a notice if there is no draft head.

    Unless the options say otherwise there are at most so many slots as ``completions``: each has its memory.
    A process that shares the models with process 0 follows it, and ends here.
    """
    given: dict[str, Any] = {"max_slots": min(completions, MAX_SLOTS)} | model_arguments(arguments)
    if jax.process_count() > 1 and math.prod(parallel_sizes(arguments).values()) == 1:
        raise ValueError(
            f"{jax.process_count()} processes share the models: set the number of shards by "
            "--tensor-parallel-size or --expert-parallel-size"
        )
    llm = LLM(**given)
    if llm.engines.follows:
        llm.follow()
        raise SystemExit(0)
    if llm.draft_head is None:
        print(
            f"jetspec-jax: no --draft-head for this target: plain decoding; to make one: {HEAD_GUIDE}",
            file=sys.stderr,
        )
    return llm


def model_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given options of models and trees, as arguments of `LLM`."""
    given = MODELS.given(arguments)
    algorithm = _algorithm(arguments)
    return given if algorithm is None else given | {"algorithm": algorithm}


def _algorithm(arguments: argparse.Namespace) -> Algorithm | None:
    """The tree algorithm with its options, and with the hints if it reads any; None if nothing is given."""
    name, parts = arguments.algorithm, ALGORITHM.given(arguments)
    if name is None and not parts:
        return None
    options = dict(parse_option(text) for text in parts.get("options", ()))
    path = parts.get("profile")
    profile = None if path is None else Profile.parse(read_json(path), where=str(path))
    algorithm = get_algorithm(name or DEFAULT_ALGORITHM, options, profile)
    hints = {key: value for key in ("task", "mode") if (value := getattr(arguments, key, None)) is not None}
    if hints and isinstance(algorithm, TaskRouter | ReasoningRouter):
        return replace(algorithm, routing=hints)
    return algorithm
