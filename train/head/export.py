"""Writes a draft head's folder for an engine: from a training run, or from another folder."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from convert.folders import locate
from jetspec_jax.checkpoint.files import refuse_existing
from jetspec_jax.checkpoint.pairs import draft_head_at
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import (
    DraftHeadConfig,
    DraftScales,
    check_head_fits,
    parse_draft_head_config,
    read_json,
)
from jetspec_jax.models import Weights, abstract, weights_of
from train.head.config import with_selector
from train.head.engines import UNNAMED, Verifier, engine_json
from train.loop.checkpoints import Checkpoints
from train.loop.mesh import one_device, replicated

#: The folder of the run, in the folder of ``finetune``.
HEAD_FOLDER = "head"


def export_head(
    head: str | Path,
    out: Path,
    engine: str,
    *,
    target: str | None = None,
    without_selector: bool = False,
    draft_scales: DraftScales | None = None,
    ignore_config_keys: Collection[str] = (),
) -> None:
    """Writes a copy of a draft head for an engine; each parameter keeps its dtype and bits.

    Args:
        head: A folder in any supported layout, a hub id, or the name of a pair.
        out: The folder to write; it must not exist.
        engine: One of `ENGINES`.
        target: The head's target: the source of its name in configs that have it, and of its number of layers
            if the head's config lacks it.
        without_selector: Whether to drop the head's selector, which it must have.
        draft_scales: Scales of the head's errors, in place of those in its config; None changes none.
        ignore_config_keys: Unknown keys of either ``config.json`` to ignore.

    Raises:
        FileExistsError: ``out`` exists.
        FileNotFoundError: The head or the target cannot be found or fetched.
        ValueError: The source is not a draft head or does not fit the target, the engine does not support it,
            or there is no selector to drop.
    """
    refuse_existing(out)
    found = locate(draft_head_at(head), ignore_config_keys=ignore_config_keys)
    if not isinstance(found.config, DraftHeadConfig):
        raise ValueError(f"{found.folder} is a target, not a draft head")
    raw, config = found.raw, found.config
    if without_selector:
        raw, config = _without_selector(str(head), raw, config)
    raw = _config_for(engine, raw, config, target, ignore_config_keys)
    if draft_scales is not None:
        rows = [list(row) if isinstance(row, tuple) else row for row in draft_scales]
        raw["dflash_config"]["draft_scales"] = rows
    _save(out, raw, nnx.traversals.unflatten_mapping(found.opened()), None, ignore_config_keys)


def export_best(
    work: Path,
    out: Path,
    engine: str = "jetspec",
    *,
    target: str | None = None,
    without_selector: bool = False,
    ignore_config_keys: Collection[str] = (),
) -> int:
    """Writes the best head so far of a run, finished or not, and returns its step.

    Args:
        work: The run's folder, or that of ``finetune`` around it. Other arguments are as for `export_head`.
        ignore_config_keys: The same as those of the run.

    Raises:
        FileNotFoundError: The folder holds no run, or nothing was evaluated yet.
        ValueError: There are two runs. Other errors are as for `export_head`.
    """
    refuse_existing(out)
    work = _run_in(work)
    recipe = read_json(work / "recipe.json")
    raw, stored = recipe["begins_as"], recipe.get("stored", "bfloat16")
    config = parse_draft_head_config(raw, ignore_config_keys=ignore_config_keys)
    config = replace(config, num_target_layers=len(recipe["target"]["layers"]))
    written = config
    if without_selector:
        raw, written = _without_selector(str(work), raw, config)
    raw = _config_for(engine, raw, written, target, ignore_config_keys)
    sharding = replicated(one_device())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=sharding),
        weights_of(abstract(config)),
    )
    with Checkpoints(work, read_only=True) as checkpoints:
        found = checkpoints.restore_best(shapes)
        if found is None:
            raise FileNotFoundError(f"no weights in {work} have been evaluated yet")
        best, weights = found
        _save(out, raw, weights, stored, ignore_config_keys)
    return best.step


def _run_in(work: Path) -> Path:
    """The folder of a run: ``work``, or the folder in it where ``finetune`` trains."""
    runs = [folder for folder in (work, work / HEAD_FOLDER) if (folder / "recipe.json").exists()]
    if not runs:
        raise FileNotFoundError(
            f"neither {work} nor {work / HEAD_FOLDER} holds a recipe.json, so no training run began there"
        )
    if len(runs) > 1:
        raise ValueError(
            f"{work} and {work / HEAD_FOLDER} both hold a run: move one of them to a separate folder"
        )
    return runs[0]


def _without_selector(
    name: str, raw: Mapping[str, Any], config: DraftHeadConfig
) -> tuple[dict[str, Any], DraftHeadConfig]:
    """A head's ``config.json`` and config without its selector."""
    if config.selector is None:
        raise ValueError(f"{name} has no selector, so there is none to leave out")
    return with_selector(raw, None), replace(config, selector=None)


def _config_for(
    engine: str,
    raw: Mapping[str, Any],
    config: DraftHeadConfig,
    target: str | None,
    ignore_config_keys: Collection[str],
) -> dict[str, Any]:
    """The engine's ``config.json``, with the target's name and number of layers."""
    verifier = UNNAMED
    if target is not None:
        source = Source(target, ignore_config_keys=ignore_config_keys)
        check_head_fits(config, source.target_config)
        config = replace(config, num_target_layers=source.target_config.num_layers)
        verifier = Verifier(target, tuple(source.raw_config.get("architectures") or ()))
    return engine_json(engine, raw, config, verifier)


def _save(
    out: Path,
    raw: Mapping[str, Any],
    weights: Weights,
    dtype: str | None,
    ignore_config_keys: Collection[str],
) -> None:
    config = parse_draft_head_config(raw, ignore_config_keys=ignore_config_keys)
    if config.selector is None:
        weights = {name: value for name, value in weights.items() if name != "selector"}
    save_checkpoint(out, raw, weights, dtype=dtype, config=config)
