"""The acceptance of drafted tokens in answers, in vLLM's names."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from jetspec_jax import AsyncLLM, Completion, SamplingParams
from jetspec_jax.inspect.trace import trace_rounds
from jetspec_jax.serve.answers import usage_fields
from jetspec_jax.serve.app import make_app
from jetspec_jax.serve.settings import ServeSettings
from tests.decode.tiny import random_head, random_target
from tests.serve.conftest import SMALL, TREE, small_target
from tests.serve.scripted import Scripted
from tests.serve.servers import Kept, served

OPTION = "per_request_spec_decode_metrics"
PROMPT = "def read_lines(path):"
#: The longest path of a tree of 8 nodes, width 2 and equal scores: 1 + 2 + 4 + 1 nodes.
DEPTH = 3
SAMPLED = {"temperature": 1.0, "seed": 1, "ignore_eos": True, "allowed_token_ids": [0, 1, 2]}


def fields(completions, level="none", depth=DEPTH):
    service = SimpleNamespace(
        settings=ServeSettings(**{OPTION: level}), llm=SimpleNamespace(num_spec_tokens=depth)
    )
    return usage_fields(completions, service)


def speculative(*completions, **given):
    return fields(completions, **given)["metrics"]["speculative_decoding"]


def ended(lengths, depths):
    return Completion(
        "", list(range(sum(lengths))), "length", lengths, [8] * len(lengths), tree_depths=depths
    )


def defined(accepted, drafted, most):
    """vLLM's definitions, for a request with some steps."""
    histogram = [0] * (most + 1)
    for count in accepted:
        histogram[count] += 1
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": most,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }


@pytest.mark.usefixtures("no_type_checks")
class TestDefinitions:
    def test_a_chain_has_the_figures_of_vllm_s_documentation(self):
        completion = ended([1] * 39 + [2] + [4] * 3, [3] * 43)
        assert speculative(completion, level="summary") == {
            "mean_acceptance_length": 1.2325581395348837,
            "draft_acceptance_rate": 0.07751937984496124,
            "acceptance_histogram": [39, 1, 0, 3],
            "num_spec_steps": 43,
            "num_accepted_draft_tokens": 10,
            "num_draft_tokens": 129,
            "num_spec_tokens": 3,
        }

    def test_plain_rounds_among_trees_are_no_steps(self):
        completion = ended([1, 3, 1, 1, 2], [0, 2, 0, 5, 4])
        got = speculative(completion, level="detailed", depth=6)
        assert got == defined([2, 0, 1], [2, 5, 4], 6)

    @pytest.mark.parametrize("level", ["summary", "detailed"])
    def test_several_completions_have_none(self, level):
        assert speculative(ended([2], [3]), ended([2], [3]), level=level) is None

    def test_usage_counts_all_completions_at_every_level(self):
        both = [ended([1, 4], [3, 3]), ended([2], [1])]
        for level in ("none", "summary", "detailed"):
            assert fields(both, level)["usage"]["completion_tokens_details"] == {
                "accepted_prediction_tokens": 4,
                "rejected_prediction_tokens": 3,
            }


@pytest.fixture(scope="module")
def even():
    """An engine whose target and head find all tokens equally likely, so that chance accepts some drafts."""
    target = random_target(SMALL, 0, std=0.0, tokenizer=small_target().tokenizer, eos=(0,))
    made = Kept(target, random_head(SMALL, 0), max_slots=4, max_waiting=8, **TREE)
    yield made
    asyncio.run(AsyncLLM.close(made))


@pytest.fixture(scope="module")
def http(even):
    with served(even, **{OPTION: "detailed"}) as own, own.client() as client:
        yield client


def whole(http, path, **given):
    body = {"max_tokens": 40, **SAMPLED, **given}
    return http.post(path, json=body).raise_for_status().json()


def streamed(http, path, **given):
    *chunks, last = [
        json.loads(line.removeprefix("data: "))
        for line in http.post(
            path,
            json={
                "max_tokens": 40,
                **SAMPLED,
                **given,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_rounds": True,
            },
        ).text.splitlines()
        if line.startswith("data: {")
    ]
    assert not any("metrics" in chunk or "usage" in chunk for chunk in chunks)
    rounds = [piece for chunk in chunks for piece in chunk["choices"][0].get("rounds", ())]
    return [piece["tokens"] for piece in rounds], last


PATHS = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


@pytest.mark.parametrize("path", PATHS)
def test_whole_and_streamed_answers_have_the_figures_of_their_rounds(http, path):
    lengths, last = streamed(http, path, **PATHS[path])
    got = last["metrics"]["speculative_decoding"]
    accepted = got["per_step_accepted"]
    # The last round may have accepted more than the request took.
    assert [count + 1 for count in accepted[:-1]] == lengths[:-1]
    assert accepted[-1] + 1 >= lengths[-1]
    drafted = got["per_step_drafted"]
    assert got == defined(accepted, drafted, even_depth())
    assert all(some <= deepest <= even_depth() for some, deepest in zip(accepted, drafted, strict=True))
    assert len(set(accepted)) > 1
    details = last["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == sum(accepted)
    assert details["rejected_prediction_tokens"] == sum(drafted) - sum(accepted)
    answer = whole(http, path, **PATHS[path])
    assert answer["metrics"]["speculative_decoding"] == got
    assert answer["usage"] == last["usage"]
    assert answer["metrics"]["time_to_first_token"] > 0


def even_depth():
    return min(random_head(SMALL, 0).config.depth, TREE["budget"] - 1)


def test_requests_of_one_completion_only(http):
    path, given = "/v1/completions", {"max_tokens": 4}
    ids = [1, 2, 3]
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        assert whole(http, path, prompt=prompt, **given)["metrics"]["speculative_decoding"] is not None
    for more in ({"prompt": [PROMPT, PROMPT]}, {"prompt": [ids, ids]}, {"prompt": PROMPT, "n": 2}):
        answer, (_, last) = whole(http, path, **more, **given), streamed(http, path, **more, **given)
        assert answer["metrics"]["speculative_decoding"] is last["metrics"]["speculative_decoding"] is None
        details = answer["usage"]["completion_tokens_details"]
        assert details == last["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
    answer = whole(http, path, prompt=PROMPT, budget=1, **given)
    assert answer["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0] * (even_depth() + 1)
    assert answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize(
    ("given", "most"), [({}, 7), ({"budget": 3}, 2), ({"depth": 2}, 2), ({"depth": 5, "budget": 4}, 3)]
)
def test_the_longest_path_that_the_settings_allow(given, most):
    head = random_head(SMALL, 0, block_size=16)
    assert AsyncLLM(small_target(), head, **{**TREE, **given}).num_spec_tokens == most


def test_plain_servers_refuse_the_option():
    plain = Scripted(small_target())
    assert plain.num_spec_tokens == 0
    make_app(plain, ServeSettings())
    for level in ("summary", "detailed"):
        with pytest.raises(ValueError, match=f"{OPTION} {level} needs trees, .*--budget"):
            make_app(plain, ServeSettings(**{OPTION: level}))


@pytest.mark.wide
def test_the_figures_of_the_demo_pair_are_those_of_its_trace():
    params = {"temperature": 1.0, "seed": 4}
    llm = Kept("demo", budget=16, max_slots=1, algorithm="top_nodes")
    try:
        with served(llm, **{OPTION: "detailed"}) as own, own.client() as http:
            body = {"prompt": PROMPT, "max_tokens": 48, **params}
            got = http.post("/v1/completions", json=body).json()["metrics"]["speculative_decoding"]
        models, settings = (llm.llm.target, llm.llm.draft_head), llm.llm.settings
        rounds = list(trace_rounds(*models, PROMPT, SamplingParams(max_tokens=48, **params), settings))
    finally:
        asyncio.run(AsyncLLM.close(llm))
    accepted = [len(one.path) - 1 for one in rounds]
    drafted = [int(one.depths.max()) for one in rounds]
    assert got == defined(accepted, drafted, min(models[1].config.depth, 15))
    assert len(set(accepted)) > 2
    assert len(set(drafted)) > 1
