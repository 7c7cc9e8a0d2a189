"""Traces rounds of real decoding, and counts which candidates the target chose. D depth, K candidates.

A draft row does not depend on the path to its depth, and the order that a selector gives it depends only on
the token before. So the target's tokens after an anchor give the rank of its choice in every row, independent
of the tree: a node of depth d is *reached* if the first d of these tokens were among the K candidates of
their rows, as in a tree without a budget. The tree of a measurement decides only at which anchors rounds
begin.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from bench.common.pair import Pair
from bench.common.workload import Workload
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.inspect.trace import RoundTrace, trace_rounds
from jetspec_jax.progress import Progress
from jetspec_jax.tree import Hints

#: The target's choice is not among a row's K candidates.
NO_RANK = -1


class TracedRound(NamedTuple):
    """A round, and the tokens with which its request continued.

    Attributes:
        routing: The prompt's routing hints.
        trace: The round.
        tokens: The request's tokens after the anchor: one per draft row, fewer at the end of the output.
    """

    routing: Hints | None
    trace: RoundTrace
    tokens: Int[np.ndarray, "n"]


class Counts(NamedTuple):
    """The target's choices by depth and rank.

    Attributes:
        hits: Choices equal to the candidate of each rank in each depth's row.
        nodes: Nodes of each depth whose choices were counted.
    """

    hits: Int[np.ndarray, "D K"]
    nodes: Int[np.ndarray, "D"]

    def shares(self, least_nodes: int = 1) -> list[list[float]]:
        """Hits per node, for all depths before the first with fewer than ``least_nodes`` nodes."""
        rows = zip(self.hits, self.nodes, strict=True)
        enough = itertools.takewhile(lambda row: row[1] >= least_nodes, rows)
        return [[float(hit) / int(count) for hit in row] for row, count in enough]


def trace_requests(
    pair: Pair, work: Workload, settings: TreeSettings, *, implementation: str | None = None
) -> list[TracedRound]:
    """Decodes the prompts one at a time, and keeps every round.

    Raises:
        ValueError: A request cannot be served, or a setting is out of range.
    """
    found = []
    requests = list(zip(work.ids, work.params, work.routing, strict=True))
    for prompt, params, routing in Progress(requests, desc="trace", unit="prompt"):
        trace = trace_rounds(
            pair.target,
            pair.head,
            prompt,
            params,
            settings,
            routing=routing,
            implementation=implementation,
        )
        rounds = list(trace)
        assert trace.completion is not None, "the request has ended"
        sequence = np.asarray([*prompt, *trace.completion.token_ids], np.int32)
        for round_trace in rounds:
            after = round_trace.start + 1
            tokens = sequence[after : after + len(round_trace.candidate_tokens)]
            found.append(TracedRound(routing, round_trace, tokens))
    return found


def ranks_of(traced: TracedRound) -> Int[np.ndarray, "n"]:
    """The rank of the target's choice in each reached row; `NO_RANK` if the last row lacks the choice."""
    ranks, above = [], 0
    for row, token in enumerate(traced.tokens[: len(traced.trace.candidate_tokens)]):
        order = order_of(traced.trace, row, above)
        places = np.flatnonzero(traced.trace.candidate_tokens[row, order] == token)
        ranks.append(int(places[0]) if places.size else NO_RANK)
        if not places.size:
            break
        above = int(order[places[0]])
    return np.asarray(ranks, np.int64)


def order_of(trace: RoundTrace, row: int, above: int) -> Int[np.ndarray, "K"]:
    """A row's candidates below a candidate of the row above (0 for the anchor), the best first."""
    if trace.pair_scores is None:
        return np.arange(trace.candidate_tokens.shape[1])
    return np.argsort(-trace.pair_scores[row, above], kind="stable")


def _places(trace: RoundTrace) -> Int[np.ndarray, "N"]:
    """The index of each node among the candidates of its row; 0 for the anchor."""
    same = trace.candidate_tokens[trace.depths - 1] == trace.tokens[:, None]
    return np.where(trace.depths > 0, same.argmax(axis=1), 0)


def count_reached(rounds: Sequence[TracedRound]) -> Counts:
    """Counts choices at the nodes that the target's tokens reach."""
    counts = _none(rounds)
    for traced in rounds:
        ranks = ranks_of(traced)
        counts.nodes[: len(ranks)] += 1
        depths = np.flatnonzero(ranks != NO_RANK)
        counts.hits[depths, ranks[depths]] += 1
    return counts


def count_tree(rounds: Sequence[TracedRound]) -> Counts:
    """Counts choices at all nodes of the trees, as the reference implementation does."""
    counts = _none(rounds)
    for traced in rounds:
        trace = traced.trace
        places = _places(trace)
        for node in np.flatnonzero(trace.depths < len(trace.candidate_tokens)):
            row = int(trace.depths[node])
            tokens = trace.candidate_tokens[row, order_of(trace, row, int(places[node]))]
            counts.nodes[row] += 1
            counts.hits[row] += tokens == trace.choices[node]
    return counts


def table_of(counts: Counts) -> list[dict[str, Any]]:
    """A table to print, with a row of shares for each depth that has a node."""
    return [
        {
            "depth": d,
            "nodes": int(counts.nodes[d]),
            **{f"rank {rank + 1}": f"{share:.3f}" for rank, share in enumerate(row)},
            "any": f"{sum(row):.3f}",
        }
        for d, row in enumerate(counts.shares())
    ]


def _none(rounds: Sequence[TracedRound]) -> Counts:
    shape = rounds[0].trace.candidate_tokens.shape
    return Counts(np.zeros(shape, np.int64), np.zeros(shape[0], np.int64))
