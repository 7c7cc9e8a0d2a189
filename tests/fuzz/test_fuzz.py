"""The fuzzer's cases, a few of them; `make fuzz` runs more."""

import numpy as np
import pytest

from jetspec_jax import CheckpointError
from tests.fuzz.checkpoints import Checkpoints
from tests.fuzz.mutators import mutate
from tests.fuzz.outcomes import Finding, ending
from tests.fuzz.requests import Requests
from tests.loading.published import V4, random_tensors, target_shapes, write

pytestmark = pytest.mark.usefixtures("no_type_checks")


def test_checkpoints(tmp_path):
    cases = Checkpoints(tmp_path, seed=0, families=())
    ended = {cases(index)[1] for index in range(60)}
    assert "CheckpointError" in ended
    assert any(outcome.startswith(("loaded", "decoded", "converted")) for outcome in ended)


def test_requests(tmp_path):
    cases = Requests(tmp_path, seed=0)
    ended = {cases(index)[1] for index in range(40)}
    assert ended >= {"correct", "ValueError"}


def test_cases_are_the_same_again(tmp_path):
    for name in "one", "two":
        write(tmp_path / name, V4, random_tensors(target_shapes(V4)))
    for index in range(40):
        first, second = (mutate(tmp_path / name, np.random.default_rng(index)) for name in ("one", "two"))
        assert first == second


def test_what_counts_as_a_finding(tmp_path):
    assert ending(CheckpointError(f"{tmp_path}: wrong"), (ValueError,), tmp_path) == "CheckpointError"
    for error, message in (
        (KeyError("x"), "KeyError"),
        (CheckpointError("no file at all"), "names no file"),
        (ValueError(""), "0 characters"),
    ):
        with pytest.raises(Finding, match=message):
            ending(error, (ValueError,), tmp_path)
