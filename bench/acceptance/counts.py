"""Rounds of real decoding, traced, and what of their drafts the target took. Shapes: D depth, K candidates.

A draft row does not depend on the path taken to its depth, so the target's tokens after an anchor give the
rank of its choice in every row, whatever tree was grown: a node of depth d is *reached* if the first d of
those tokens were all among the K candidates of their rows, as they would be in a tree without a budget. The
tree of a measurement only says at which anchors rounds began.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bench.common.pair import Pair
from bench.common.workload import Workload
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.inspect.trace import RoundTrace, trace_rounds
from jetspec_jax.progress import Progress
from jetspec_jax.tree import Hints

#: A target's choice that is none of a row's K candidates.
NO_RANK = -1


class Followed(NamedTuple):
    """A round, and what its request went on with.

    Attributes:
        prompt: Index of the request's prompt.
        routing: What is known of that prompt.
        trace: The round.
        tokens: The target's own tokens after the anchor, as many as there are rows or until the output ends.
    """

    prompt: int
    routing: Hints | None
    trace: RoundTrace
    tokens: Int[np.ndarray, "n"]


class Counts(NamedTuple):
    """How often the target chose what.

    Attributes:
        hits: Choices that were the candidate of a rank in the row of a depth.
        nodes: Nodes of a depth at which a choice was looked at.
    """

    hits: Int[np.ndarray, "D K"]
    nodes: Int[np.ndarray, "D"]

    def shares(self, least_nodes: int = 1) -> list[list[float]]:
        """Hits for each node, down to the first depth that has fewer nodes."""
        rows = zip(self.hits, self.nodes, strict=True)
        enough = itertools.takewhile(lambda row: row[1] >= least_nodes, rows)
        return [[float(hit) / int(count) for hit in row] for row, count in enough]


def follow(
    pair: Pair, work: Workload, settings: TreeSettings, *, implementation: str | None = None
) -> list[Followed]:
    """Decodes all prompts, one after the other, and keeps every round.

    Raises:
        ValueError: A request cannot be served, or a setting is out of its range.
    """
    found = []
    requests = list(zip(work.ids, work.params, work.routing, strict=True))
    for i, (prompt, own, routing) in enumerate(Progress(requests, desc="trace", unit="prompt")):
        trace = trace_rounds(
            pair.target,
            pair.head,
            prompt,
            own,
            settings,
            routing=routing,
            implementation=implementation,
        )
        rounds = list(trace)
        assert trace.completion is not None, "the request has ended"
        sequence = np.asarray([*prompt, *trace.completion.token_ids], np.int32)
        for one in rounds:
            after = one.start + 1
            found.append(Followed(i, routing, one, sequence[after : after + len(one.candidate_tokens)]))
    return found


def ranks_of(one: Followed) -> Int[np.ndarray, "n"]:
    """The rank of the target's choice in each row that was reached; `NO_RANK` ends them."""
    ranks = []
    for token, row in zip(one.tokens, one.trace.candidate_tokens, strict=False):
        places = np.flatnonzero(row == token)
        ranks.append(int(places[0]) if places.size else NO_RANK)
        if not places.size:
            break
    return np.asarray(ranks, np.int64)


def count_reached(rounds: Sequence[Followed]) -> Counts:
    """Choices at the nodes that the target's own tokens reach."""
    counts = _none(rounds)
    for one in rounds:
        ranks = ranks_of(one)
        counts.nodes[: len(ranks)] += 1
        depths = np.flatnonzero(ranks != NO_RANK)
        counts.hits[depths, ranks[depths]] += 1
    return counts


def count_tree(rounds: Sequence[Followed]) -> Counts:
    """Choices at all nodes of the trees, also off the target's path, as the reference counts."""
    counts = _none(rounds)
    for one in rounds:
        trace = one.trace
        inner = trace.depths < len(trace.candidate_tokens)
        depths, choices = trace.depths[inner], trace.choices[inner]
        np.add.at(counts.nodes, depths, 1)
        nodes, ranks = np.nonzero(trace.candidate_tokens[depths] == choices[:, None])
        np.add.at(counts.hits, (depths[nodes], ranks), 1)
    return counts


def count_accepted(rounds: Sequence[Followed]) -> Counts:
    """Accepted nodes by the row and rank that they were drafted from; for nodes, at any depth, the rounds."""
    counts = _none(rounds)
    for one in rounds:
        trace = one.trace
        counts.nodes[:] += 1
        for node in trace.path[1:]:
            row = trace.depths[node] - 1
            [rank] = np.flatnonzero(trace.candidate_tokens[row] == trace.tokens[node])
            counts.hits[row, rank] += 1
    return counts


def table_of(counts: Counts, *, depth: int = 0, nodes: str = "nodes") -> list[dict[str, Any]]:
    """A row of shares for each depth that has a node, for the screen.

    Args:
        counts: What was counted.
        depth: The first row's depth.
        nodes: What a node is called.
    """
    return [
        {
            "depth": depth + d,
            nodes: int(counts.nodes[d]),
            **{f"rank {rank + 1}": f"{share:.3f}" for rank, share in enumerate(row)},
            "any": f"{sum(row):.3f}",
        }
        for d, row in enumerate(counts.shares())
    ]


def taken(rounds: Sequence[Followed]) -> Float[np.ndarray, "n"]:
    """Tokens that each round committed."""
    return np.asarray([len(one.trace.committed) for one in rounds], float)


def _none(rounds: Sequence[Followed]) -> Counts:
    shape = rounds[0].trace.candidate_tokens.shape
    return Counts(np.zeros(shape, np.int64), np.zeros(shape[0], np.int64))
