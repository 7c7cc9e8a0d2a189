"""Callers that have set a mesh of their own, by `jax.set_mesh`, and callers in a traced function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jetspec_jax import LLM, SamplingParams, generate, generate_tree, hidden_states, load_target, logits
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.compilations import compilations
from tests.decode.tiny import TINY, random_head, random_target, save_tiny_pair, with_windows, word_tokenizer

CONFIG = with_windows(TINY, None)
PROMPT, PARAMS = [3, 1, 4, 1, 5], SamplingParams(max_tokens=12, ignore_eos=True)
TREE = {"budget": 16, "width": 3}


@pytest.fixture(params=[AxisType.Explicit, AxisType.Auto], ids=str)
def mesh(request):
    return jax.make_mesh((1,), ("data",), axis_types=(request.param,))


def completed(pieces):
    list(pieces)
    return pieces.completion.token_ids


def test_all_entries_work_and_compile_nothing_more(mesh):
    target, head = random_target(CONFIG, 0, tokenizer=word_tokenizer(64)), random_head(CONFIG, 0)
    expected = generate(target, [PROMPT], PARAMS)[0].token_ids
    calls = {
        "tree": lambda: generate_tree(target, head, [PROMPT], PARAMS, **TREE)[0].token_ids,
        "plain": lambda: generate(target, [PROMPT], PARAMS)[0].token_ids,
        "trace": lambda: (
            [list(trace := trace_rounds(target, head, PROMPT, PARAMS)), trace.completion][1].token_ids
        ),
    }
    whole = np.asarray(logits(target, [PROMPT]))
    with LLM(target, head, **TREE) as llm:
        llm.warm_up()
        calls["stream"] = lambda: completed(llm.stream(PROMPT, PARAMS))
        calls["llm"] = lambda: llm.generate([PROMPT], PARAMS)[0].token_ids
        for call in calls.values():
            assert call() == expected
        with compilations() as seen, jax.set_mesh(mesh):
            assert {name: call() for name, call in calls.items()} == dict.fromkeys(calls, expected)
            np.testing.assert_array_equal(np.asarray(logits(target, [PROMPT])), whole)
        assert seen == []


def test_what_is_loaded_there_decodes_there_and_elsewhere(mesh, tmp_path):
    path, _ = save_tiny_pair(tmp_path)
    expected = generate(load_target(path, dtype=jnp.float32), [PROMPT], PARAMS)
    with jax.set_mesh(mesh):
        target = load_target(path, dtype="float32")
        with LLM(path, dtype=jnp.float32) as llm:
            assert llm.generate([PROMPT], PARAMS) == expected
        assert generate(target, [PROMPT], PARAMS) == expected
    assert generate(target, [PROMPT], PARAMS) == expected


def test_a_traced_caller_is_told_what_can_be_traced():
    target, head = random_target(CONFIG, 0), random_head(CONFIG, 0)
    for name, call in {
        "generate": lambda: generate(target, [PROMPT], PARAMS),
        "generate_tree": lambda: generate_tree(target, head, [PROMPT], PARAMS),
        "hidden_states": lambda: hidden_states(target, [PROMPT]),
        "LLM": lambda: LLM(target),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name} cannot be traced, as by jax.jit: .*TreeDecoder"):
            jax.jit(lambda number, call=call: call())(1)
