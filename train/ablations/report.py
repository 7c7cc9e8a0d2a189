"""The report of the ablations: a table, a verdict on each expected ordering, JSON, a plot and a page."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.checkpoint.files import write_json
from train.ablations.plot import plot_ablations

#: tau by budget, for each variant.
Taus = Mapping[str, Mapping[str, float]]


class Verdict(NamedTuple):
    """An ordering that the paper reports, and whether it was measured.

    Attributes:
        claim: The expected ordering.
        figures: The measured figures.
        holds: Whether the ordering holds at every budget.
    """

    claim: str
    figures: str
    holds: bool


def judge(taus: Taus) -> list[Verdict]:
    """Compares measured taus with the orderings that the paper reports."""
    pairs = (
        ("forward KL is at least hard labels less 3 %", "forward_kl", "sft", 0.97),
        ("forward KL is well above reverse KL (5 % and more)", "forward_kl", "reverse_kl", 1.05),
        ("hard labels are well above reverse KL (5 % and more)", "sft", "reverse_kl", 1.05),
        (
            "causal is clearly above bidirectional at gamma 0 (2 % and more)",
            "forward_kl",
            "bidirectional",
            1.02,
        ),
        ("causal is not below bidirectional at gamma 7", "causal_gamma7", "bidirectional_gamma7", 1.0),
        ("regenerated text is well above corpus text (5 % and more)", "forward_kl", "corpus", 1.05),
    )
    verdicts = [
        Verdict(
            claim,
            ", ".join(f"{taus[better][b]:.2f} : {taus[worse][b]:.2f} at {b}" for b in taus[better]),
            all(taus[better][b] >= factor * taus[worse][b] for b in taus[better]),
        )
        for claim, better, worse, factor in pairs
        if better in taus and worse in taus
    ]
    for name, by_budget in taus.items():
        values = list(by_budget.values())
        rising = all(a < b for a, b in itertools.pairwise(values))
        figures = " < ".join(f"{value:.2f}" for value in values)
        verdicts.append(Verdict(f"tau rises with the budget ({name})", figures, rising))
    return verdicts


def table(results: Mapping[str, Any]) -> str:
    """The variants in Markdown, the best first."""
    variants = sorted(results["variants"].values(), key=lambda variant: -list(variant["tau"].values())[-1])
    first = variants[0]
    titles = [f"budget {b}" for b in first["tau"]] + [f"T = 1, budget {b}" for b in first["tau_sampled"]]
    lines = [
        "| τ | " + " | ".join([*titles, "accepted of a greedy chain"]) + " |",
        "|---" * (len(titles) + 2) + "|",
    ]
    for variant in variants:
        values = [*variant["tau"].values(), *variant["tau_sampled"].values(), variant["accepted_length"]]
        lines.append(f"| {variant['label']} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return "\n".join(lines)


def write_report(folder: Path, results: Mapping[str, Any]) -> list[Verdict]:
    """Writes ``ablations.json``, ``ablations.png`` and ``README.md``, and returns the verdicts."""
    verdicts = judge({name: variant["tau"] for name, variant in results["variants"].items()})
    record = {**results, "verdicts": [verdict._asdict() for verdict in verdicts]}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "ablations.json", record)
    plot_ablations(results, folder / "ablations.png")
    temperatures = ", ".join(f"{t:g}" for t in results["text_temperatures"])
    lines = [
        "# Ablations at the scale of the demo pair",
        "",
        f"{results['steps']} steps of {results['batch']} sequences for each head, {results['documents']} "
        f"documents, the regenerated ones at temperature {temperatures}; τ over {results['prompts']} prompts "
        f"of held-out modules, greedy unless said, width {results['width']}, {results['dtype']}. "
        f"{results['device']}. Made by `python -m train ablations`.",
        "",
        table(results),
        "",
        "![τ by variant and budget](ablations.png)",
        "",
        "| expected | measured | holds |",
        "|---|---|---|",
        *(f"| {v.claim} | {v.figures} | {'yes' if v.holds else 'no'} |" for v in verdicts),
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
    return verdicts
