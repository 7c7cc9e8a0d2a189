import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from convert.__main__ import main, parse_size
from tests.convert.checkpoints import DRAFT, UNTIED, files_of, make, random_values, read_raw, shapes_of

FULL_DISK = """
import json
import resource
import sys

import convert.__main__

# No file can grow beyond this, which a program meets as it meets a full disk: a write fails.
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(convert.__main__.main(sys.argv[2:]))
"""


@pytest.fixture
def source(tmp_path):
    return make(tmp_path / "source", DRAFT, random_values(shapes_of(DRAFT)))


def run(capsys, *arguments):
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


class TestErrors:
    def test_an_existing_destination(self, tmp_path, source, capsys):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes").write_text("keep")
        code, _, error = run(capsys, source, tmp_path / "mine")
        assert code == 2
        assert error.startswith("convert: ")
        assert "mine exists" in error
        assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]

    @pytest.mark.parametrize("place", ["nowhere", "/nowhere/at/all", "a b/c"])
    def test_an_unknown_source(self, tmp_path, capsys, place):
        code, _, error = run(capsys, place, tmp_path / "new")
        assert code == 2
        assert f"convert: {place} is neither a folder nor a hub id" in error

    def test_a_hub_that_cannot_be_reached(self, tmp_path, capsys, monkeypatch):
        def download(*args, **kwargs):
            raise TimeoutError

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        code, _, error = run(capsys, "owner/model", tmp_path / "new")
        assert code == 2
        assert "owner/model is no local folder" in error

    def test_a_hub_id(self, tmp_path, source, capsys, monkeypatch):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(source))
        assert run(capsys, "owner/model", tmp_path / "new")[0] == 0
        assert (tmp_path / "new" / "weights").is_dir()

    @pytest.mark.parametrize("files", [[], ["config.json"], ["orbax.json"], ["model.safetensors"]])
    def test_a_folder_that_is_neither(self, tmp_path, capsys, files):
        folder = tmp_path / "folder"
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
        code, _, error = run(capsys, folder, tmp_path / "new")
        assert code == 2
        assert (
            "a Hugging Face folder holds config.json and *.safetensors, an Orbax folder config.json" in error
        )
        assert f"this one holds {files[0] if files else 'nothing'}" in error

    def test_a_folder_that_is_both(self, tmp_path, source, capsys):
        (source / "orbax.json").write_text("{}")
        code, _, error = run(capsys, source, tmp_path / "new")
        assert code == 2
        assert "as Orbax folders do" in error
        assert "model.safetensors" in error

    def test_pickled_weights(self, tmp_path, source, capsys):
        (source / "model.safetensors").unlink()
        code, _, error = run(capsys, source, tmp_path / "new")
        assert code == 2
        assert "pickled weights" in error

    def test_weights_of_another_config(self, tmp_path, capsys):
        tensors = random_values(shapes_of(DRAFT))
        tensors["stranger"] = tensors.pop("fc.weight")
        source = make(tmp_path / "source", DRAFT, tensors)
        code, _, error = run(capsys, source, tmp_path / "new")
        assert code == 2
        assert "missing: fc.weight" in error
        assert "surplus: stranger" in error
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]

    def test_options_that_do_nothing(self, tmp_path, source, capsys):
        for options, complaint in (
            (["--target", source], "--target is used by --verify only"),
            (["--max-shard-size", "5GB"], "--max-shard-size is about safetensors"),
            (["--max-shard-size", "5 apples"], "a size is a number of bytes"),
        ):
            code, _, error = run(capsys, source, tmp_path / "new", *options)
            assert code == 2
            assert complaint in error
        assert not (tmp_path / "new").exists()

    def test_a_target_is_looked_at_before_the_work(self, tmp_path, source, capsys):
        other = make(tmp_path / "other", {**UNTIED, "hidden_size": 16}, {})
        code, _, error = run(capsys, source, tmp_path / "new", "--verify", "--target", other)
        assert code == 2
        assert "does not fit the target" in error
        assert not (tmp_path / "new").exists()


class TestRuns:
    def test_a_key_that_is_to_be_ignored_stays_in_the_config(self, tmp_path, capsys):
        raw = {**DRAFT, "zoom": 2, "dflash_config": {**DRAFT["dflash_config"], "temper": 1}}
        source = make(tmp_path / "source", raw, random_values(shapes_of(DRAFT)))
        target = make(tmp_path / "target", {**UNTIED, "block_size": 4}, random_values(shapes_of(UNTIED)))
        names = ("zoom", "temper", "block_size")
        options = [word for name in names for word in ("--ignore-config-key", name)]
        code, _, error = run(capsys, source, tmp_path / "orbax")
        assert code == 2
        assert "--ignore-config-key temper" in error
        assert not (tmp_path / "orbax").exists()
        checked = (*options, "--verify", "--target", target)
        for path, to in ((source, tmp_path / "orbax"), (tmp_path / "orbax", tmp_path / "back")):
            code, out, error = run(capsys, path, to, *checked)
            assert (code, error) == (0, "")
            assert "verify: passed" in out
            assert (to / "config.json").read_bytes() == (source / "config.json").read_bytes()

    def test_what_is_said(self, tmp_path, source, capsys):
        code, out, error = run(capsys, source, tmp_path / "orbax")
        assert (code, error) == (0, "")
        assert "an Orbax folder of the draft head, 11 parameters" in out
        code, out, error = run(capsys, tmp_path / "orbax", tmp_path / "back", "--max-shard-size", "4KB")
        assert (code, error) == (0, "")
        assert "a Hugging Face folder of the draft head, 11 parameters" in out
        assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
        assert read_raw(tmp_path / "back") == read_raw(source)

    def test_as_a_program_on_a_full_disk(self, tmp_path, capsys):
        """Both directions end with an error, nothing of the destination, and the source as it was."""
        raw = {**DRAFT, "hidden_size": 64, "intermediate_size": 256}
        source = make(tmp_path / "source", raw, random_values(shapes_of(raw)))
        assert run(capsys, source, tmp_path / "orbax")[0] == 0
        for folder, limit, complaint in (
            (source, 20_000, "File too large"),
            (tmp_path / "orbax", 100_000, "File too large"),
        ):
            before = files_of(folder), read_raw(folder)
            destination = tmp_path / "somewhere" / "new"
            command = [sys.executable, "-c", FULL_DISK, str(limit), str(folder), str(destination)]
            ran = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd(), check=False)
            assert ran.returncode == 2, ran.stderr
            assert ran.stderr.startswith("convert: ")
            assert complaint in ran.stderr
            assert str(destination) in ran.stderr
            assert "Traceback" not in ran.stderr
            assert list(destination.parent.iterdir()) == []
            assert (files_of(folder), read_raw(folder)) == before

    @pytest.mark.parametrize(
        ("text", "size"),
        [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("4KB", 4000), ("1TB", 10**12), ("17", 17), ("17B", 17)],
    )
    def test_sizes(self, text, size):
        assert parse_size(text) == size

    @pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "1.5GB", "5GiB"])
    def test_no_sizes(self, text):
        with pytest.raises(ValueError, match="a size is a number of bytes"):
            parse_size(text)
