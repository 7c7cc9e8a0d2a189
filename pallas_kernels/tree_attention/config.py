"""Tile sizes and launch settings of the Triton kernel: data, apart from what the operation means."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pallas_kernels.checks import check_config


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernel cuts its work up. No setting changes a result by more than rounding.

    Attributes:
        block_rows: query rows of a program: block rows times the query heads that share a key/value head.
        block_keys: keys that a program looks at in one step, which never leaves a page.
        num_warps: warps of a program.
        num_stages: depth of the loop's pipeline. The number of a page is itself loaded, so that 3 stages have
            one step of keys and values on its way while another is computed, and 5 have two.
        programs: programs to aim at. Where the rows make fewer, several programs share the keys of one
            row block, and a second kernel merges their parts.
    """

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int
    programs: int

    def __post_init__(self) -> None:
        powers = {"block_rows": 16, "block_keys": 16, "num_warps": 1}
        check_config(self, powers=powers, counts=("num_stages", "programs"))


def config_for(device_kind: str, dtype: str, head_size: int, rows: int) -> Config:
    """The tuned configuration for so many query rows of a key/value head, or a safe one."""
    dtype = "float32" if dtype == "float32" else "bfloat16"
    entries = [
        entry
        for entry in tuned().get(device_kind, [])
        if entry["dtype"] == dtype and entry["head_size"] == head_size
    ]
    if entries:
        entry = next((entry for entry in entries if rows <= entry["rows"]), entries[-1])
        return Config(**entry["config"])
    return default_config(dtype, head_size, rows)


def default_config(dtype: str, head_size: int, rows: int) -> Config:
    """A configuration that fits every GPU since Ampere: its tiles take at most about 64 KB."""
    wide = head_size * (4 if dtype == "float32" else 2) > 256
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 or wide else 64
    block_keys = 16 if head_size >= 512 else 32
    return Config(block_rows, block_keys, num_warps=4, num_stages=3, programs=128)


@functools.cache
def tuned() -> dict[str, Sequence[dict[str, Any]]]:
    """What `python -m bench kernel --tune` found, by device kind; the fewest rows first."""
    text = resources.files("pallas_kernels.tree_attention").joinpath("tuned.json").read_text()
    return json.loads(text)
