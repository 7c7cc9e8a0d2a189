"""Records that process 0 broadcasts."""

import json

import numpy as np
import pytest

from jetspec_jax import Completion, SamplingParams
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.broadcast import pack, result_of, unpack
from jetspec_jax.engine.extras import Extras
from jetspec_jax.engine.logprobs import Logprob
from jetspec_jax.engine.programs import Kind, Program
from jetspec_jax.engine.records import Adjusting, Admission, Batch, Chunk, Growth


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
    sent = batch, Extras(True, (2, 3)), [Program("rounds", 1, 16)], "text", None
    back = unpack(json.loads(json.dumps(pack(sent))))
    assert repr(back) == repr(sent)
    admission = back[0].admissions[0]
    assert admission.params == params
    assert admission.pages.dtype == np.int32
    np.testing.assert_array_equal(back[0].chunks[0].tokens, tokens)


def test_a_completion_comes_back_as_it_was():
    logprobs = [{3: Logprob(-0.5, 1, "a"), 7: Logprob(float("-inf"), 2)}]
    sent = [Completion("a", [3], "stop", [1], [16], [1, 2], logprobs=logprobs, stop_reason="b")]
    assert unpack(json.loads(json.dumps(pack(sent)))) == sent


def test_an_error_keeps_its_type():
    with pytest.raises(DeviceMemoryError, match=r"^too little$"):
        result_of(None, "DeviceMemoryError", "too little")
    with pytest.raises(RuntimeError, match="process 0 raised ZeroDivisionError: a mistake"):
        result_of(None, "ZeroDivisionError", "a mistake")
    assert result_of([1], "", "") == [1]


def test_nothing_else_is_told():
    with pytest.raises(TypeError, match="object cannot be broadcast between processes"):
        pack([object()])
