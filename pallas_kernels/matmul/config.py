"""Tile sizes, launch settings and where the kernel is taken: data, apart from what the operation means."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pallas_kernels.checks import check_config

# Programs that keep the largest GPUs busy: two for each of their processors, about.
_PROGRAMS = 264
_FEWEST_STEPS = 4  # of a program: shorter sums do not fill the pipeline


@dataclass(frozen=True, slots=True)
class Config:
    """How the Triton kernel cuts its work up. No setting changes a result by more than rounding.

    Attributes:
        block_rows: Rows of a program. From 64 on Hopper's tensor cores read weights from shared memory, below
            from registers.
        block_columns: Columns of a program.
        block_depth: Terms of the sums that are loaded in one step; fewer where a scale holds for fewer.
        splits: Programs that share the terms of a sum; a second step adds their parts, always in one order.
        num_warps: Warps of a program.
        num_stages: Steps of tiles on their way at once.
    """

    block_rows: int
    block_columns: int
    block_depth: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        powers = {"block_rows": 16, "block_columns": 16, "block_depth": 32, "num_warps": 1}
        check_config(self, powers=powers, counts=("splits", "num_stages"))


@dataclass(frozen=True, slots=True)
class MosaicConfig:
    """How the Mosaic kernel cuts its work up; see `Config`.

    Attributes:
        groups: Warpgroups of a program that multiply, 64 columns each.
        splits: Shares of each sum; see `Config`.
    """

    groups: int
    splits: int

    def __post_init__(self) -> None:
        check_config(self, powers={}, counts=("splits",))
        if self.groups not in (2, 3):
            raise ValueError(f"MosaicConfig: groups must be 2 or 3, not {self.groups}")


#: The class of an implementation's configurations.
CONFIGS = {"pallas_mosaic": MosaicConfig, "pallas_triton": Config}


def config_for(
    implementation: str, device_kind: str, stored: str, rows: int, depth: int, columns: int
) -> Any:
    """The tuned configuration of an implementation; None where it is not the fastest, or nobody tuned."""
    entry = _entry(device_kind, stored, rows, depth, columns)
    if entry is None or entry["implementation"] != implementation:
        return None
    return CONFIGS[implementation](**entry["config"])


def fastest(device_kind: str, stored: str, rows: int, depth: int, columns: int) -> str | None:
    """The implementation that was measured to be the fastest at such a call; None if not measured."""
    entry = _entry(device_kind, stored, rows, depth, columns)
    if entry is None:
        return None
    return entry["implementation"] if entry["micros"] < entry["xla_micros"] else "xla"


def default_config(stored: str, rows: int, depth: int, columns: int) -> Config:
    """A configuration that fits every GPU since Ampere: its tiles take at most about 80 KB."""
    block_rows = min(128, max(16, 1 << (rows - 1).bit_length()))
    if stored == "fp8":
        block_rows = min(64, block_rows)
        # A warp has at least eight words of columns.
        block_columns, block_depth, warps = 128, 128 if block_rows < 64 else 64, 4
    else:
        block_columns, block_depth = 64, 64 if stored == "plain" else 128
        warps = 8 if block_rows >= 64 else 4
    programs = -(-columns // block_columns) * -(-rows // block_rows)
    steps = -(-depth // block_depth)
    splits = max(1, min(_PROGRAMS // programs, steps // _FEWEST_STEPS))
    stages = 3 if block_rows == 128 else 4
    return Config(block_rows, block_columns, block_depth, splits, warps, stages)


@functools.cache
def tuned() -> dict[str, Sequence[dict[str, Any]]]:
    """What ``python -m bench kernel --operation matmul --tune`` found, by device kind.

    Of a product the entry of the fewest rows comes first.
    """
    return json.loads(resources.files("pallas_kernels.matmul").joinpath("tuned.json").read_text())


def _entry(device_kind: str, stored: str, rows: int, depth: int, columns: int) -> dict[str, Any] | None:
    """The entry of the fewest rows that are at least as many."""
    for entry in tuned().get(device_kind, ()):
        same = (entry["stored"], entry["depth"], entry["columns"]) == (stored, depth, columns)
        if same and rows <= entry["rows"]:
            return entry
    return None
