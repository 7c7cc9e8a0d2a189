"""The profile that a benchmark is given: what it holds, and whether it was measured on prompts of the run."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.config import read_json

# The settings that say which prompts were taken; the last had no option in older profiles.
_SET, _COUNT, _SKIPPED = "prompts", "num_prompts", "skip_prompts"


def describe_profile(path: Path | None) -> dict[str, Any]:
    """What a report says of a profile beside its name; None of each without one.

    Its SHA-256, for names stay where tables change, and the prompts that it says it was measured on.
    """
    if path is None:
        return {"profile_sha256": None, "profile_prompts": None}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"profile_sha256": digest, "profile_prompts": _measured_on(read_json(path))}


def profile_notes(report: Mapping[str, Any]) -> list[str]:
    """A note if the profile was measured on prompts of this run, which then look better than others would.

    Args:
        report: With what `describe_profile` says, and the arguments of the run.
    """
    theirs, ours = report["profile_prompts"], report["arguments"]
    # A file may lie elsewhere now: its name alone is compared, as in the ids of prompts.
    if theirs is None or Path(theirs[_SET]).name != Path(ours[_SET]).name:
        return []
    first = max(own[_SKIPPED] for own in (theirs, ours))
    both = min(own[_SKIPPED] + own[_COUNT] for own in (theirs, ours)) - first
    if both <= 0:
        return []
    return [
        f"The profile was measured on {theirs[_COUNT]} prompts of {theirs[_SET]}: of the {ours[_COUNT]} "
        f"prompts of this run it knows {both}, on which algorithms that read it look better than on others. "
        "--skip-prompts leaves prompts out, here or of `bench profile`."
    ]


def _measured_on(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of the run that wrote a profile; None if it says nothing of them, as it need not."""
    meta = raw.get("meta")
    given = meta.get("arguments") if isinstance(meta, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    found = {_SET: given.get(_SET), _SKIPPED: given.get(_SKIPPED, 0), _COUNT: given.get(_COUNT)}
    kinds = {_SET: str, _SKIPPED: int, _COUNT: int}
    return found if all(isinstance(found[key], kind) for key, kind in kinds.items()) else None
