"""A tiny corpus and the recipe of a tiny pair, shared by the tests of this folder."""

import dataclasses

import jax
import numpy as np
import pytest

from train.demo.corpus import build_manifest
from train.demo.recipes import TINY

NAMES = ("path", "line", "value", "queue", "item", "name")


def write_corpus(folder, modules=60):
    """Small modules that look alike without being equal; some are tests."""
    rng = np.random.default_rng(0)
    (folder / "test").mkdir(parents=True)
    for i in range(modules):
        functions = []
        for j in range(rng.integers(3, 8)):
            a, b = rng.choice(NAMES, 2)
            functions.append(
                f"def get_{a}_{j}(self, {b}):\n    if {b} is None:\n        return {i}\n"
                f"    return self.{a}[{b}]\n"
            )
        name = f"test/test_module{i}.py" if i % 3 == 2 else f"module{i}.py"
        (folder / name).write_text(f'"""Module {i}."""\n\n' + "\n\n".join(functions))
    for held in ("heapq.py", "test/test_heapq.py"):
        (folder / held).write_text(f"# é, {held}\n" + (folder / "module0.py").read_text())
    return folder


@pytest.fixture(autouse=True, scope="module")
def first_device_alone():
    """Training takes all devices; here it sees one. Processes of their own say how many they have."""
    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        patch.setattr(jax, "devices", lambda *_: devices)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "Lib")


@pytest.fixture(scope="session")
def recipe(corpus, tmp_path_factory):
    manifest = tmp_path_factory.mktemp("manifest") / "tiny.json"
    build_manifest(corpus, name="tiny").write(manifest)
    return dataclasses.replace(TINY, manifest=str(manifest))
