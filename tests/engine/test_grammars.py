"""Grammars that a process follows by what another one decides."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams, StructuredOutputsParams
from jetspec_jax.engine.grammars import WorkerMatchers, matcher_for
from jetspec_jax.engine.records import Admission, Batch
from tests.engine.processes_worker import of_forms

PARAMS = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(ab|cd)+!"))


@pytest.fixture(scope="module")
def target():
    (target, _), _, _ = of_forms()
    return target


def batch(*, releases=(), admissions=(), masked=()):
    return Batch(releases, admissions, (), (), (0, 2), 1, 4, masked=masked)


def admission(target, slot, params, output=()):
    nothing, ends = np.zeros(1, np.int32), tuple(target.eos_token_ids)
    return Admission(slot, nothing, 0, 0, True, params, 9, ends, 1, 0, output=output)


def test_what_is_committed_is_taken_once(target):
    """Also of a request that goes on, and where rounds have been taken while they ran."""
    a, b, c, d = target.tokenizer.convert_tokens_to_ids(list("abcd"))
    followed, alone = WorkerMatchers(target), matcher_for(target, PARAMS, target.eos_token_ids)
    alone.advance([a, b, c])
    admitted = (admission(target, 0, SamplingParams()), admission(target, 2, PARAMS, (a, b, c)))
    first = batch(admissions=admitted, masked=(2,))
    matchers = followed.begin(first)
    assert matchers.keys() == {2}
    # The rounds run: all but the last are committed meanwhile.
    matchers[2].advance([d, a])
    followed.end(first, np.array([[[7, -1], [d, a]], [[7, 7], [b, -1]], [[7, 7], [-1, -1]]]))
    alone.advance([d, a, b])
    tree = np.array([b, c]), np.array([-1, 0])
    [again] = followed.begin(batch(masked=(2,))).values()
    assert again.count == alone.count == 6
    np.testing.assert_array_equal(again.masks_of_tree(*tree, 2), alone.masks_of_tree(*tree, 2))
    assert followed.begin(batch(releases=(2,))) == {}
    assert followed.begin(batch(admissions=(admission(target, 2, PARAMS),), masked=(2,)))[2].count == 0
