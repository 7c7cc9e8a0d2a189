import json
import math
import os

import numpy as np
import orbax.checkpoint as ocp
import pytest

from convert import orbax_io
from convert.conversion import to_huggingface, to_orbax
from convert.orbax_io import read_orbax
from jetspec_jax.checkpoint.content import CheckpointError
from jetspec_jax.checkpoint.orbax_arrays import stored_arrays
from tests.convert.checkpoints import (
    DRAFT,
    make,
    of_any_bits,
    random_bits,
    random_values,
    read_raw,
    shapes_of,
)


@pytest.fixture
def orbax(tmp_path):
    make(tmp_path / "source", DRAFT, random_values(shapes_of(DRAFT)))
    to_orbax(tmp_path / "source", tmp_path / "orbax")
    return tmp_path / "orbax"


def edit_manifest(folder, **changes):
    path = folder / "orbax.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestStorage:
    def test_chunks(self, tmp_path, monkeypatch):
        monkeypatch.setattr(orbax_io, "CHUNK_BYTES", 300)
        source = make(tmp_path / "source", DRAFT, random_bits(shapes_of(DRAFT), "float32"))
        to_orbax(of_any_bits(source), tmp_path / "orbax")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(tmp_path / "orbax" / "weights")
        stored = stored_arrays(metadata)
        assert all(math.prod(leaf.storage.chunk_shape) * 4 <= 300 for leaf in stored.values())
        assert stored["fc"].storage.chunk_shape != stored["fc"].shape
        to_huggingface(of_any_bits(tmp_path / "orbax"), tmp_path / "back")
        assert read_raw(tmp_path / "back") == read_raw(tmp_path / "source")

    def test_manifest(self, orbax):
        manifest = json.loads((orbax / "orbax.json").read_text())
        assert manifest["version"] == 1
        assert manifest["kind"] == "draft head"

    def test_plain_orbax_reads_it(self, orbax):
        """The storage is Orbax's own: nothing of this package is needed to restore it."""
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(orbax / "weights")
        assert np.array_equal(restored["fc"], read_orbax(orbax)["fc"])


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"version": 2, "jetspec_jax": "9.9"}, "version 2 of the format, written by jetspec_jax 9.9"),
            ({"version": None}, "version None"),
            ({"format": "something"}, "the format is 'something'"),
            ({"kind": "target"}, "says that this is a target, config.json that it is a draft head"),
        ],
    )
    def test_another_manifest(self, tmp_path, orbax, changes, complaint):
        edit_manifest(orbax, **changes)
        for convert in (lambda: read_orbax(orbax), lambda: to_huggingface(orbax, tmp_path / "back")):
            with pytest.raises(ValueError, match=complaint):
                convert()
        assert not (tmp_path / "back").exists()

    def test_weights_of_another_config(self, tmp_path, orbax):
        raw = {**DRAFT, "num_hidden_layers": 2, "intermediate_size": 8}
        (orbax / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match="does not hold the parameters of its config") as info:
            to_huggingface(orbax, tmp_path / "back")
        message = str(info.value)
        assert "missing: layers.1.self_attn.qkv_proj" in message
        assert "misshapen: layers.0.mlp.down_proj is [20, 12], expected [8, 12]" in message
        assert len(message.splitlines()) == 1 + 8 + 2
        assert not (tmp_path / "back").exists()

    def test_surplus_weights(self, tmp_path):
        raw = {**DRAFT, "num_hidden_layers": 2}
        make(tmp_path / "source", raw, random_values(shapes_of(raw)))
        to_orbax(tmp_path / "source", tmp_path / "orbax")
        (tmp_path / "orbax" / "config.json").write_text(json.dumps(DRAFT))
        with pytest.raises(ValueError, match=r"surplus: layers\.1\.input_layernorm\.weight"):
            read_orbax(tmp_path / "orbax")

    def test_weights_that_are_not_there(self, orbax):
        (orbax / "weights").rename(orbax / "elsewhere")
        with pytest.raises(ValueError, match="has no weights/"):
            read_orbax(orbax)

    @pytest.mark.parametrize("pattern", ["d/*", "_METADATA", "manifest.ocdbt"])
    def test_files_that_are_not_there(self, tmp_path, orbax, pattern):
        for path in (orbax / "weights").rglob(pattern):
            path.unlink()
        with pytest.raises(ValueError, match="weights cannot be read: "):
            to_huggingface(orbax, tmp_path / "back")
        assert not (tmp_path / "back").exists()

    @pytest.mark.parametrize(
        "name", ["config.json", "orbax.json", "tokenizer.json", "weights/_METADATA", "weights/manifest.ocdbt"]
    )
    def test_files_that_are_too_large(self, tmp_path, orbax, name):
        with (orbax / name).open("ab") as file:
            file.truncate(2**30)
        with pytest.raises(CheckpointError, match=rf"{name} has [0-9,]+ bytes; it may have "):
            to_huggingface(orbax, tmp_path / "back")

    def test_a_pipe_in_place_of_a_file(self, tmp_path, orbax):
        data = next((orbax / "weights").rglob("d/*"))
        data.unlink()
        os.mkfifo(data)
        with pytest.raises(CheckpointError, match=f"{data} is no regular file"):
            to_huggingface(orbax, tmp_path / "back")

    def test_a_hugging_face_folder(self, tmp_path, orbax):
        with pytest.raises(ValueError, match="is a Hugging Face folder; an Orbax folder holds"):
            read_orbax(tmp_path / "source")
        with pytest.raises(ValueError, match="is a Hugging Face folder, not an Orbax folder"):
            to_huggingface(tmp_path / "source", tmp_path / "back")
        with pytest.raises(ValueError, match="is an Orbax folder, not a Hugging Face folder"):
            to_orbax(orbax, tmp_path / "again")
