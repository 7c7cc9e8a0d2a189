"""The file of round costs: entries written, entries read back, and entries refused."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine import known_costs as module
from jetspec_jax.engine.known_costs import FILE, MOST_KEYS, keep_costs_in, known_costs, learn_costs
from jetspec_jax.engine.planning import plan_engine
from jetspec_jax.engine.round_costs import NO_COSTS, RoundCosts
from tests.decode.tiny import TINY, random_head

COSTS = RoundCosts(
    (64, 512), {(1, 1): (0.01, 0.02), (1, 8): (0.03, 0.04)}, {(1, 1): 0.001, (1, 8): 0.0}, frozenset({(1, 8)})
)


@pytest.fixture(scope="module")
def head():
    return random_head(TINY, 1, block_size=4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_path", None)
    keep_costs_in(tmp_path / "notes")
    return tmp_path / "notes"


def key_of(head, **settings):
    settings = TreeSettings(**{"budget": 8, "algorithm": "auto", **settings})
    return plan_engine(TINY, head.config, settings, jnp.dtype("float32")).cost_key


def forget():
    """As another process would begin."""
    module._known.clear()


def test_a_later_process_knows_them_and_those_of_another_engine_stay_apart(head, folder):
    learn_costs(key_of(head), COSTS)
    forget()
    assert known_costs(key_of(head)) == COSTS
    assert known_costs(key_of(head, width=2)) == NO_COSTS
    decoders, size, _ = key_of(head)
    assert known_costs((decoders, size, jnp.dtype("bfloat16"))) == NO_COSTS
    assert (
        known_costs((decoders, replace(size, capacity=2 * size.capacity), jnp.dtype("float32"))) == NO_COSTS
    )


def test_the_file_keeps_the_newest(head, folder, monkeypatch):
    names = iter(range(1, 1000))
    monkeypatch.setattr(module, "_name", lambda key: str(next(names)))
    for _ in range(MOST_KEYS + 2):
        learn_costs(key_of(head), COSTS)
    assert list(json.loads((folder / FILE).read_text())) == [str(n) for n in range(3, MOST_KEYS + 3)]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"NAME": 3}', '{"NAME": {"contexts": [64, 512], "rounds": [], "guessed": []}}'],
    ids=str,
)
def test_a_file_of_something_else_says_nothing_and_is_written_anew(head, folder, content):
    folder.mkdir()
    (folder / FILE).write_text(content.replace("NAME", module._name(key_of(head))))
    assert known_costs(key_of(head)) == NO_COSTS
    learn_costs(key_of(head), COSTS)
    forget()
    assert known_costs(key_of(head)) == COSTS


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), None, "fast"], ids=str)
def test_seconds_that_nobody_measured_are_not_believed(head, folder, value):
    learn_costs(key_of(head), COSTS)
    forget()
    kept = json.loads((folder / FILE).read_text())
    kept[module._name(key_of(head))]["rounds"][1][2] = value
    (folder / FILE).write_text(json.dumps(kept))
    assert known_costs(key_of(head)) == NO_COSTS


def test_costs_of_other_shapes_are_not_believed(head, folder):
    alone = RoundCosts((64, 512), {(1, 1): (0.01, 0.02)}, {(1, 1): 0.001})
    learn_costs(key_of(head), alone)
    forget()
    assert known_costs(key_of(head)) == NO_COSTS


def test_a_folder_that_cannot_be_is_no_error(head, folder):
    folder.write_text("a file")
    learn_costs(key_of(head), COSTS)
    assert known_costs(key_of(head)) == COSTS
    forget()
    assert known_costs(key_of(head)) == NO_COSTS
