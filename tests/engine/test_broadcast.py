"""Records that process 0 broadcasts."""

import json

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.engine.batch import Adjusting, Admission, Batch, Chunk, Growth, Kind, Program
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.engine.worker import pack, unpack


def test_all_comes_back_as_it_was():
    pages, tokens = np.array([3, -1], np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)
    params = SamplingParams(0.5, top_p=0.25, seed=2**63, logit_bias={3: -1.5}, allowed_token_ids=[1, 2])
    admission = Admission(
        1,
        pages,
        length=64,
        anchor=5,
        active=False,
        params=params,
        remaining=9,
        stop_ids=(1, 2),
        budget=16,
        depth=3,
        routing=(("task", "math"),),
        adjusting=Adjusting(tokens[0], (1,), (), ((4, 5), (6,))),
    )
    chunk = Chunk(np.array([0, 1], np.int32), tokens, np.array([3, 0], np.int32), np.array([True, False]))
    batch = Batch((0,), (admission,), (Growth(0, pages),), (chunk,), (0, 1), 16, 4, kind=Kind(adjusts=True))
    sent = batch, EngineSize(2, 128, 4), [Program("rounds", 1, 16)], "text", None
    back = unpack(json.loads(json.dumps(pack(sent))))
    assert repr(back) == repr(sent)
    admission = back[0].admissions[0]
    assert admission.params == params
    assert admission.pages.dtype == np.int32
    np.testing.assert_array_equal(back[0].chunks[0].tokens, tokens)


def test_nothing_else_is_told():
    with pytest.raises(TypeError, match="object cannot be broadcast between processes"):
        pack([object()])
