"""Recipes as files: those that come with the program, changes, and all that can be wrong."""

import codecs
import dataclasses
import re

import pytest

from train.head.recipe import HeadRecipe, HeadSettings
from train.head.recipe_file import CONFIGS, HEAD_RECIPES, read_head_recipe
from train.loop.fit import Fit
from train.loop.mesh import MeshSettings

SMALL = """
[fit]
steps = 10
batch = 4
learning_rate = 1
warmup = 2
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "own.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", HEAD_RECIPES)
def test_every_recipe_that_comes_along_is_read_and_can_be_trained(name):
    recipe = read_head_recipe(name)
    assert recipe == read_head_recipe(CONFIGS / f"{name}.toml")
    recipe.check()
    assert recipe.fit.parts(1) == recipe.fit.batch // (recipe.fit.micro_batch or recipe.fit.batch)
    assert (recipe.head.block_size or 16) <= recipe.window
    if recipe.head.taps is not None:
        assert len(recipe.head.taps) == len(set(recipe.head.taps))


def test_the_published_recipe():
    recipe = read_head_recipe("qwen3-8b")
    assert recipe.head == HeadSettings("random", 5, 16, (1, 9, 17, 25, 33), None, 151669, None)
    assert (recipe.objective.loss, recipe.objective.gamma, recipe.objective.anchors) == ("forward_kl", 0, 512)


def test_what_a_file_does_not_say_has_its_usual_value(file):
    assert read_head_recipe(file(SMALL)) == HeadRecipe(Fit(10, 4, 1.0, 2))


def test_bytes_of_a_recipe(file):
    path = file(SMALL)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read_head_recipe(path) == HeadRecipe(Fit(10, 4, 1.0, 2))
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"own\.toml is not valid TOML: it is no UTF-8 text"):
        read_head_recipe(path)
    with path.open("ab") as grown:
        grown.truncate(2**40)
    with pytest.raises(ValueError, match="has 1,099,511,627,776 bytes; it may have 4,194,304"):
        read_head_recipe(path)


def test_changes_replace_what_the_file_says(file):
    changes = [
        "fit.steps=20",
        "window=64",
        "head.taps=[1, 2]",
        "head.start=target",
        'head.mask_token="<|x|>"',
        "mesh.fsdp=2",
        "mesh.tensor=4",
        "objective.gamma=4",
        "deterministic=true",
    ]
    recipe = read_head_recipe(file(SMALL), changes)
    assert recipe.fit == dataclasses.replace(read_head_recipe(file(SMALL)).fit, steps=20)
    assert (recipe.window, recipe.deterministic, recipe.objective.gamma) == (64, True, 4.0)
    assert recipe.head == HeadSettings("target", taps=(1, 2), mask_token="<|x|>")
    assert recipe.mesh == MeshSettings(-1, 2, 1, 4)
    # The last one counts; a token may be named by its id.
    assert read_head_recipe(file(SMALL), ["seed=1", "seed=2"]).seed == 2
    assert read_head_recipe(file(SMALL), ["head.mask_token=7"]).head.mask_token == 7


def test_all_that_is_wrong_is_said_at_once(file):
    text = """
    window = "long"
    colour = "red"
    seed = true
    packing = "yes"
    evaluation = 3
    [head]
    taps = [1, "two"]
    start = "scratch"
    mask_token = 1.5
    [objective]
    loss = "mse"
    temprature = 2.0
    [fit]
    steps = 1.5
    batch = 4
    deterministic = true
    """
    path = file(text)
    with pytest.raises(ValueError, match=r"own\.toml") as error:
        read_head_recipe(path)
    for part in (
        "unknown key colour; there are fit, window, head",
        "window must be an integer, not 'long'",
        "seed must be an integer, not True",
        "packing must be true or false, not 'yes'",
        "evaluation must be a table, not 3",
        "head.taps must be a list of an integer, not [1, 'two']",
        "head.start must be 'random' or 'target' or 'checkpoint', not 'scratch'",
        "head.mask_token must be a string or an integer, not 1.5",
        "objective.loss must be 'forward_kl' or 'reverse_kl' or 'sft' or 'total_variation' or 'dpace', not",
        "unknown key objective.temprature; there are loss, temperature, gamma",
        "fit.steps must be an integer, not 1.5",
        "unknown key fit.deterministic",
        "missing key fit.learning_rate",
        "missing key fit.warmup",
    ):
        assert part in str(error.value)
    assert str(error.value).count(";") >= 12


def test_a_missing_table_is_named_by_the_keys_that_it_must_have(file):
    with pytest.raises(ValueError, match=r"missing key fit\.steps; missing key fit\.batch"):
        read_head_recipe(file("window = 3"))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_rate_that_is_no_number_is_refused(file, value):
    with pytest.raises(ValueError, match=r"fit\.learning_rate must be a number"):
        read_head_recipe(file(SMALL), [f"fit.learning_rate={value}"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fit.steps", "a change is KEY=VALUE, as fit.steps=100, not 'fit.steps'"),
        ("=3", "a change is KEY=VALUE"),
        ("fit.stepps=3", "unknown key fit.stepps"),
        ("fit.steps.more=3", "steps in 'fit.steps.more=3' is no table"),
        ("fit.steps=many", "fit.steps must be an integer, not 'many'"),
    ],
)
def test_a_bad_change_is_named(file, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_head_recipe(file(SMALL.replace("[fit]", "window = 8\n[fit]")), [change])


def test_a_file_that_is_no_toml_and_a_name_that_is_no_recipe(file, tmp_path):
    with pytest.raises(ValueError, match=r"own\.toml is not valid TOML"):
        read_head_recipe(file("window ="))
    known = ", ".join(HEAD_RECIPES)
    assert "smollm2-pair" not in HEAD_RECIPES
    for missing in ("nothing", tmp_path / "nothing.toml"):
        with pytest.raises(
            FileNotFoundError, match=f"no recipe {missing}: name a TOML file or one of {known}"
        ):
            read_head_recipe(missing)
