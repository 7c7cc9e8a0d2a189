"""τ by budget, temperature and source, of completions with known rounds; and what an evaluation asks for."""

import dataclasses
from types import SimpleNamespace

import pytest

import train.head.evaluation as evaluation
from tests.decode.tiny import TINY, random_target
from tests.train.folders import write
from tests.train.head.tiny import RECIPE, changed, write_documents
from train.data.documents import Documents
from train.data.manifest import HELDOUT
from train.data.windows import Windows
from train.head.evaluation import HeadEvaluator, HeldOut
from train.head.recipe import HeadEvaluation
from train.head.tau import by_budget, mean_tau, tau_record
from train.loop.mesh import one_device


@dataclasses.dataclass
class Drafts:
    """What an evaluation needs of a head that is not asked."""

    weights: dict = dataclasses.field(default_factory=dict)
    mesh: None = None


def completed(*lengths):
    return SimpleNamespace(accept_lengths=list(lengths))


def test_each_key_has_the_mean_over_the_rounds_of_its_prompts():
    decoded = {
        0.0: {4: [completed(1, 2), completed(3), completed(6, 6)]},
        0.7: {4: [completed(1), completed(1, 1), completed(5)]},
    }
    record = tau_record(decoded, ["b", "a", "b"])
    assert record == {
        "tau": {"4": 3.6},
        "tau_by_temperature": {"0.0": {"4": 3.6}, "0.7": {"4": 2.0}},
        "tau_by_source": {
            "b": {"0.0": {"4": 3.75}, "0.7": {"4": 3.0}},
            "a": {"0.0": {"4": 3.0}, "0.7": {"4": 1.0}},
        },
    }
    assert list(record["tau_by_source"]) == ["b", "a"]
    assert by_budget(decoded, [1]) == record["tau_by_source"]["a"]
    assert mean_tau([]) == mean_tau([completed()]) == 1.0


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Held-out documents whose sources are "x" and "y" in turn."""
    folder = tmp_path_factory.mktemp("held")
    documents = [*Documents.open(write_documents(folder / "whole"), HELDOUT)]
    sources = ["xy"[i % 2] for i in range(len(documents))]
    write(folder / "part", documents, held=range(1, len(documents)), sources=sources)
    return Documents.open(folder / "part", HELDOUT)


def test_each_prompt_keeps_its_source(held):
    recipe = changed(RECIPE, evaluation={"prompts": 6})
    chosen = HeldOut.of(held, recipe, 256)
    assert len(chosen.prompts) == len(chosen.sources) == 6
    for prompt, source in zip(chosen.prompts, chosen.sources, strict=True):
        [index] = [i for i in range(len(held)) if held[i].tokens[: len(prompt)].tolist() == prompt]
        assert held.sources[index] == source
    assert set(chosen.sources) == {"x", "y"}


def test_evaluations_spread_over_the_held_out_documents(held):
    one = HeldOut.of(held, changed(RECIPE, evaluation={"prompts": 1}), 256)
    every = HeldOut.of(held, changed(RECIPE, evaluation={"prompts": 1000, "windows": 1000}), 256)
    assert one.prompts == [every.prompts[len(every.prompts) // 2]]
    assert len(every.tokens) == len(Windows(held, RECIPE.window))


def test_prompts_are_decoded_at_each_temperature_and_budget_with_their_own_seeds(held, monkeypatch):
    calls = []

    def decode(target, head, prompts, params, *, budget, **_):
        calls.append((budget, params))
        return [completed(budget, 10 * params[0].temperature) for _ in prompts]

    monkeypatch.setattr(evaluation, "generate_tree", decode)
    settings = HeadEvaluation(prompts=3, new_tokens=6, budgets=(2, 4), temperatures=(0.5, 0.0))
    chosen = HeldOut.of(held, changed(RECIPE, evaluation=settings), 256)
    evaluator = HeadEvaluator(
        SimpleNamespace(selected=None),
        random_target(TINY, 0),
        {},
        None,
        settings,
        chosen,
        batch=8,
        dtype="float32",
        mesh=one_device(),
        seed=3,
    )
    for _ in range(2):
        decoded = evaluator.decode(Drafts())
    first, again = calls[:4], calls[4:]
    assert first == again
    asked = [(budget, params[0].temperature) for budget, params in first]
    assert asked == [(2, 0.5), (4, 0.5), (2, 0.0), (4, 0.0)]
    seeds = {tuple(own.seed for own in params) for _, params in first}
    assert len(seeds) == 1
    assert len(set(seeds.pop())) == 3
    assert {own.max_tokens for _, params in first for own in params} == {6}
    # The first temperature decides.
    assert tau_record(decoded, chosen.sources)["tau"] == {"2": 3.5, "4": 4.5}
