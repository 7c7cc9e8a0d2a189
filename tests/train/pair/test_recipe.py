"""The rules that choose a recipe for a target, and recipes as files."""

import dataclasses
import re
import tomllib
from types import SimpleNamespace

import pytest

from bench.common.shapes import find_pair_shape
from jetspec_jax import load_target
from jetspec_jax.demo import DEMO_TARGET
from tests.decode.tiny import TINY
from tests.train.pair.tiny import RECIPE, changed
from train.head.recipe_file import CONFIGS, PAIR_RECIPES, find_table, read_head_recipe, record_of, toml_of
from train.pair.recipe import (
    Calibration,
    Judgement,
    PairRecipe,
    Writing,
    anchors_for,
    default_writing,
    read_recipe,
    scaled,
    unused_token,
    with_dropped_replaced,
)
from train.pair.stages import check_recipe


class Vocabulary:
    """A tokenizer of some tokens, by its vocabulary alone."""

    def __init__(self, tokens, special=(), mask=None, template="<user>"):
        self.tokens, self.chat_template, self.mask_token = tokens, template, mask
        self.bos_token = self.unk_token = self.pad_token = None
        self.added_tokens_decoder = {
            tokens.index(text): SimpleNamespace(content=text, special=True) for text in special
        }

    def get_vocab(self):
        return {text: number for number, text in enumerate(self.tokens)}

    def convert_tokens_to_ids(self, text):
        return self.tokens.index(text)


def target(width=256, layers=8, vocab=8, tokenizer=None, ends=(0,)):
    config = dataclasses.replace(
        TINY,
        hidden_size=width,
        vocab_size=vocab,
        layers=(TINY.layers[0],) * layers,
        max_position_embeddings=4096,
    )
    tokenizer = tokenizer or Vocabulary(["<end>", "<user>", "a"])
    return SimpleNamespace(config=config, tokenizer=tokenizer, eos_token_ids=ends)


def read(one, path=None, options=None, changes=(), **devices):
    devices = {"devices": 1, "gpu": True, "begun": False, **devices}
    return read_recipe(one, path, options or {}, changes, **devices)


def default(one, *changes, **devices):
    """The default recipe with other settings."""
    return read(one, changes=changes, **devices)


@pytest.mark.parametrize(
    ("width", "layers", "block", "rank", "rate", "selector_rate"),
    [
        (576, 3, 12, 64, 1e-3, 3e-4),
        (896, 3, 12, 64, 7.7e-4, 2e-4),
        (1024, 4, 16, 128, 7.1e-4, 1.2e-4),
        (4096, 5, 16, 256, 3.1e-4, 2.1e-5),
    ],
)
def test_the_size_of_a_head_follows_its_target(width, layers, block, rank, rate, selector_rate):
    recipe = default(target(width, layers=28, vocab=512))
    recipe.check()
    assert (recipe.head.head.layers, recipe.head.head.block_size) == (layers, block)
    assert recipe.head.head.taps == (1, 7, 13, 19, 25)
    assert recipe.selector.selector.rank == rank
    assert (recipe.head.fit.learning_rate, recipe.selector.fit.learning_rate) == (rate, selector_rate)
    assert recipe.head.fit.batch * recipe.head.window == 16_384


@pytest.mark.parametrize(("layers", "taps"), [(2, (1,)), (4, (2,)), (5, (1, 2)), (7, (1, 2, 3, 4))])
def test_targets_of_few_layers_have_fewer_taps(layers, taps):
    assert default(target(layers=layers)).head.head.taps == taps


GIVEN = 'prompts=["mine.jsonl"]'


@pytest.mark.parametrize("width", [256, 1024, 4096])
@pytest.mark.parametrize("devices", [1, 2, 8, 12])
@pytest.mark.parametrize(
    ("changes", "window"),
    [((), 512), ((GIVEN,), 2048), (("max_tokens=1024",), 2048), (("head.window=1024",), 1024)],
)
def test_the_sizes_of_a_batch_follow_its_window_and_divide_over_devices(width, devices, changes, window):
    recipe = default(target(width), *changes, devices=devices)
    recipe.check()
    for part in (recipe.head, recipe.selector):
        assert part.fit.parts(devices) >= 1
        assert part.window == window
        assert part.objective.anchors == anchors_for(target(width).config, 12) * window // 512
        at_once = part.fit.micro_batch or part.fit.batch // devices
        assert at_once * window * max(width, 1024) <= 2**24
        tokens = part.fit.batch * window
        assert tokens == max(16_384, devices * window) or (devices == 12 and 16_384 < tokens <= 2 * 16_384)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        # Windows, batch, micro-batch, anchors, rows of a chunk.
        (("selector.window=1024",), [(512, 32, 8, 48, 1005), (1024, 16, 4, 96, 1020)]),
        (("head.fit.batch=12",), [(512, 12, 4, 48, 1020), (512, 32, 8, 48, 1005)]),
        (("head.fit.micro_batch=3",), [(512, 33, 3, 48, 1020), (512, 32, 8, 48, 1005)]),
        (("max_tokens=256", "filters.max_tokens=193"), [(1024, 16, 4, 96, 1020)] * 2),
        (("head.window=4096", "head.objective.anchors=5"), [(4096, 4, 1, 5, 1020), (4096, 4, 1, 384, 1020)]),
    ],
)
def test_chosen_sizes_stay_and_others_follow(changes, sizes):
    recipe = default(target(4096, vocab=66_000), *changes)
    recipe.check()
    assert [
        (part.window, part.fit.batch, part.fit.micro_batch, part.objective.anchors, part.objective.chunk)
        for part in (recipe.head, recipe.selector)
    ] == sizes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("head.window=0", "head: window must be at least 2, not 0"),
        ("head.fit.batch=-1", "fit.batch must be at least 1, not -1"),
        ("max_tokens=long", "max_tokens must be an integer, not 'long'"),
        ("head=3", "head must be a table, not 3"),
    ],
)
def test_sizes_that_others_would_follow_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        default(target(), change).check()


def test_logits_of_large_vocabularies_come_in_smaller_chunks():
    assert default(target(896, vocab=151_936)).head.objective.chunk == 110
    assert default(target(576, vocab=49_152)).head.objective.chunk == 341


def test_which_targets_write_prompts():
    kinds = {"free", "code", "chat", "arithmetic"}
    base, documents, written = (
        target(tokenizer=Vocabulary(["a"], template=None)),
        'documents=["a"]',
        "{kind='a', count=1}",
    )
    for one, changes, found in (
        (target(), (), kinds),
        (base, (), set()),
        # A base model may have a template: documents alone are continued.
        (target(), (documents,), set()),
        (target(), (documents, GIVEN), kinds),
        (target(), (GIVEN,), kinds),
        (target(), (documents, f"writing=[{written}]"), {"a"}),
    ):
        assert {part.kind for part in default(one, *changes).writing} == found
    assert read(target(), options={"documents": ["a"]}).writing == ()


def test_a_head_that_continues_keeps_its_settings():
    new, continued = default(target()), default(target(), begun=True)
    assert continued.head.head == type(continued.head.head)(start="checkpoint")
    assert continued.head.fit.learning_rate < new.head.fit.learning_rate / 3


def test_the_mask_token():
    assert unused_token(target(tokenizer=Vocabulary(["<end>", "<mask>"], mask="<mask>"))) is None
    assert unused_token(target(vocab=8, tokenizer=Vocabulary(["<end>", "a"]))) == 2
    tokens = ["<end>", "<user>", "<repo>", "a"]
    chats = Vocabulary(tokens, special=tokens[:3])
    assert unused_token(target(vocab=4, tokenizer=chats)) == 2
    none = target(vocab=4, tokenizer=Vocabulary(tokens, special=tokens[:2]))
    assert unused_token(none) is None
    with pytest.raises(ValueError, match=r"set head\.mask_token to the id"):
        check_recipe(default(none), none)


def test_the_demo_s_mask_token_is_its_tokenizer_s():
    assert unused_token(load_target(DEMO_TARGET)) is None


def test_a_recipe_is_written_and_read_back():
    phrase = 'say "é"\n\t```\\ \x7f'
    recipe = changed(writing=(Writing("free", 3), Writing("code", 2, (phrase,))), weights=(1.0, 2.5))
    text = toml_of(dataclasses.asdict(recipe))
    assert record_of(PairRecipe, tomllib.loads(text), "text") == recipe
    assert text.index("[head.fit]") > text.index("max_tokens = 12")


def test_the_recipe_of_a_work_folder_is_read_as_it_is(tmp_path):
    path, small, large = tmp_path / "recipe.toml", target(576, layers=30, vocab=2048), target(4096, layers=36)
    one, other = default(small), default(large)
    assert (one.head.fit.micro_batch, other.head.fit.micro_batch) == (None, 8)
    path.write_text(toml_of(dataclasses.asdict(one)))
    assert read(large, path) == one
    path.write_text("[head.fit]\nlearning_rate = 0.5\n")
    assert read(large, path).head.fit == dataclasses.replace(other.head.fit, learning_rate=0.5)


def test_warm_up_and_intervals_follow_the_steps_unless_they_are_set(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[head.fit]\nsteps = 60\n[selector.fit]\nsteps = 30\nsave_every = 7\n")
    recipe, other = read(target(), path), default(target())
    follow = {"save_every": 10, "evaluate_every": 10, "log_every": 1, "warmup": 6}
    assert recipe.head.fit == dataclasses.replace(other.head.fit, steps=60, **follow)
    follow = {"save_every": 7, "evaluate_every": 5, "log_every": 1, "warmup": 3}
    assert recipe.selector.fit == dataclasses.replace(other.selector.fit, steps=30, **follow)
    recipe.check()


@pytest.mark.parametrize("name", PAIR_RECIPES)
def test_every_recipe_that_comes_along_is_read_and_can_be_trained(name):
    one = target(576, layers=30, vocab=512)
    recipe = read(one, name)
    recipe.check()
    assert recipe == read(one, CONFIGS / f"{name}.toml")


def test_the_recipe_of_smollm2_is_that_of_its_head():
    recipe = read(target(), "smollm2-pair")
    assert recipe.head == read_head_recipe("smollm2")
    assert recipe.selector == read_head_recipe("smollm2-selector")
    assert recipe.prompts == ("gsm8k",)
    assert sum(len(part.phrases) for part in recipe.writing) == 20
    assert sum(part.count for part in recipe.writing) == 32_000


def test_the_selector_follows_a_head_s_whole_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('head = "smollm2"\n')
    recipe = read(target(4096), path)
    assert recipe.head == read_head_recipe("smollm2")
    assert recipe.selector.window == recipe.head.window
    assert recipe.selector.fit.steps == default(target(4096)).selector.fit.steps


def test_files_options_and_changes_replace_settings_in_this_order(tmp_path):
    path, one = tmp_path / "mine.toml", target()
    path.write_text('max_tokens = 20\nslots = 3\nprompts = ["a"]\n[head.fit]\nlearning_rate = 0.5\n')
    recipe = read(one, path, {"prompts": ["b"]}, ["slots=5", "writing=[]", "head.fit.batch=2"])
    assert (recipe.max_tokens, recipe.slots, recipe.prompts, recipe.writing) == (20, 5, ("b",), ())
    assert recipe.head.fit == dataclasses.replace(default(one).head.fit, learning_rate=0.5, batch=2)
    for wrong, message in (
        ("[head]\nsteps = 1\n", "unknown key head.steps"),
        ("[[writing]]\nkind = 'a'\n", r"missing key writing\[0\].count"),
        ("writing = 3\n", "writing must be a list of tables, not 3"),
        ("head = 'nothing'\n", "no recipe nothing"),
        ("head = 3\n", "head must be a table, not 3"),
    ):
        path.write_text(wrong)
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read(one, path)
    with pytest.raises(FileNotFoundError, match=re.escape("one of " + ", ".join(PAIR_RECIPES))):
        find_table("nothing", PAIR_RECIPES)


def test_what_is_out_of_range_is_listed_at_once():
    few = {"heldout": 40, "calibration": Calibration(prompts=3), "judgement": Judgement(prompts=31)}
    wrong = changed(slots=0, temperatures=(), **few)
    wrong = dataclasses.replace(wrong, head=dataclasses.replace(wrong.head, window=1))
    with pytest.raises(ValueError, match="slots must be at least 1, not 0") as refused:
        wrong.check()
    for message in (
        "temperatures must name",
        "heldout must be at least 41, not 40",
        "calibration.prompts must be at least 8, not 3",
        "judgement.prompts must be at least 32, not 31",
        "head: window must be at",
    ):
        assert message in str(refused.value)
    assert RECIPE.choosing == 1
    assert default(target()).choosing == 32
    twice = dataclasses.replace(RECIPE.selector, calibration=Calibration())
    with pytest.raises(ValueError, match=r"selector\.calibration must be left out: set calibration"):
        changed(selector=twice).check()
    with pytest.raises(ValueError, match="there are no prompts: set writing, prompts or documents"):
        changed(writing=()).check()


def test_a_scaled_recipe_has_fewer_of_everything_and_enough_to_judge():
    whole = default(target(896, layers=24, vocab=512))
    half, least = scaled(whole, 0.5), scaled(whole, 0.0)
    assert [part.count for part in half.writing] == [5_000, 4_000, 4_000, 3_000]
    assert (half.share, scaled(whole, 3.0).share, scaled(half, 0.5).share) == (0.5, 1.0, 0.25)
    assert (half.most_prompts, half.head.fit.steps, half.selector.fit.steps) == (20_000, 6_000, 400)
    assert half.head.fit.evaluate_every == 1_000
    assert scaled(dataclasses.replace(whole, most_prompts=600), 0.5).most_prompts == 600
    assert sum(part.count for part in least.writing) >= 3 * whole.heldout
    for recipe in (half, least, scaled(whole, 3.0)):
        recipe.check()


@pytest.mark.parametrize(
    ("layers", "mlp", "anchors"),
    # Layers of 14.9 million parameters beside an output matrix of 136.1 million.
    [(24, 4864, 48), (30, 4864, 53), (80, 4864, 96)],
)
def test_logits_take_about_as_many_operations_as_the_target_s_layers(layers, mlp, anchors):
    sizes = {"num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "mlp_size": mlp}
    one = dataclasses.replace(TINY.layers[0], **sizes)
    made = dataclasses.replace(
        TINY, hidden_size=896, vocab_size=151_936, layers=(one,) * layers, tie_word_embeddings=False
    )
    assert anchors_for(made, 12) == anchors


@pytest.mark.parametrize(
    # A token of GPT-OSS-20B reads 4 of 32 experts.
    ("shape", "anchors"),
    [("qwen3-0.6b", 48), ("qwen3-1.7b", 60), ("qwen3-8b", 96), ("gpt-oss-20b", 72)],
)
def test_anchors_of_published_shapes(shape, anchors):
    assert anchors_for(find_pair_shape(shape).target, 16) == anchors


def test_default_prompts_make_up_for_those_that_are_dropped():
    recipe = default(target())
    assert recipe.writing == default_writing()
    more = with_dropped_replaced(recipe, 0.5)
    assert [part.count for part in more.writing] == [2 * part.count for part in recipe.writing]
    assert [part.phrases for part in more.writing] == [part.phrases for part in recipe.writing]
    own = dataclasses.replace(recipe, writing=(Writing("free", 100),))
    assert with_dropped_replaced(own, 0.5) == own
