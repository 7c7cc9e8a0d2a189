"""A recipe of tiny sizes, for the demo's target."""

import dataclasses

from train.head.recipe import HeadEvaluation, HeadRecipe, HeadSettings, SelectorSettings
from train.loop.fit import Fit
from train.loss.objectives import Objective
from train.pair.recipe import Calibration, Filters, Judgement, PairRecipe, Writing

_HEAD = HeadRecipe(
    Fit(steps=6, batch=4, learning_rate=1e-3, warmup=1, save_every=3, evaluate_every=6, log_every=1),
    window=32,
    head=HeadSettings(layers=1, block_size=4, taps=(1, 5)),
    objective=Objective(gamma=4.0, anchors=4, chunk=12),
    evaluation=HeadEvaluation(windows=4, prompts=0),
    packing=True,
    deterministic=True,
)
RECIPE = PairRecipe(
    head=_HEAD,
    selector=dataclasses.replace(
        _HEAD,
        head=HeadSettings(start="checkpoint"),
        selector=SelectorSettings(rank=4, candidates=4, table_rate=1.0),
    ),
    writing=(Writing("free", 24),),
    filters=Filters(max_tokens=16, least_words=1, least_kept=0.0),
    beginning_tokens=8,
    max_tokens=12,
    heldout=44,
    slots=8,
    shard_documents=32,
    calibration=Calibration(prompts=8, max_tokens=4, temperatures=(0.0,)),
    judgement=Judgement(prompts=32, max_tokens=3, temperatures=(1.0,), budgets=(4,)),
)


def changed(**changes):
    """The recipe with other settings."""
    return dataclasses.replace(RECIPE, **changes)
