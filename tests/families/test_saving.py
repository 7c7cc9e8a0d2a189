import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jetspec_jax.checkpoint.reading import read_headers, read_weights
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_model_config
from tests.families.goldens import FOLDER


@pytest.mark.wide
def test_what_is_written_is_what_was_read(family, tmp_path):
    """The text model's tensors as transformers lays them out, bit for bit; what is left unread is gone."""
    golden = FOLDER / family
    raw = json.loads((golden / "config.json").read_text())
    config = parse_model_config(raw)
    save_checkpoint(tmp_path / "ours", raw, read_weights(golden, config), dtype=None)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (golden, tmp_path / "ours"))
    for names in read_headers(golden).plan(config).unused.values():
        for name in names:
            del theirs[name]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
