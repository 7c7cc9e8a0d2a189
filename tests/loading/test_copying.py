"""Parameters by several threads: the same bits, and the same errors."""

import json
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jetspec_jax.checkpoint import reading
from jetspec_jax.checkpoint.copying import Copies, all_finite
from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.checkpoint.tensor_file import TensorFile
from jetspec_jax.config import parse_config
from tests.families.goldens import FOLDER, NAMES
from tests.loading.published import V4, random_tensors, target_shapes, write
from tests.meshes import mesh_of


@pytest.fixture
def always_threads(monkeypatch):
    monkeypatch.setattr(reading, "SMALL", 0)


@pytest.mark.parametrize("family", NAMES)
def test_every_family(family, request):
    config = parse_config(json.loads((FOLDER / family / "config.json").read_text()))
    alone = read_weights(FOLDER / family, config)
    request.getfixturevalue("always_threads")
    together = read_weights(FOLDER / family, config)
    for own, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        assert np.asarray(own).tobytes() == np.asarray(other).tobytes()


@pytest.mark.usefixtures("always_threads")
@pytest.mark.parametrize("mesh", [None, (1, 2)])
def test_what_is_not_finite_is_named(tmp_path, mesh):
    tensors = random_tensors(target_shapes(V4))
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][-1, -1] = np.inf
    folder = write(tmp_path / "it", V4, tensors)
    with pytest.raises(ValueError, match=f"{name} holds values that are not finite$"):
        read_weights(folder, parse_config(V4), None, None if mesh is None else mesh_of(*mesh))
    tensors[name][-1, -1] = 1e5  # overflows in a thread, and nobody is warned there
    folder = write(tmp_path / "large", V4, tensors)
    with pytest.raises(ValueError, match=f"{name} holds values that are not finite in float16"):
        read_weights(folder, parse_config(V4), np.dtype(np.float16))


def test_a_copy_that_fails():
    with ThreadPoolExecutor(2) as threads:
        done, first, second = set(), Copies(threads), Copies(threads)

        def fails(tile):
            if tile == 70:
                raise ValueError("70 is wrong")

        first.begin(fails, range(100))
        second.begin(done.add, range(100))
        second.end()
        assert done == set(range(100))
        with pytest.raises(ValueError, match="70 is wrong"):
            first.end()
    with pytest.raises(ValueError, match="70 is wrong"):
        Copies(None).begin(fails, range(100))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_one_value_that_is_not_finite(dtype):
    values = np.ones((5, 7, 11), dtype)
    with ThreadPoolExecutor(2) as threads:
        assert all_finite(values, threads)
        for place in range(values.size):
            values.reshape(-1)[place] = np.nan
            assert not all_finite(values, threads)
            values.reshape(-1)[place] = 1


def test_tensors_lie_where_the_library_finds_them(tmp_path):
    """Of all types that are read, also after an odd number of bytes, and empty ones."""
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.integers(0, 255, (3, 5), np.uint8),
        "b": rng.normal(size=(2, 3)).astype(ml_dtypes.bfloat16),
        "c": rng.normal(size=(4,)).astype(np.float32),
        "d": np.zeros((0, 3), np.float16),
        "ü": np.array(1.5, np.float16),
    }
    folder = write(tmp_path / "it", {}, tensors)
    [path] = folder.glob("*.safetensors")
    file, theirs = TensorFile.open(path), load_file(path)
    assert file.stored.keys() == theirs.keys() == tensors.keys()
    for name, tensor in theirs.items():
        own = file.tensor(name)
        assert (own.shape, own.dtype) == (tensor.shape, tensor.dtype)
        assert own.tobytes() == tensor.tobytes()
        assert not own.flags.writeable
