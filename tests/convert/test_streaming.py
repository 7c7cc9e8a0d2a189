"""Conversions hold a parameter at a time, so that a target may be larger than the memory."""

import tracemalloc
import weakref

import numpy as np
import pytest

from convert.conversion import to_huggingface, to_orbax
from convert.verification import verify
from jetspec_jax.checkpoint.orbax import OrbaxParameters
from jetspec_jax.checkpoint.reading import StoredParameters
from tests.convert.checkpoints import UNTIED, make, random_values, shapes_of

# Eight layers of the same size, and two small ends.
SIZES = {"num_hidden_layers": 8, "max_window_layers": 8, "hidden_size": 128, "intermediate_size": 1024}
DEEP = {**UNTIED, **SIZES}
LAYER = 4 * 3 * 128 * 1024
SHARD = 2 * LAYER


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("deep")
    make(place / "source", DEEP, random_values(shapes_of(DEEP)))
    to_orbax(place / "source", place / "orbax")
    return place


@pytest.fixture
def read(monkeypatch):
    """Counts parameters: those read, and the most bytes of them that were there at one time."""
    counts = {"parameters": 0, "alive": 0, "most": 0}

    def spy(of):
        real = of.read

        def counting(self, parameter, *arguments):
            value = real(self, parameter, *arguments)
            counts["parameters"] += 1
            counts["alive"] += value.nbytes
            counts["most"] = max(counts["most"], counts["alive"])
            # What is made of the memory lives as long as the memory does.
            owner = value if value.base is None else value.base
            weakref.finalize(owner if isinstance(owner, np.ndarray) else value, gone, value.nbytes)
            return value

        monkeypatch.setattr(of, "read", counting)

    def gone(nbytes):
        counts["alive"] -= nbytes

    for of in (StoredParameters, OrbaxParameters):
        spy(of)
    return counts


def traced(function, *arguments, **settings):
    """The peak of Python's and NumPy's memory in a call, and what it returned."""
    tracemalloc.start()
    try:
        result = function(*arguments, **settings)
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@pytest.mark.wide
def test_to_orbax(tmp_path, folders, read):
    peak, done = traced(to_orbax, folders / "source", tmp_path / "orbax")
    assert read["parameters"] == done.parameters
    assert read["most"] < LAYER
    assert peak < 2 * LAYER
    assert done.nbytes > 8 * LAYER


def test_to_huggingface(tmp_path, folders, read):
    peak, done = traced(to_huggingface, folders / "orbax", tmp_path / "back", max_shard_bytes=SHARD)
    assert read["parameters"] == done.parameters  # each once
    # The tensors of a file, the bytes that the library makes of them, and a parameter.
    assert peak < 2 * SHARD + LAYER
    sizes = [path.stat().st_size for path in (tmp_path / "back").glob("*.safetensors")]
    assert len(sizes) >= 4
    assert max(sizes) < 1.1 * SHARD


@pytest.mark.wide
def test_verification(folders, read):
    found = verify(folders / "source", folders / "orbax")
    assert found.ok
    # Twice of either folder: for the bits, and for the outputs.
    assert read["parameters"] == 4 * found.parameters
    # Layers that run, and both ends.
    assert read["most"] <= 3 * LAYER
