"""``python -m train calibrate``: fits a head's `draft_scales` to texts that its target writes.

The work folder holds ``texts/`` (what the target wrote at each temperature, with the seeds of its noise),
``calibration.json``, ``calibration.png`` and ``draft_head/``, a copy of the head with the scales. The same
command resumes.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jetspec_jax import Head, SamplingParams, Target
from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.checkpoint.loading import read_draft_head, read_target
from jetspec_jax.checkpoint.pairs import PAIR_NAMES, default_draft_head, draft_head_at
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.cli.options import add_ignore_option, add_target_option
from jetspec_jax.config import DraftScales
from jetspec_jax.progress import Progress
from train.data.prompts import read_entries
from train.data.rendering import Encoder
from train.head.calibration import (
    SCALES,
    Chosen,
    best_scales,
    chosen_along,
    curves_of,
    draw_calibration,
    error_of,
    fit_bands,
    log_likelihoods,
    table_of,
)
from train.head.export import export_head
from train.head.replay import Text, draft_along, write_texts
from train.loop.stages import Deadline, claim, fresh, run_stages

#: Candidates per draft row of a head without a selector.
CANDIDATES = 32


def add_command(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("calibrate", help="fit a head's draft_scales", description=__doc__)
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add_target_option(parser, f"folder or hub id, or a pair: {PAIR_NAMES}", required=True)
    add("--draft-head", help="folder, hub id or a pair's name (default: the head of the target's pair)")
    add("--prompts", required=True, help="JSONL file, folder of texts, or data set, as for the command data")
    add("--skip-prompts", type=int, default=0, metavar="N", help="skip the first N prompts (default: 0)")
    add("--num-prompts", type=int, default=64, help="number of prompts (default: 64)")
    add("--max-tokens", type=int, default=64, help="tokens per prompt and temperature (default: 64)")
    usual = [0.0, 0.6, 1.0]
    add("--temperatures", type=float, nargs="+", default=usual, metavar="T", help="(default: 0 0.6 1)")
    add("--candidates", type=int, help="per draft row (default: 32, or the selector's if those are more)")
    add("--batch", type=int, default=32, help="most prompts decoded at a time (default: 32)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16")
    add("--work", type=Path, required=True, help="folder for everything made")
    add("--minutes", type=float, help="stop cleanly after so many minutes; run again to resume")
    add_ignore_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    for name in ("num_prompts", "max_tokens", "batch", "candidates"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if arguments.skip_prompts < 0:
        raise ValueError(f"--skip-prompts must be at least 0, not {arguments.skip_prompts}")
    temperatures = sorted(set(arguments.temperatures))
    for temperature in temperatures:
        SamplingParams(temperature=temperature)
    chosen_head = arguments.draft_head or default_draft_head(arguments.target)
    if chosen_head is None:
        raise ValueError(f"--draft-head is missing: name the head of {arguments.target} to calibrate")
    work, ignored = arguments.work, arguments.ignore_config_key
    entries = read_entries(arguments.prompts, arguments.skip_prompts + arguments.num_prompts)
    entries = entries[arguments.skip_prompts :]
    if len(entries) < arguments.num_prompts:
        raise ValueError(f"{arguments.prompts} has {len(entries)} prompts after those skipped, too few")
    kept = ("prompts", "skip_prompts", "num_prompts", "max_tokens", "candidates", "dtype")
    settings = {name: getattr(arguments, name) for name in kept}
    claim(work, {**settings, "target": arguments.target, "draft_head": chosen_head, "t": temperatures})
    target = read_target(Source(arguments.target, arguments.dtype, ignored))
    head = read_draft_head(Source(draft_head_at(chosen_head), arguments.dtype, ignored), target)
    prompts = [Encoder(target.tokenizer).prompt(entry).tolist() for entry in entries]
    scales = calibrate(
        work,
        target,
        head,
        prompts,
        temperatures,
        max_tokens=arguments.max_tokens,
        batch=arguments.batch,
        candidates=arguments.candidates,
        deadline=Deadline(arguments.minutes),
    )
    folder = work / "draft_head"
    export_head(chosen_head, fresh(folder), "jetspec", draft_scales=scales, ignore_config_keys=ignored)
    print(f"draft_scales: {scales}")
    print(
        f"the head with them is in {folder}, what it says and what is observed in {work / 'calibration.png'}"
    )
    return 0


def calibrate(
    work: Path,
    target: Target,
    head: Head,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    *,
    max_tokens: int,
    batch: int,
    candidates: int | None = None,
    deadline: Deadline,
) -> DraftScales:
    """Fits a head's scales to texts that its target writes; returns them.

    Args:
        work: The folder of the texts, of ``calibration.json`` and of its picture; begun or new.
        temperatures: Temperatures at which the target answers each prompt.
        candidates: Candidates per draft row; None is 32, or the selector's number if that is more.
        deadline: Checked before each temperature.

    Raises:
        OutOfTime: The deadline passed; the same call resumes.
    """

    def write(temperature: float) -> None:
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
            for seed in range(len(prompts))
        ]
        texts = write_texts(target, head.config.depth, prompts, params, batch=batch)
        write_json(_file(work, temperature), [_as_json(text) for text in texts])

    stages = {f"texts at T = {t:g}": partial(write, t) for t in temperatures}
    count = candidates or max(head.config.selected or 0, CANDIDATES)
    stages["fit"] = partial(_fit, work, target, head, temperatures, min(count, head.config.layers.vocab_size))
    run_stages(work, stages, deadline)
    scales = json.loads((work / "calibration.json").read_text())["draft_scales"]
    return tuple(tuple(row) if isinstance(row, list) else row for row in scales)


def _fit(work: Path, target: Target, head: Head, temperatures: Sequence[float], count: int) -> None:
    """Fits the scales, and those of each temperature, and writes JSON and picture."""
    texts = {t: [_from_json(raw) for raw in json.loads(_file(work, t).read_text())] for t in temperatures}
    depth = head.config.depth
    before = head.config.draft_scales or (1.0,) * depth
    with Progress(total=(len(SCALES) + 2) * len(texts), desc="fit", unit="pass") as bar:

        def draft(scales: DraftScales) -> dict[float, Chosen]:
            found = {}
            for temperature, own in texts.items():
                found[temperature] = chosen_along(draft_along(target, head, own, count, scales=scales))
                bar.update()
            return found

        passes = [
            {t: log_likelihoods(chosen) for t, chosen in draft((scale,) * depth).items()} for scale in SCALES
        ]
        tables = {t: np.stack([of_scale[t][0] for of_scale in passes]) for t in texts}
        rows = {t: passes[0][t][1] for t in texts}
        scales = fit_bands(tables, rows)
        shown, errors = {}, {}
        for name, given in (("before", before), ("after", scales)):
            for temperature, chosen in draft(given).items():
                curves = curves_of(chosen)
                shown[f"T = {temperature:g}, {name}"] = curves
                errors[f"T = {temperature:g}, {name}"] = {
                    "error": error_of(curves),
                    "by_depth": table_of(curves),
                    "log_likelihood": float(np.sum(log_likelihoods(chosen)[0]) / rows[temperature].sum()),
                }
    report = {
        "draft_scales": scales,
        "by_temperature": {f"{t:g}": best_scales(tables[t], rows[t]) for t in texts},
        "rows": {f"{t:g}": rows[t].tolist() for t in texts},
        "calibration": errors,
    }
    draw_calibration(
        shown, work / "calibration.png", "Probabilities that a head says, and what its target chose"
    )
    write_json(work / "calibration.json", report)


def _file(work: Path, temperature: float) -> Path:
    return work / "texts" / f"{temperature:g}.json"


def _as_json(text: Text) -> dict[str, Any]:
    params = {name: getattr(text.params, name) for name in ("temperature", "seed", "max_tokens")}
    return {**text._asdict(), "params": params}


def _from_json(raw: dict[str, Any]) -> Text:
    return Text(**{**raw, "params": SamplingParams(**raw["params"])})
