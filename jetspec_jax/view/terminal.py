"""One round's tree as lines of text::

score  draft target
 0.00                ● :
-0.10  90.5%  88.1%  └─● ↵
                       ├─◆ return       bonus
-0.64  58.3%  12.0%    └─○ ·×4
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jetspec_jax.inspect.trace import RoundTrace
from jetspec_jax.tree import NO_PARENT, ROOT_INDEX
from jetspec_jax.view.tokens import cut

_FIGURES = "{:>8}{:>8}{:>8}  "


class Signs(NamedTuple):
    """What trees are drawn with: lines of two columns, and a mark for each kind of node."""

    branch: str = "├─"
    last: str = "└─"
    bar: str = "│ "
    accepted: str = "●"
    rejected: str = "○"
    bonus: str = "◆"
    ellipsis: str = "…"


UNICODE = Signs()
ASCII = Signs("|-", "`-", "| ", "*", "o", "+", "...")

# Of a terminal: bold green, bold cyan, faint.
_COLOURS = {"accepted": "\033[1;32m", "bonus": "\033[1;36m", "rejected": "\033[2m"}
_PLAIN = "\033[0m"


def draw_round(
    one: RoundTrace,
    label: Callable[[int], str],
    *,
    signs: Signs = UNICODE,
    width: int | None = None,
    colour: bool = False,
) -> list[str]:
    """The lines of a round's tree: per node its score, its probabilities, and its place in the tree.

    The columns are the cumulative draft log-probability, and the probability of the token after its parent
    under the draft head and under the target. The bonus is drawn where the accepted path ends.

    Args:
        one: The round.
        label: A token's text on one line.
        signs: What lines and marks are made of.
        width: Columns of the terminal; longer lines are cut. None cuts none.
        colour: Whether to colour the lines by what became of their nodes.
    """
    lines: list[tuple[str, str]] = [("", _FIGURES.format("score", "draft", "target").rstrip())]
    on_path = set(one.path.tolist())
    children: dict[int, list[int]] = {node: [] for node in range(len(one.tokens))}
    for node in range(1, len(one.tokens)):
        children[int(one.parents[node])].append(node)

    def add(node: int, lead: str, below: str) -> None:
        kind = "accepted" if node in on_path else "rejected"
        mark = signs.accepted if node in on_path else signs.rejected
        lines.append((kind, f"{_figures(one, node)}{lead}{mark} {label(int(one.tokens[node]))}"))
        places = [None, *children[node]] if node == one.path[-1] else children[node]
        for child in places:
            is_last = child is places[-1]
            line = signs.last if is_last else signs.branch
            if child is None:
                text = f"{below}{line}{signs.bonus} {label(int(one.committed[-1]))}  (bonus)"
                lines.append(("bonus", _FIGURES.format("", "", "") + text))
            else:
                add(child, below + line, below + ("  " if is_last else signs.bar))

    add(ROOT_INDEX, "", "")
    shown = [(kind, cut(line, width, signs.ellipsis)) for kind, line in lines]
    return [f"{_COLOURS[kind]}{line}{_PLAIN}" if colour and kind else line for kind, line in shown]


def headline(one: RoundTrace, number: int, rounds: int, budget: int) -> str:
    """What a round did, in one line."""
    nodes, accepted = len(one.tokens), len(one.path) - 1
    return (
        f"round {number} of {rounds}: a tree of {nodes} node{'s' * (nodes != 1)} (budget {budget}), "
        f"{accepted} accepted, and the bonus"
    )


def _figures(one: RoundTrace, node: int) -> str:
    parent = one.parents[node]
    if parent == NO_PARENT:
        return _FIGURES.format("0.00", "", "")
    draft = one.scores[node] - one.scores[parent]
    return _FIGURES.format(f"{one.scores[node]:.2f}", _percent(draft), _percent(one.target_log_probs[node]))


def _percent(log_prob: np.floating) -> str:
    share = 100 * math.exp(float(log_prob))
    return "<0.1%" if share < 0.1 else f"{share:.1f}%"
