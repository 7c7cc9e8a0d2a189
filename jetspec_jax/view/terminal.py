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
    """The characters of a drawing: branches of two columns, and a mark per kind of node."""

    branch: str = "├─"
    last: str = "└─"
    bar: str = "│ "
    accepted: str = "●"
    rejected: str = "○"
    bonus: str = "◆"
    ellipsis: str = "…"


UNICODE = Signs()
ASCII = Signs("|-", "`-", "| ", "*", "o", "+", "...")

# A terminal's bold green, bold cyan and faint.
_COLOURS = {"accepted": "\033[1;32m", "bonus": "\033[1;36m", "rejected": "\033[2m"}
_PLAIN = "\033[0m"


def draw_round(
    trace: RoundTrace,
    label: Callable[[int], str],
    *,
    signs: Signs = UNICODE,
    width: int | None = None,
    colour: bool = False,
) -> list[str]:
    """The lines of a round's tree, one per node: its score, its probabilities, and its place in the tree.

    The columns are the cumulative draft log-probability, and the token's probability after its parent under
    the draft head and under the target. The bonus token is drawn at the end of the accepted path.

    Lines are cut at ``width`` columns.
    """
    lines: list[tuple[str, str]] = [("", _FIGURES.format("score", "draft", "target").rstrip())]
    on_path = set(trace.path.tolist())
    children: dict[int, list[int]] = {node: [] for node in range(len(trace.tokens))}
    for node in range(1, len(trace.tokens)):
        children[int(trace.parents[node])].append(node)

    def add(node: int, lead: str, below: str) -> None:
        kind = "accepted" if node in on_path else "rejected"
        mark = signs.accepted if node in on_path else signs.rejected
        lines.append((kind, f"{_figures(trace, node)}{lead}{mark} {label(int(trace.tokens[node]))}"))
        places = [None, *children[node]] if node == trace.path[-1] else children[node]
        for child in places:
            is_last = child is places[-1]
            line = signs.last if is_last else signs.branch
            if child is None:
                text = f"{below}{line}{signs.bonus} {label(int(trace.committed[-1]))}  (bonus)"
                lines.append(("bonus", _FIGURES.format("", "", "") + text))
            else:
                add(child, below + line, below + ("  " if is_last else signs.bar))

    add(ROOT_INDEX, "", "")
    shown = [(kind, cut(line, width, signs.ellipsis)) for kind, line in lines]
    return [f"{_COLOURS[kind]}{line}{_PLAIN}" if colour and kind else line for kind, line in shown]


def headline(trace: RoundTrace, number: int, rounds: int, budget: int) -> str:
    """A summary of the round in one line."""
    nodes, accepted = len(trace.tokens), len(trace.path) - 1
    return (
        f"round {number} of {rounds}: a tree of {nodes} node{'s' * (nodes != 1)} (budget {budget}), "
        f"{accepted} accepted, and the bonus"
    )


def _figures(trace: RoundTrace, node: int) -> str:
    parent = trace.parents[node]
    if parent == NO_PARENT:
        return _FIGURES.format("0.00", "", "")
    draft = trace.scores[node] - trace.scores[parent]
    return _FIGURES.format(
        f"{trace.scores[node]:.2f}", _percent(draft), _percent(trace.target_log_probs[node])
    )


def _percent(log_prob: np.floating) -> str:
    share = 100 * math.exp(float(log_prob))
    return "<0.1%" if share < 0.1 else f"{share:.1f}%"
