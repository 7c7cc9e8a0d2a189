import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from convert.command import main, parse_size
from tests.convert.checkpoints import DRAFT, UNTIED, files_of, make, random_values, read_raw, shapes_of

FULL_DISK = """
import json
import resource
import sys

import convert.command

for limit, folder, destination in json.loads(sys.argv[1]):
    # No file can grow beyond this, which a program meets as it meets a full disk: a write fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    print(convert.command.main([folder, destination]))
"""


@pytest.fixture
def source(tmp_path):
    return make(tmp_path / "source", DRAFT, random_values(shapes_of(DRAFT)))


def run(capsys, *arguments):
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refused(capsys, complaint, *arguments):
    """The words of a run that ends with an error, ``complaint`` among them."""
    code, _, error = run(capsys, *arguments)
    assert code == 2
    assert complaint in error
    return error


class TestErrors:
    def test_an_existing_destination(self, tmp_path, source, capsys):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes").write_text("keep")
        assert refused(capsys, "mine exists", source, tmp_path / "mine").startswith("convert: ")
        assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]

    def test_an_unknown_source(self, tmp_path, capsys):
        refused(capsys, "convert: a b/c is neither a folder nor a hub id", "a b/c", tmp_path / "new")

    def test_a_hub_that_cannot_be_reached(self, tmp_path, capsys, monkeypatch):
        def download(*args, **kwargs):
            raise TimeoutError

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        refused(capsys, "owner/model is no local folder", "owner/model", tmp_path / "new")

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
        holds = "a Hugging Face folder holds config.json and *.safetensors, an Orbax folder config.json"
        error = refused(capsys, holds, folder, tmp_path / "new")
        assert f"this one holds {files[0] if files else 'nothing'}" in error

    def test_a_folder_that_is_both(self, tmp_path, source, capsys):
        (source / "orbax.json").write_text("{}")
        assert "model.safetensors" in refused(capsys, "as Orbax folders do", source, tmp_path / "new")

    def test_pickled_weights(self, tmp_path, source, capsys):
        (source / "model.safetensors").unlink()
        refused(capsys, "pickled weights", source, tmp_path / "new")

    def test_weights_of_another_config(self, tmp_path, capsys):
        tensors = random_values(shapes_of(DRAFT))
        tensors["stranger"] = tensors.pop("fc.weight")
        source = make(tmp_path / "source", DRAFT, tensors)
        assert "surplus: stranger" in refused(capsys, "missing: fc.weight", source, tmp_path / "new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]

    def test_options_that_do_nothing(self, tmp_path, source, capsys):
        for options, complaint in (
            (["--target", source], "--model is used by --verify only"),
            (["--max-shard-size", "5GB"], "--max-shard-size is about safetensors"),
            (["--max-shard-size", "5 apples"], "a size is a number of bytes"),
        ):
            refused(capsys, complaint, source, tmp_path / "new", *options)
        assert not (tmp_path / "new").exists()

    def test_a_target_is_looked_at_before_the_work(self, tmp_path, source, capsys):
        other = make(tmp_path / "other", {**UNTIED, "hidden_size": 16}, {})
        refused(capsys, "does not fit the target", source, tmp_path / "new", "--verify", "--target", other)
        assert not (tmp_path / "new").exists()


class TestRuns:
    @pytest.mark.wide
    def test_a_key_that_is_to_be_ignored_stays_in_the_config(self, tmp_path, capsys):
        raw = {**DRAFT, "zoom": 2, "dflash_config": {**DRAFT["dflash_config"], "temper": 1}}
        source = make(tmp_path / "source", raw, random_values(shapes_of(DRAFT), "bfloat16"))
        target = {**UNTIED, "block_size": 4}
        target = make(tmp_path / "target", target, random_values(shapes_of(UNTIED), "bfloat16"))
        names = ("zoom", "temper", "block_size")
        options = [word for name in names for word in ("--ignore-config-key", name)]
        refused(capsys, "--ignore-config-key temper", source, tmp_path / "orbax")
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

    @pytest.mark.wide
    def test_as_a_program_on_a_full_disk(self, tmp_path, capsys):
        """Both directions end with an error, nothing of the destination, and the source as it was."""
        raw = {**DRAFT, "hidden_size": 64, "intermediate_size": 256}
        source = make(tmp_path / "source", raw, random_values(shapes_of(raw)))
        assert run(capsys, source, tmp_path / "orbax")[0] == 0
        folders = {source: 20_000, tmp_path / "orbax": 100_000}
        before = [(files_of(folder), read_raw(folder)) for folder in folders]
        places = [tmp_path / f"from-{folder.name}" / "new" for folder in folders]
        runs = [(folders[folder], str(folder), str(to)) for folder, to in zip(folders, places, strict=True)]
        command = [sys.executable, "-c", FULL_DISK, json.dumps(runs)]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd(), check=False)
        assert (ran.returncode, ran.stdout.split()) == (0, ["2", "2"]), ran.stderr
        assert "Traceback" not in ran.stderr
        for said, place in zip(ran.stderr.split("convert: ")[1:], places, strict=True):
            assert "File too large" in said
            assert str(place) in said
            assert list(place.parent.iterdir()) == []
        assert [(files_of(folder), read_raw(folder)) for folder in folders] == before

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
