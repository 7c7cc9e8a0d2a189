"""Where rounds end: the target's token was no candidate of its draft row, or no child of its parent.

Shapes: R rounds, D draft depth, K candidates.
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from train.head.replay import Drafts

#: Upper ends of the classes of entropy, in nats; the last class has none.
ENTROPIES = (0.5, 1.0, 2.0, 4.0)


def anchors_of(rounds: list[list[int]], counts: list[int]) -> Int[np.ndarray, " R"]:
    """The anchor of each round: its index among the anchors of all texts.

    Args:
        rounds: Tokens that each round of each text commits.
        counts: Anchors of each text.
    """
    firsts = np.cumsum([0, *counts[:-1]])
    starts = [first + np.cumsum([0, *sizes[:-1]]) for first, sizes in zip(firsts, rounds, strict=True)]
    return np.concatenate(starts)


def rejections(
    drafts: Drafts, candidates: int, accepted: Int[np.ndarray, " R"], anchors: Int[np.ndarray, " R"]
) -> dict[str, Any]:
    """Counts of the rounds that ended at a rejected token, by its depth and by its draft row's entropy.

    Args:
        candidates: Candidates per draft row that the trees had.
        accepted: The number of drafted tokens that each round accepted.
        anchors: The anchor of each round.

    Returns:
        ``by_depth`` and ``by_entropy`` (classes end at `ENTROPIES`), lists of ``[no candidate, no child]``;
        and ``whole``, the number of rounds that accepted a token of every depth.
    """
    depth = drafts.following.shape[1]
    ended = accepted < depth
    anchor, row = anchors[ended], accepted[ended]
    token = drafts.following[anchor, row]
    known = (drafts.candidates.tokens[anchor, row, :candidates] == token[:, None]).any(axis=1).astype(int)
    by_depth, by_entropy = np.zeros((depth, 2), int), np.zeros((len(ENTROPIES) + 1, 2), int)
    np.add.at(by_depth, (row, known), 1)
    kind = np.searchsorted(ENTROPIES, drafts.candidates.entropies[anchor, row], side="right")
    np.add.at(by_entropy, (kind, known), 1)
    return {
        "by_depth": by_depth.tolist(),
        "by_entropy": by_entropy.tolist(),
        "whole": int((~ended).sum()),
    }


def rejection_tables(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Two tables for each temperature, of the largest budget: rejected tokens by depth and by entropy."""
    ends = [f"below {end:g}" for end in ENTROPIES] + [f"{ENTROPIES[-1]:g} and more"]
    tables = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        mine = [row for row in rows if row["temperature"] == temperature]
        most = max(row["budget"] for row in mine)
        for kind, title in (("by_depth", "depth"), ("by_entropy", "entropy of the draft row, nats")):
            shown = []
            for row in (row for row in mine if row["budget"] == most):
                found = row["rejected"][kind]
                names = ends if kind == "by_entropy" else [str(i + 1) for i in range(len(found))]
                for place, cause in enumerate(("no candidate", "no child of its parent")):
                    counts = dict(zip(names, (counts[place] for counts in found), strict=True))
                    about = {"algorithm": row["algorithm"], "candidates": row["candidates"]}
                    shown.append({**about, "rejected because": cause, **counts})
            tables.append((f"T = {temperature:g}, {most} nodes: rejected tokens by {title}", shown))
    return tables
