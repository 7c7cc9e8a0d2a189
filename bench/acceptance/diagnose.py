"""``python -m bench diagnose``: how a draft head drafts, beyond its acceptance length.

*Faithfulness* of the rank-1 branch (appendix A of the JetSpec paper): of the head's own argmax path of full
depth, the sum of the head's log-probabilities against the sum of those that the target gives the same tokens
one after the other. All nodes of a row share the head's distribution, so this is the one branch that the head
can score as it was conditioned; a difference of many nats says that it does not. Beside it: how many tokens
rounds committed, with chains and with trees, and of which rank the accepted ones were at which depth.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from bench.acceptance.counts import Counts, Followed, count_accepted, follow, table_of, taken
from bench.acceptance.rounds import add_shared_arguments, begin
from bench.common.pair import describe_pair
from bench.common.report import add_report_arguments, measured_on, opening_of, publish
from jetspec_jax.decode.settings import TreeSettings

# A branch is called faithful within so many nats.
FAITHFUL = 5.0
QUANTILES = (5, 25, 50, 75, 95)


class Branches(NamedTuple):
    """The rank-1 branches of R rounds, down to each depth.

    Attributes:
        draft: Sums of the head's log-probabilities.
        target: Sums of the target's for the same tokens, at temperature 1 and without a filter.
    """

    draft: Float[np.ndarray, "R D"]
    target: Float[np.ndarray, "R D"]

    @property
    def differences(self) -> Float[np.ndarray, "R D"]:
        """In nats; above 0 the head is surer than the target."""
        return self.draft - self.target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_shared_arguments(parser)
    add_report_arguments(parser, "diagnose")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables, and writes the JSON and the plot."""
    pair, work, tree = begin(arguments)
    # As many nodes as the head has slots: the anchor and one for each row.
    nodes = pair.head.config.block_size
    chain = TreeSettings(nodes, arguments.width, None, "chain", arguments.candidates)
    chains, trees = (
        follow(pair, work, own, implementation=arguments.implementation) for own in (chain, tree)
    )
    branches, accepted = branches_of(chains), count_accepted(trees)
    name = f"{arguments.algorithm} {arguments.budget}"
    report = {
        **opening_of("diagnose", arguments),
        **describe_pair(pair, [work]),
        "faithfulness": faithfulness(branches),
        # Of every round, down to the full depth.
        "branches": {"draft": branches.draft[:, -1].tolist(), "target": branches.target[:, -1].tolist()},
        "committed_per_round": {
            "chain": np.bincount(taken(chains).astype(int)).tolist(),
            name: np.bincount(taken(trees).astype(int)).tolist(),
        },
        "accepted_by_depth_and_rank": {"rounds": len(trees), "nodes": accepted.hits.tolist()},
    }
    notes = _notes(report, {"chain": chains, name: trees})
    title = (
        f"{len(work.prompts)} prompts x {arguments.max_tokens} tokens, T = {arguments.temperature:g}, "
        f"{measured_on(report)}"
    )
    heading = f"{title}\nRank-1 branches: head's less target's log-probability in nats, quantiles"
    deepest = int(np.flatnonzero(accepted.hits.any(axis=1)).max(initial=0)) + 1
    share = table_of(Counts(*(own[:deepest] for own in accepted)), depth=1, nodes="rounds")
    from bench.acceptance.plot import draw_diagnosis

    tables = [
        (heading, [{"depth": row["depth"], **_shown(row)} for row in report["faithfulness"]]),
        (f"Share of rounds ({name}) that accept a node of a depth, by its rank", share),
    ]
    publish(arguments, report, tables, notes, draw_diagnosis)
    return 0


def branches_of(chains: Sequence[Followed]) -> Branches:
    """The sums along chains of full depth.

    Raises:
        ValueError: A round's tree is no such chain.
    """
    rows = len(chains[0].trace.candidate_tokens)
    wanted = np.arange(-1, rows)
    if any(not np.array_equal(one.trace.parents, wanted) for one in chains):
        raise ValueError(f"rank-1 branches are read off chains of {rows} nodes below the anchor")
    return Branches(
        np.stack([one.trace.scores[1:] for one in chains]).astype(np.float64),
        np.cumsum([one.trace.target_log_probs[1:] for one in chains], axis=1, dtype=np.float64),
    )


def faithfulness(branches: Branches) -> list[dict[str, Any]]:
    """For every depth the quantiles of the differences in nats, and the share of faithful branches."""
    rows = []
    for d, own in enumerate(branches.differences.T):
        quantiles = {
            f"{q} %": float(x) for q, x in zip(QUANTILES, np.percentile(own, QUANTILES), strict=True)
        }
        faithful = float(np.mean(np.abs(own) <= FAITHFUL))
        rows.append({"depth": d + 1, "branches": len(own), **quantiles, "faithful": faithful})
    return rows


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    cells = {key: value for key, value in row.items() if key not in ("depth", "faithful")}
    return {**cells, f"within {FAITHFUL:g}": f"{row['faithful']:.1%}"}


def _notes(report: dict[str, Any], rounds: dict[str, list[Followed]]) -> list[str]:
    last = report["faithfulness"][-1]
    taus = ", ".join(f"{name} {taken(own).mean():.2f}" for name, own in rounds.items())
    return [
        f"{last['faithful']:.1%} of {last['branches']} rank-1 branches of depth {last['depth']} are faithful "
        f"to within {FAITHFUL:g} nats (the paper's head: 42 % causal, 6 % bidirectional, on MATH-500).",
        f"Tokens committed per round: {taus}.",
    ]
