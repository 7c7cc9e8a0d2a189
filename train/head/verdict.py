"""The result of a training run: the finished head compared with the initial head on held-out documents."""

import math
from pathlib import Path
from typing import NamedTuple

from jetspec_jax.config import read_json
from train.loop.log import Record, read_log


class Verdict(NamedTuple):
    """The result of a finished run.

    Attributes:
        improved: Whether an evaluation during training was better than that of the initial head. Random
            initial heads are not evaluated, so their runs always improve.
        message: The result in one line, with the measures.
    """

    improved: bool
    message: str


def read_verdict(work: Path) -> Verdict:
    """The result of the finished run in a work folder.

    Compares the score that chose the best weights: tau at the largest budget, or without prompts the
    validation loss.
    """
    final = read_json(work / "evaluation.json")
    kept = final["best_step"]
    looks = {record["step"]: record for record in read_log(work / "log.jsonl") if _score(record) > -math.inf}
    if kept in looks:
        looks[kept] = _with_score(looks[kept], final["score"])
    before = looks.pop(0, None)
    if before is None:
        return Verdict(True, f"on held-out documents: {_measures(looks[kept])}")
    if kept in looks:
        return Verdict(True, f"improved on held-out documents: {_measures(looks[kept], before)}")
    best = "no evaluation gave a number"
    if looks:
        best = f"at best {_measures(max(looks.values(), key=_score), before)}"
    return Verdict(False, f"not improved on held-out documents: {best}; the initial head is kept")


def _score(record: Record) -> float:
    """As `HeadEvaluator` scores; -inf if the record is no evaluation, or its loss is not a number."""
    if "tau" in record:
        return record["tau"][max(record["tau"], key=int)]
    loss = record.get("validation_loss")
    return -math.inf if loss is None else -loss


def _with_score(look: Record, score: float) -> Record:
    """An evaluation with the score that chose its weights; a resumed run may have logged another one."""
    if "tau" in look:
        return {**look, "tau": {**look["tau"], max(look["tau"], key=int): score}}
    return {**look, "validation_loss": -score}


def _measures(look: Record, before: Record | None = None) -> str:
    def of(record: Record) -> dict[str, float]:
        if "tau" not in record:
            return {"validation loss": record["validation_loss"]}
        return {f"tau with budget {budget}": value for budget, value in record["tau"].items()}

    then = {} if before is None else of(before)
    return ", ".join(
        f"{name} {value:.3f}" + (f" ({then[name]:.3f} before)" if name in then else "")
        for name, value in of(look).items()
    )
