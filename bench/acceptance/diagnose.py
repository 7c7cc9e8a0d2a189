"""``python -m bench diagnose``: the quality of a head's drafts beyond its acceptance length.

*Faithfulness* of the rank-1 branch (appendix A of the JetSpec paper): on the head's argmax path of full
depth, the sum of the head's log-probabilities is compared with the sum of the target's for the same tokens.
All nodes of a row share the head's distribution, so this is the only branch whose score is conditioned on its
own tokens. A difference of many nats means that the head's scores are wrong even there. The report also has
the tokens committed per round, with chains and with trees, and the ranks of accepted nodes by depth.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from bench.acceptance.counts import (
    FAITHFUL,
    Counts,
    TracedRound,
    committed_tokens,
    count_accepted,
    table_of,
    trace_requests,
)
from bench.acceptance.rounds import add_shared_arguments, begin
from bench.common.pair import describe_pair
from bench.common.report import add_report_arguments, measured_on, opening_of, publish
from jetspec_jax.decode.settings import TreeSettings

QUANTILES = (5, 25, 50, 75, 95)


class Branches(NamedTuple):
    """The rank-1 branches of R rounds, down to each depth.

    Attributes:
        draft: Sums of the head's log-probabilities.
        target: Sums of the target's log-probabilities, at temperature 1 and without filters.
    """

    draft: Float[np.ndarray, "R D"]
    target: Float[np.ndarray, "R D"]

    @property
    def differences(self) -> Float[np.ndarray, "R D"]:
        """Draft minus target in nats; positive where the head is more confident than the target."""
        return self.draft - self.target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_shared_arguments(parser)
    add_report_arguments(parser, "diagnose")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables, and writes the JSON and the plot."""
    pair, work, tree = begin(arguments)
    # One node per slot of the head: the anchor and one for each draft row.
    nodes = pair.head.config.block_size
    chain = TreeSettings(nodes, arguments.width, None, "chain", arguments.candidates)
    chains, trees = (
        trace_requests(pair, work, settings, implementation=arguments.implementation)
        for settings in (chain, tree)
    )
    branches, accepted = branches_of(chains), count_accepted(trees)
    name = f"{arguments.algorithm} {arguments.budget}"
    report = {
        **opening_of("diagnose", arguments),
        **describe_pair(pair, [work]),
        "faithfulness": faithfulness(branches),
        # The sums of every round at full depth.
        "branches": {"draft": branches.draft[:, -1].tolist(), "target": branches.target[:, -1].tolist()},
        "committed_per_round": {
            "chain": np.bincount(committed_tokens(chains).astype(int)).tolist(),
            name: np.bincount(committed_tokens(trees).astype(int)).tolist(),
        },
        "accepted_by_depth_and_rank": {"rounds": len(trees), "nodes": accepted.hits.tolist()},
    }
    notes = _notes(report, {"chain": chains, name: trees})
    title = (
        f"{len(work.prompts)} prompts x {arguments.max_tokens} tokens, T = {arguments.temperature:g}, "
        f"{measured_on(report)}"
    )
    heading = f"{title}\nRank-1 branches: head's minus target's log-probability in nats, quantiles"
    deepest = int(np.flatnonzero(accepted.hits.any(axis=1)).max(initial=0)) + 1
    share = table_of(Counts(*(array[:deepest] for array in accepted)), depth=1, nodes="rounds")
    from bench.acceptance.plot import draw_diagnosis

    tables = [
        (heading, [{"depth": row["depth"], **_shown(row)} for row in report["faithfulness"]]),
        (f"Share of rounds ({name}) that accept a node of a depth, by its rank", share),
    ]
    publish(arguments, report, tables, notes, draw_diagnosis)
    return 0


def branches_of(chains: Sequence[TracedRound]) -> Branches:
    """The sums of log-probabilities along chains of full depth; raises ValueError for another tree."""
    rows = len(chains[0].trace.candidate_tokens)
    wanted = np.arange(-1, rows)
    if any(not np.array_equal(traced.trace.parents, wanted) for traced in chains):
        raise ValueError(f"rank-1 branches need chains of {rows} nodes below the anchor")
    return Branches(
        np.stack([traced.trace.scores[1:] for traced in chains]).astype(np.float64),
        np.cumsum([traced.trace.target_log_probs[1:] for traced in chains], axis=1, dtype=np.float64),
    )


def faithfulness(branches: Branches) -> list[dict[str, Any]]:
    """Quantiles of the differences in nats and the share of faithful branches: a row per depth."""
    rows = []
    for d, column in enumerate(branches.differences.T):
        quantiles = {
            f"{q} %": float(x) for q, x in zip(QUANTILES, np.percentile(column, QUANTILES), strict=True)
        }
        faithful = float(np.mean(np.abs(column) <= FAITHFUL))
        rows.append({"depth": d + 1, "branches": len(column), **quantiles, "faithful": faithful})
    return rows


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    cells = {key: value for key, value in row.items() if key not in ("depth", "faithful")}
    return {**cells, f"within {FAITHFUL:g}": f"{row['faithful']:.1%}"}


def _notes(report: dict[str, Any], rounds: dict[str, list[TracedRound]]) -> list[str]:
    last = report["faithfulness"][-1]
    taus = ", ".join(f"{name} {committed_tokens(group).mean():.2f}" for name, group in rounds.items())
    return [
        f"{last['faithful']:.1%} of {last['branches']} rank-1 branches of depth {last['depth']} are faithful "
        f"to within {FAITHFUL:g} nats (the paper's head: 42 % causal, 6 % bidirectional, on MATH-500).",
        f"Tokens committed per round: {taus}.",
    ]
