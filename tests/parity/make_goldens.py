"""Writes the goldens of tests/families: ``python -m tests.parity.make_goldens [FAMILY ...]``.

A golden is a checkpoint as transformers saves it, and its float32 logits of some sequences.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from tests.families.goldens import FOLDER, IDS
from tests.parity.families import FAMILIES


@torch.no_grad()
def logits_of(model):
    """float32 logits of the goldens' sequences, whole and without a cache."""
    return model(torch.from_numpy(IDS.astype(np.int64)), use_cache=False).logits.float().numpy()


def make(name):
    """Makes one family's golden anew."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model = FAMILIES[name].build()
    logits = logits_of(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    np.save(folder / "logits.npy", logits)


if __name__ == "__main__":
    for name in sys.argv[1:] or [name for name, family in FAMILIES.items() if family.golden]:
        make(name)
        print(FOLDER / name, sum(path.stat().st_size for path in Path(FOLDER / name).iterdir()), "bytes")
