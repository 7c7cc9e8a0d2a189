"""Describes the acceptance profile of a run, and notes whether it was measured on the run's prompts."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.config import read_json

# The settings that select prompts. Older profiles lack the last one.
_SET, _COUNT, _SKIPPED = "prompts", "num_prompts", "skip_prompts"


def describe_profile(path: Path | None) -> dict[str, Any]:
    """A profile's SHA-256 and the prompts it was measured on, for a report; None for both without a profile.

    The report has the hash because a file can keep its name while its tables change.
    """
    if path is None:
        return {"profile_sha256": None, "profile_prompts": None}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"profile_sha256": digest, "profile_prompts": _measured_on(read_json(path))}


def profile_notes(report: Mapping[str, Any]) -> list[str]:
    """A note if the profile was measured on prompts of this run: its algorithms then look too good.

    Args:
        report: The report, with the keys of `describe_profile` and the run's arguments.
    """
    profiled, decoded = report["profile_prompts"], report["arguments"]
    # Compared by file name, as prompt ids are: the file may have moved since.
    if profiled is None or Path(profiled[_SET]).name != Path(decoded[_SET]).name:
        return []
    first = max(prompts[_SKIPPED] for prompts in (profiled, decoded))
    shared = min(prompts[_SKIPPED] + prompts[_COUNT] for prompts in (profiled, decoded)) - first
    if shared <= 0:
        return []
    return [
        f"The profile was measured on {profiled[_COUNT]} prompts of {profiled[_SET]}; "
        f"this run decodes {shared} of them. Algorithms that read the profile look better on these than on "
        "other prompts. Use --skip-prompts, here or in `bench profile`, to keep the prompts apart."
    ]


def _measured_on(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The prompt settings of the run that wrote a profile; None if the profile does not have them."""
    meta = raw.get("meta")
    given = meta.get("arguments") if isinstance(meta, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    found = {_SET: given.get(_SET), _SKIPPED: given.get(_SKIPPED, 0), _COUNT: given.get(_COUNT)}
    kinds = {_SET: str, _SKIPPED: int, _COUNT: int}
    return found if all(isinstance(found[key], kind) for key, kind in kinds.items()) else None
