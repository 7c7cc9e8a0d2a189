"""Writes the goldens of tests/families: ``python -m tests.parity.make_goldens [FAMILY ...]``.

A golden is a checkpoint as transformers saves it, its float32 logits of some sequences, and of recurrent
families those of a long one in float64.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from tests.families.goldens import FOLDER, IDS, LONG_IDS, LONG_PLACES, store_long_in_float64
from tests.parity.families import FAMILIES


@torch.no_grad()
def logits_of(model, ids):
    """float32 logits of whole sequences, without a cache."""
    return model(torch.from_numpy(ids.astype(np.int64)), use_cache=False).logits.float().numpy()


def make(name):
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model = FAMILIES[name].build()
    logits = logits_of(model, IDS)
    # As published: decay rates are the one parameter that is not rounded.
    rates = {own: value.clone() for own, value in model.named_parameters() if own.endswith("A_log")}
    long_logits = logits_of(model, LONG_IDS)[LONG_PLACES] if rates else None
    model.to(torch.bfloat16)
    for own, value in rates.items():
        model.get_parameter(own).data = value
    model.save_pretrained(folder)
    np.save(folder / "logits.npy", logits)
    if long_logits is not None:
        np.save(folder / "long_logits.npy", long_logits)
        store_long_in_float64(name)


if __name__ == "__main__":
    for name in sys.argv[1:] or [name for name, family in FAMILIES.items() if family.golden]:
        make(name)
        print(FOLDER / name, sum(path.stat().st_size for path in Path(FOLDER / name).iterdir()), "bytes")
