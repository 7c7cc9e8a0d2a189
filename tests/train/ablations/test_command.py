"""The comparison of ways to train a head: its stages at a tiny size, and what it says about figures."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx

from jetspec_jax.config import parse_model_config
from jetspec_jax.models import build, weights_of
from train.ablations import command as ablations
from train.ablations.command import VARIANTS, Ablations
from train.ablations.report import judge, table, write_report
from train.data.documents import Documents
from train.demo.corpus import HELDOUT, TRAIN, VALIDATION, CorpusManifest, read_corpus
from train.demo.target import target_json, write_target
from train.demo.tokenizer import Tokenizer
from train.loop.stages import Deadline, OutOfTime

# A whole recipe, trained and measured.
pytestmark = pytest.mark.wide

CHOSEN = ("bidirectional", "corpus")
TAUS = {
    "forward_kl": {"16": 2.0, "64": 3.0},
    "sft": {"16": 2.05, "64": 3.0},
    "reverse_kl": {"16": 1.5, "64": 2.9},
    "bidirectional": {"16": 1.9, "64": 2.9},
    "causal_gamma7": {"16": 2.2, "64": 3.1},
    "bidirectional_gamma7": {"16": 2.1, "64": 3.2},
    "corpus": {"16": 1.5, "64": 1.5},
}


def holds(claim, taus=TAUS):
    [verdict] = [verdict for verdict in judge(taus) if claim in verdict.claim]
    return verdict.holds


class TestJudge:
    @pytest.mark.parametrize(
        ("claim", "expected"),
        [
            ("forward KL is at least hard labels", True),  # 2.0 is within 3 % of 2.05
            ("forward KL is well above reverse KL", False),  # 3.0 is not 5 % above 2.9
            ("hard labels are well above reverse KL", False),
            ("bidirectional at gamma 0", True),
            ("bidirectional at gamma 7", False),  # at budget 64
            ("regenerated text is well above", True),
            ("rises with the budget (forward_kl)", True),
            ("rises with the budget (corpus)", False),
        ],
    )
    def test_each_ordering_at_every_budget(self, claim, expected):
        assert holds(claim) is expected

    def test_figures_are_shown(self):
        [verdict] = [v for v in judge(TAUS) if "gamma 7" in v.claim]
        assert verdict.figures == "2.20 : 2.10 at 16, 3.10 : 3.20 at 64"

    def test_what_was_not_trained_is_not_judged(self):
        assert [v.claim for v in judge({"sft": TAUS["sft"]})] == ["tau rises with the budget (sft)"]


@pytest.fixture(scope="module")
def pair(recipe, corpus, tmp_path_factory):
    """A random target of the tiny recipe, with its tokenizer."""
    folder = tmp_path_factory.mktemp("target") / "target"
    texts = read_corpus(corpus, CorpusManifest.read(recipe.manifest_path())).values()
    config = parse_model_config(target_json(recipe))
    weights = weights_of(build(config, rngs=nnx.Rngs(0)))
    write_target(folder, recipe, Tokenizer.train(texts, recipe.vocab_size), weights)
    return folder


def make(pair, recipe, corpus, work, deadline=None, **changes):
    head = dataclasses.replace(
        recipe.head,
        fit=dataclasses.replace(recipe.head.fit, steps=2, warmup=1, evaluate_every=2),
        evaluation=dataclasses.replace(recipe.head.evaluation, prompts=0),
        **changes,
    )
    return Ablations(
        recipe,
        head,
        work,
        corpus,
        documents=16,
        temperatures=(1.0,),
        prompts=2,
        variants=CHOSEN,
        deadline=deadline or Deadline(),
        target=pair,
    )


@pytest.fixture(scope="module")
def work(pair, recipe, corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablations, "DECODED", ((1, 0.0), (1, 1.0)))
        with pytest.raises(OutOfTime, match="left: regenerated, corpus text, bidirectional"):
            make(pair, recipe, corpus, folder, Deadline(0)).run()
        make(pair, recipe, corpus, folder).run()
        make(pair, recipe, corpus, folder, Deadline(0)).run()  # all is done, so no time is needed
    return folder


@pytest.mark.parametrize(("split", "count"), [(TRAIN, 14), (HELDOUT, 2)])
def test_both_texts_have_the_same_prompts(work, split, count):
    ours, theirs = (list(Documents.open(work / kind, split)) for kind in ("regenerated", "corpus"))
    assert len(ours) == len(theirs) == count
    differing = 0
    for own, given in zip(ours, theirs, strict=True):
        first = int(np.argmax(own.learn))
        np.testing.assert_array_equal(own.tokens[:first], given.tokens[:first])
        np.testing.assert_array_equal(given.learn, np.arange(len(given.tokens)) >= first)
        differing += not np.array_equal(own.tokens[first:], given.tokens[first:])
    assert differing > 0.7 * count


@pytest.mark.parametrize(("split", "source_split"), [(TRAIN, TRAIN), (HELDOUT, VALIDATION)])
def test_the_corpus_text_is_the_corpus(work, pair, recipe, corpus, split, source_split):
    sources = read_corpus(corpus, CorpusManifest.read(recipe.manifest_path()))
    text = "".join(source for key, source in sources.items() if key.split == source_split)
    tokenizer = Tokenizer.read(pair)
    for document in Documents.open(work / "corpus", split):
        piece = tokenizer.decode(document.tokens.tolist()).split("<|endoftext|>")[0]
        assert piece in text


def test_variants_differ_in_what_they_say(work):
    recipes = {name: json.loads((work / "heads" / name / "recipe.json").read_text()) for name in CHOSEN}
    assert recipes["corpus"]["head"]["causal"] is None
    assert recipes["bidirectional"]["head"]["causal"] is False
    assert recipes["corpus"]["data"]["mode"] == "corpus"
    assert recipes["bidirectional"]["data"]["mode"] == "regenerate"
    assert recipes["bidirectional"]["objective"] == recipes["corpus"]["objective"]
    config = json.loads((work / "heads" / "bidirectional" / "draft_head" / "config.json").read_text())
    assert config["dflash_config"]["causal_head"] is False


def test_the_report(work):
    results = json.loads((work / "report" / "ablations.json").read_text())
    assert set(results["variants"]) == set(CHOSEN)
    for name, own in results["variants"].items():
        assert own["label"] == VARIANTS[name].label
        assert own["tau"] == {"1": 1.0}
        assert own["tau_sampled"] == {"1": 1.0}
        assert len(own["accuracy_by_depth"]) == 3
    assert [v["claim"] for v in results["verdicts"]] == [
        v.claim for v in judge({n: {"1": 1.0} for n in CHOSEN})
    ]
    page = (work / "report" / "README.md").read_text()
    assert table(results) in page
    assert "16 documents, the regenerated ones at temperature 1;" in page
    assert (work / "report" / "ablations.png").stat().st_size > 10_000


def test_the_best_comes_first(work, tmp_path):
    results = json.loads((work / "report" / "ablations.json").read_text())
    for name, tau in zip(CHOSEN, (2.0, 3.0), strict=True):
        results["variants"][name]["tau"]["1"] = tau
    write_report(tmp_path, results)
    page = (tmp_path / "README.md").read_text()
    labels = [VARIANTS[name].label for name in ("corpus", "bidirectional")]
    places = [page.index(f"| {label} |") for label in labels]
    assert places == sorted(places)


def test_other_settings_are_refused(pair, recipe, corpus, work):
    with pytest.raises(ValueError, match="window: 40 there, 32 here"):
        make(pair, recipe, corpus, work, window=32)
