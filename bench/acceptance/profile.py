"""``python -m bench profile``: how often the target chooses the head's candidates, by depth and rank.

The report is the profile of `depth_rank_histogram` and `class_histogram` (`jetspec_jax.tree.Profile`). A
share is the probability that the target's choice at a node of a depth is the head's candidate of a rank. By
default only the nodes reached by the target's tokens count, because children of other nodes are never
accepted; ``--nodes tree`` counts all nodes of the trees, like the reference implementation. A class's table
has the rounds that `TaskRouter` assigns to the class. Its caps are the last ranks with a share, so shares
below ``--least-share`` are written as 0 there. Below the last row of its table `depth_rank_histogram` uses
the full width, and `class_histogram` its last cap.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.acceptance.counts import TracedRound, count_reached, count_tree, table_of, trace_requests
from bench.common.methods import check_fixed_budgets, fixed_budget_names
from bench.common.pair import add_pair_arguments, check_numbers, describe_pair, load_pair, read_prompts
from bench.common.report import (
    add_report_arguments,
    check_report,
    measured_on,
    opening_of,
    show,
    write_report,
)
from bench.common.workload import make_workloads
from jetspec_jax import SamplingParams, enable_compilation_cache
from jetspec_jax.cli.options import MODELS
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.tree import BUCKETS, DEFAULT_ALGORITHM, Candidates, Profile, Routing, get_algorithm
from jetspec_jax.tree.profiles import VERSION
from jetspec_jax.tree.published import TaskRouter
from jetspec_jax.tree.routing import CLASSES

COUNTS = {"reached": count_reached, "tree": count_tree}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    # Prompts are decoded one at a time, so copies of the pair have no use.
    add_pair_arguments(parser, prompts=16, max_tokens=128, copies=False)
    add = parser.add_argument
    add("--budget", type=int, default=64, help="nodes of the trees, root included (default: 64)")
    names, usual = ", ".join(fixed_budget_names()), DEFAULT_ALGORITHM
    add("--algorithm", default=usual, metavar="NAME", help=f"{names} (default: {usual})")
    MODELS.add(parser, ["width", "candidates"])
    add("--temperature", type=float, default=0.0, help="prompt i has seed i (default: 0)")
    MODELS.add(parser, ["dtype"], dtype="auto")
    add("--nodes", choices=tuple(COUNTS), default="reached", help="nodes that are counted (default: reached)")
    add(
        "--least-nodes",
        type=int,
        default=20,
        help="a table ends at the first depth with fewer nodes (default: 20)",
    )
    add(
        "--least-share",
        type=float,
        default=0.02,
        help="smaller shares are 0 in the tables of classes (default: 0.02)",
    )
    add_report_arguments(parser, "profile")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the profile and its picture."""
    if not 0 <= arguments.least_share <= 1:
        raise ValueError(f"--least-share must lie in 0..1, not {arguments.least_share}")
    check_numbers(arguments, "least_nodes", "width", "candidates")
    get_algorithm(arguments.algorithm)
    check_fixed_budgets("--algorithm", [arguments.algorithm])
    SamplingParams(temperature=arguments.temperature)
    # A budget of one node drafts nothing.
    if not 2 <= arguments.budget <= BUCKETS[-1]:
        raise ValueError(
            f"--budget must be in 2..{BUCKETS[-1]} (nodes, root and a draft included), not {arguments.budget}"
        )
    check_report(arguments)
    settings = TreeSettings(
        arguments.budget, arguments.width, None, arguments.algorithm, arguments.candidates
    )
    prompts = read_prompts(arguments)
    enable_compilation_cache(arguments.compilation_cache)
    pair = load_pair(arguments, arguments.dtype, [settings])
    [work] = make_workloads(arguments, pair.target, prompts, [arguments.temperature]).values()
    rounds = trace_requests(pair, work, settings, implementation=arguments.implementation)
    found = tables(
        rounds,
        nodes=arguments.nodes,
        least_nodes=arguments.least_nodes,
        least_share=arguments.least_share,
    )
    depths = len(found["depth_rank_accept"])
    if not depths:
        raise ValueError(
            f"{len(rounds)} rounds are too few for a table with --least-nodes {arguments.least_nodes}; "
            "take more prompts or more tokens"
        )
    counts = COUNTS[arguments.nodes](rounds)
    profile = {
        **found,
        "meta": {
            **opening_of("profile", arguments),
            **describe_pair(pair, [work]),
            "prompts": len(work.prompts),
            "rounds": len(rounds),
            "tau": float(np.mean([len(traced.trace.committed) for traced in rounds])),
            "nodes": counts.nodes.tolist(),
            "rounds_by_class": {name: int(np.sum(classes_of(rounds) == i)) for i, name in enumerate(CLASSES)},
        },
    }
    Profile.parse(profile)
    meta = profile["meta"]
    title = (
        f"{meta['rounds']} rounds of {meta['prompts']} prompts x {arguments.max_tokens} tokens, "
        f"{arguments.algorithm} {arguments.budget}, T = {arguments.temperature:g}, {measured_on(meta)}"
    )
    classes = ", ".join(f"{name} {count}" for name, count in meta["rounds_by_class"].items())
    notes = [f"Rounds by class: {classes}."]
    if np.any(counts.nodes[depths:]):
        notes.append(
            f"The profile's table ends with depth {depths - 1}: deeper rows have less than "
            f"{arguments.least_nodes} nodes."
        )
    show(title, table_of(counts), notes)
    write_report(arguments.json, profile)
    arguments.draw(arguments.json, arguments.plot)
    return 0


def tables(
    rounds: Sequence[TracedRound], *, nodes: str = "reached", least_nodes: int = 1, least_share: float = 0.0
) -> dict[str, Any]:
    """The tables of a profile: for all rounds, and for each class with enough rounds."""
    count, classes = COUNTS[nodes], classes_of(rounds)
    histograms = {}
    for i, name in enumerate(CLASSES):
        members = [traced for traced, kind in zip(rounds, classes, strict=True) if kind == i]
        if members and (shares := count(members).shares(least_nodes)):
            histograms[name] = [[x if x >= least_share else 0.0 for x in row] for row in shares]
    return {
        "version": VERSION,
        "depth_rank_accept": count(rounds).shares(least_nodes),
        "per_class_histograms": histograms,
    }


def classes_of(rounds: Sequence[TracedRound]) -> np.ndarray:
    """The class of each round, an index into `CLASSES`, by its prompt's hint or by its draft's confidence."""
    tokens = np.stack([traced.trace.candidate_tokens for traced in rounds])
    log_probs = np.stack([traced.trace.candidate_scores for traced in rounds])
    candidates = Candidates(
        jnp.asarray(tokens), jnp.asarray(log_probs), jnp.zeros(tokens.shape[:2], jnp.float32)
    )
    routing = Routing.of([traced.routing for traced in rounds], len(rounds))
    return np.asarray(TaskRouter().classes(candidates, routing))
