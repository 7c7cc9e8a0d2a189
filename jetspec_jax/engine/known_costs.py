"""Round costs measured by this process, and the file that keeps them for later processes."""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.round_costs import NO_COSTS, RoundCosts
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.version import __version__

#: The file's name and its most entries: the oldest entry is dropped first.
FILE, MOST_KEYS = "round_costs.json", 64

#: Everything that determines a round's cost: decoders in rising order, size, dtype of the weights.
CostKey = tuple[tuple[TreeDecoder, ...], EngineSize, jnp.dtype]

_known: dict[CostKey, RoundCosts] = {}
_path: Path | None = None


def keep_costs_in(folder: Path | None) -> None:
    """Keeps measured costs in a file in ``folder``, and reads those in it; None keeps no file."""
    global _path
    _path = None if folder is None else folder / FILE


def known_costs(key: CostKey) -> RoundCosts:
    """An engine's round costs, measured in this process or read from the file; `NO_COSTS` if unknown.

    They are those of all trees, for some numbers of live slots.
    """
    if key not in _known and (path := _path_for(key)) is not None:
        decoders, size, _ = key
        shapes = size.rounds(tuple(decoder.bucket for decoder in decoders))
        costs = _costs_of(_read(path).get(_name(key)))
        lives = {live for live, _ in costs.seconds}
        if lives and set(costs.seconds) == {shape for shape in shapes if shape[0] in lives}:
            _known[key] = costs
    return _known.get(key, NO_COSTS)


def learn_costs(key: CostKey, costs: RoundCosts) -> None:
    """Keeps measured costs, in the file too if there is one."""
    _known[key] = costs
    if (path := _path_for(key)) is not None:
        _write(path, _name(key), costs)


def _path_for(key: CostKey) -> Path | None:
    """The file; None for an engine of several processes, which must choose alike."""
    return None if spans(key[0][-1].mesh) else _path


def _read(path: Path) -> dict[str, Any]:
    """Entries of the file by `_name`; empty if the file is missing, unreadable or not a JSON object."""
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(path: Path, name: str, costs: RoundCosts) -> None:
    """Adds costs to the file; if it cannot be written, later processes measure again."""
    newest = dict(list(_read(path).items())[1 - MOST_KEYS :])
    try:
        write_json(path, newest | {name: _as_json(costs)})
    except OSError:
        return


def _name(key: CostKey) -> str:
    """A digest of models, trees, size, machine and versions; paths have no influence."""
    decoders, size, dtype = key
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = jax.devices()[0].device_kind, _processor(), cores, jax.__version__, __version__
    return hashlib.sha256(repr((decoders, size, dtype.name, machine)).encode()).hexdigest()[:32]


def _processor() -> str:
    """The processor's model name: JAX calls all of them "cpu"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _as_json(costs: RoundCosts) -> dict[str, Any]:
    rows = [[*pair, *costs.seconds[pair], costs.dispatches[pair]] for pair in sorted(costs.seconds)]
    return {"contexts": costs.contexts, "rounds": rows, "guessed": sorted(costs.guessed)}


def _costs_of(kept: Any) -> RoundCosts:
    """The inverse of `_as_json`; `NO_COSTS` for anything else."""
    try:
        low, high = map(int, kept["contexts"])
        rows = [((int(live), int(bucket)), *_seconds(times)) for live, bucket, *times in kept["rounds"]]
        seconds = {pair: (first, last) for pair, first, last, _ in rows}
        guessed = frozenset((int(live), int(bucket)) for live, bucket in kept["guessed"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return NO_COSTS
    if not 0 <= low < high or not guessed <= seconds.keys():
        return NO_COSTS
    return RoundCosts((low, high), seconds, {pair: beside for pair, *_, beside in rows}, guessed)


def _seconds(values: Sequence[Any]) -> tuple[float, float, float]:
    """Seconds of a round at both contexts, and of a dispatch beside its rounds; ValueError if implausible."""
    first, last, beside = map(float, values)
    if not (0 < first < 1e6 and 0 < last < 1e6 and 0 <= beside < 1e6):
        raise ValueError("no measured seconds")
    return first, last, beside
