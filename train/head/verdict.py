"""The result of a training run: the finished head compared with the initial head on held-out documents."""

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
    kept = read_json(work / "evaluation.json")["best_step"]
    looks = {record["step"]: record for record in read_log(work / "log.jsonl") if "validation_loss" in record}
    before = looks.pop(0, None)
    if before is None:
        return Verdict(True, f"on held-out documents: {_measures(looks[kept])}")
    if kept in looks:
        return Verdict(True, f"improved on held-out documents: {_measures(looks[kept], before)}")
    best = _measures(max(looks.values(), key=_score), before)
    return Verdict(False, f"not improved on held-out documents: at best {best}; the initial head is kept")


def _score(look: Record) -> float:
    """As `HeadEvaluator` scores."""
    return look["tau"][max(look["tau"], key=int)] if "tau" in look else -look["validation_loss"]


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
