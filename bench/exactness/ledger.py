"""The entries of the ledger, their totals, and their tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.common.workload import Workload
from jetspec_jax import Completion, Target
from jetspec_jax.engine.detokenizer import detokenizer_of
from jetspec_jax.inspect.exactness import TIE_RULE, first_divergence
from jetspec_jax.progress import Progress

# The most divergences that are printed; the JSON has all.
SHOWN = 20
VERDICTS = ("mistake", "tie", None)

Row = Mapping[str, Any]


def divergences_of(
    target: Target,
    work: Workload,
    outputs: Sequence[Completion],
    plain: Sequence[Completion],
    *,
    judged: bool,
) -> list[dict[str, Any]]:
    """An entry for the first difference of each output that is not plain decoding's.

    The target's logits give the gap there. Without ``judged`` the verdict is None.
    """
    entries, words = [], detokenizer_of(target.tokenizer)
    pairs = zip(work.prompts, work.ids, work.params, outputs, plain, strict=True)
    for prompt, ids, params, ours, theirs in Progress(
        pairs, total=len(outputs), desc="compare", unit="prompt", leave=False, delay=2
    ):
        found = first_divergence(target, ids, params, ours.token_ids, theirs.token_ids)
        if found is not None:
            texts = {
                f"{name}_text": None if token is None or words is None else words.token_text(token)
                for name, token in (("token", found.token), ("expected", found.expected))
            }
            verdict = ("tie" if found.is_tie else "mistake") if judged else None
            entries.append({"prompt": prompt.id, **asdict(found), **texts, "verdict": verdict})
    return entries


def total(
    work: Workload, outputs: Sequence[Completion], entries: Sequence[Row], *, judged: bool
) -> dict[str, Any]:
    """The totals of one method; without ``judged``, ties and mistakes are None."""
    parted = {entry["prompt"]: entry["position"] for entry in entries}
    ties = sum(entry["verdict"] == "tie" for entry in entries)
    rounds = sum(output.rounds for output in outputs)
    return {
        "prompts": len(outputs),
        # Tokens of each output up to its first difference.
        "tokens": sum(
            parted.get(prompt.id, len(output.token_ids))
            for prompt, output in zip(work.prompts, outputs, strict=True)
        ),
        "tau": sum(sum(output.accept_lengths) for output in outputs) / max(rounds, 1),
        "divergences": len(entries),
        "ties": ties if judged else None,
        "mistakes": len(entries) - ties if judged else None,
        "largest_gap": max((entry["gap"] for entry in entries), default=None),
    }


def notes_of(rows: Sequence[Row]) -> list[str]:
    """The totals over all methods."""
    notes = []
    judged = [row for row in rows if row["mistakes"] is not None]
    if judged:
        ties, mistakes = (sum(row[key] for row in judged) for key in ("ties", "mistakes"))
        notes.append(
            f"float32: {sum(row['tokens'] for row in judged):,} tokens compared, {ties} ties (both tokens "
            f"{TIE_RULE}), {mistakes} mistakes."
        )
    listed = [row for row in rows if row["mistakes"] is None]
    if listed:
        count, outputs = (sum(row[key] for row in listed) for key in ("divergences", "prompts"))
        dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in listed))
        notes.append(
            f"{dtypes}: {count} of {outputs:,} outputs differ from plain decoding's; rounding makes "
            "near-ties frequent there, so differences are listed and not judged."
        )
    return notes


def agreement_notes(seen: Mapping[str, Any] | None) -> list[str]:
    """A note on a report's ``agreement``; none for one device."""
    if seen is None:
        return []
    found = f"these differed: {', '.join(seen['unequal'])}" if seen["unequal"] else "all were equal"
    return [
        f"{seen['arrays']} arrays that steer decoding were compared on {seen['devices']} devices, bit for "
        f"bit, after {seen['launches']} launches: {found}."
    ]


def tables_of(
    title: str, rows: Sequence[Row], entries: Sequence[Row]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Heading and rows of each table, with the totals last."""
    # Mistakes first, then ties, then unjudged differences, each in descending order of the gap.
    worst = sorted(entries, key=lambda entry: (VERDICTS.index(entry["verdict"]), -entry["gap"]))
    parted = [
        {
            **{key: entry[key] for key in ("dtype", "T", "method", "prompt", "position")},
            "token": _token(entry, "token"),
            "plain": _token(entry, "expected"),
            "top-2 gap": f"{entry['gap']:.1e}",
            "": (entry["verdict"] or "").upper(),
        }
        for entry in worst[:SHOWN]
    ]
    totals = []
    for row in rows:
        gap = None if row["largest_gap"] is None else f"{row['largest_gap']:.1e}"
        shown = {key: value for key, value in row.items() if key != "largest_gap"}
        totals.append({**shown, "largest gap": gap})
    heading = f"First differences: {len(parted)} of {len(worst)}"
    return [*([(heading, parted)] if parted else []), (title, totals)]


def _token(entry: Row, key: str) -> str:
    return "nothing" if entry[key] is None else f"{entry[key]} {entry[key + '_text']!r}"
