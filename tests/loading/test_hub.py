"""Checkpoints on the hub: what is fetched, and what is said where nothing can be."""

import fnmatch
import json
import os
import subprocess
import sys
import threading

import huggingface_hub
import pytest
from huggingface_hub import constants as hub_constants

from jetspec_jax import load_draft_head, load_target
from jetspec_jax.inspect.describe import describe
from tests.loading.hub import COMMIT, Hub
from tests.loading.published import HEAD, V4, halves, head_shapes, random_tensors, write, write_index


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.mark.parametrize("load", [load_target, load_draft_head])
def test_no_network(load):
    with pytest.raises(FileNotFoundError, match=r"owner/some-model\.0 .*cannot be fetched"):
        load("owner/some-model.0")


def test_from_the_cache(cache, tensors):
    repository = cache / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    snapshot = write(repository / "snapshots" / COMMIT, V4, tensors)
    assert load_target("owner/model").config.vocab_size == 19
    assert describe("owner/model") == describe(snapshot)


def test_fetches_neither_pickles_nor_code_nor_other_layouts(monkeypatch, folder):
    asked = {}

    def download(repo_id, allow_patterns, ignore_patterns):
        asked.update(repo_id=repo_id, patterns=allow_patterns, ignored=ignore_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load_target("owner/model")
    assert asked["repo_id"] == "owner/model"

    def is_fetched(name):
        def matches(patterns):
            return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

        return matches(asked["patterns"]) and not matches(asked["ignored"])

    wanted = [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
    ]
    assert all(map(is_fetched, wanted))
    unwanted = ["pytorch_model.bin", "modeling_qwen3.py", "model.pt", "model.gguf"]
    assert not any(map(is_fetched, [*unwanted, "original/model.safetensors"]))


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionError("refused\nby the host")], ids=repr)
def test_whatever_the_client_raises(monkeypatch, error):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=f"owner/model .*{type(error).__name__}") as info:
        load_target("owner/model")
    assert info.value.__cause__ is error


#: Describes checkpoints, each with the target to hold it against, in a process that may use a network.
DESCRIBE = """
import json, sys
from jetspec_jax.inspect.describe import describe
for arguments in json.loads(sys.argv[1]):
    try:
        print(json.dumps(describe(*arguments)))
    except (ValueError, FileNotFoundError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def test_info_fetches_configs_and_headers(tmp_path, tensors):
    """Of the weights nothing else, with the hub's own client; and then it knows what a folder would tell."""
    target = write(tmp_path / "target", V4, *halves(tensors))
    head = write(tmp_path / "head", HEAD, random_tensors(head_shapes(HEAD)))
    ghost = write(tmp_path / "ghost", V4, *halves(tensors))
    index = json.loads((ghost / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(ghost, {**index, "ghost.weight": "model-00001-of-00002.safetensors"})
    pickled = write(tmp_path / "pickled", V4, tensors)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    repositories = {"me/target": target, "me/head": head, "me/ghost": ghost, "me/pickled": pickled}
    with Hub(repositories) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        asked = [["me/target"], ["me/head", "me/target"], ["me/ghost"], ["me/pickled"]]
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}
        process = subprocess.run(
            [sys.executable, "-c", DESCRIBE, json.dumps(asked)],
            env={**os.environ, **online, "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=True,
        )
        hub.shutdown()
    found = [json.loads(line) for line in process.stdout.splitlines()]
    there = {"path": "", "target": ""}
    for about, local in zip(found[:2], (describe(target), describe(head, target)), strict=True):
        assert about | there == local | there
    assert "me/ghost does not hold the tensors" in found[2]
    assert "the index names tensors that no shard holds: ['ghost.weight']" in found[2]
    assert "me/pickled" in found[3]
    assert "NotASafetensorsRepoError" in found[3]
    whole = {name for name, span in hub.fetched if span is None}
    assert {name.rpartition("/")[2] for name in whole} == {"config.json", "model.safetensors.index.json"}
    assert len(hub.fetched - {(name, None) for name in whole}) == 5, "headers: two targets of two, one head"
