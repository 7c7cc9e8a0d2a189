"""Tables of measured acceptance, from which some algorithms derive their caps.

The JSON format; a table that no algorithm reads may be absent::

    {"version": 1,
     "depth_rank_accept": [[0.6, 0.2, ...], ...],
     "per_class_histograms": {"decisive_task": [[...], ...], "balanced_task": [3, 2, 1], ...},
     "meta": {...}}

``depth_rank_accept[d][r]`` is the probability that the target's choice at a node of depth d is the head's
token of rank r. A class's histogram is such a table, or a flat list of caps. Files of the reference
implementation, which have no version, are supported too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetspec_jax.tree.routing import check_classes

VERSION = 1
_KEYS = ("version", "depth_rank_accept", "per_class_histograms", "meta")

#: A table of rows per depth.
Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Profile:
    """A table of measured acceptance.

    Attributes:
        depth_rank_accept: Acceptance by depth and rank; empty if absent.
        class_caps: Pairs of a class and its caps by depth, for each class with a histogram.
        where: The profile's name in errors, such as its file.
    """

    depth_rank_accept: Table = ()
    class_caps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    where: str = field(default="the profile", compare=False)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "the profile") -> "Profile":
        """Reads a profile from parsed JSON.

        Raises:
            ValueError: The version, a key or a class is unknown, or a table is misshapen.
        """
        if not isinstance(raw, Mapping):
            keys = ", ".join(_KEYS)
            raise ValueError(f"{where} must be an object with some of {keys}, not {type(raw).__name__}")
        version = raw.get("version", VERSION)
        if isinstance(version, bool) or version != VERSION:
            raise ValueError(f"{where} is version {raw['version']!r}, and this reads version {VERSION}")
        if unknown := sorted(raw.keys() - set(_KEYS)):
            raise ValueError(f"unknown keys {unknown} in {where}; there are {', '.join(_KEYS)}")
        classes, of_class = raw.get("per_class_histograms", {}), f"{where}: per_class_histograms"
        if not isinstance(classes, Mapping):
            raise ValueError(f"{of_class} must be an object with a histogram for each class")
        check_classes(classes, f"per_class_histograms of {where}")
        return cls(
            _table(raw.get("depth_rank_accept", ()), f"{where}: depth_rank_accept"),
            tuple((name, _caps(histogram, f"{of_class}[{name!r}]")) for name, histogram in classes.items()),
            where,
        )

    def has(self, table: str) -> bool:
        """Whether a table, by its key in the JSON, is present and not empty."""
        return bool(
            {"depth_rank_accept": self.depth_rank_accept, "per_class_histograms": self.class_caps}[table]
        )


#: A profile without tables.
NO_PROFILE = Profile()


def _table(rows: Any, where: str) -> Table:
    if not _is_list(rows) or not all(map(_is_list, rows)):
        raise ValueError(f"{where} must be a list of rows, one for each depth, of shares in 0..1")
    for depth, row in enumerate(rows):
        if wrong := [f"rank {rank}: {share!r}" for rank, share in enumerate(row) if not _is_share(share)]:
            raise ValueError(f"{where}[{depth}] must hold shares in 0..1, not {', '.join(wrong[:3])}")
    return tuple(tuple(float(share) for share in row) for row in rows)


def _caps(histogram: Any, where: str) -> tuple[int, ...]:
    """A class's caps: the list itself, or for each row the number of ranks up to the last one accepted."""
    if _is_list(histogram) and histogram and all(_is_count(cap) for cap in histogram):
        return tuple(int(cap) for cap in histogram)
    if not _is_list(histogram) or not histogram or not all(map(_is_list, histogram)):
        raise ValueError(f"{where} must be a list of caps, or of rows of shares in 0..1")
    rows = _table(histogram, where)
    return tuple(max((rank + 1 for rank, share in enumerate(row) if share > 0), default=0) for row in rows)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
