"""A small target of random weights, as tensors and as a checkpoint."""

import pytest

from tests.loading.published import V4, random_tensors, target_shapes, write


@pytest.fixture
def tensors():
    return random_tensors(target_shapes(V4))


@pytest.fixture
def folder(tmp_path, tensors):
    return write(tmp_path / "target", V4, tensors)
