"""The forms in which `LLM` is called: prompts, chats, several completions, settings, and what is refused."""

import dataclasses
import functools
import inspect

import numpy as np
import pytest
from tqdm import tqdm

import jetspec_jax
from jetspec_jax import (
    LLM,
    AsyncLLM,
    SamplingParams,
    StructuredOutputsParams,
    draft_logits,
    generate,
    generate_tree,
    logits,
    sampling_params,
    tree_logits,
    vllm_names,
)
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.tiny import TINY, flat, random_head, random_target, with_windows, word_tokenizer

CONFIG = with_windows(TINY, None)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.sign %}{{ sign }}{% endif %}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}x{% endif %}"
TREES = {"budget": 16, "width": 3, "max_slots": 2}


@pytest.fixture(scope="module")
def target():
    tokenizer = word_tokenizer(CONFIG.vocab_size)
    tokenizer.chat_template = TEMPLATE
    return random_target(CONFIG, 0, eos=(5,), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 0)


@pytest.fixture(scope="module")
def llm(target, head):
    return LLM(target, head, **TREES)


@pytest.mark.wide
def test_several_completions_of_a_prompt(llm, target, head):
    prompts = ["ab", {"prompt_token_ids": [3, 4, 5]}, [6]]
    params = [
        SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=12),
        SamplingParams(max_tokens=9),
        SamplingParams(temperature=0.8, n=2, max_tokens=None, stop="a"),
    ]
    params[2] = dataclasses.replace(params[2], seed=2**63)
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs) for output in outputs] == [3, 1, 2]
    assert [output.prompt for output in outputs] == ["ab", None, None]
    assert outputs[0].num_cached_tokens == 0
    assert outputs[0].finished
    with pytest.raises(AttributeError, match=r"the prompt has 3 completions: use outputs\[i\]\.text"):
        _ = outputs[0].text
    assert outputs[1].text == outputs[1].outputs[0].text
    assert not hasattr(outputs[1], "texts")
    trees = flat(outputs)
    assert [one.index for one in trees] == [0, 1, 2, 0, 0, 1]
    assert [one.prompt for one in trees] == ["ab"] * 3 + [None] * 3
    assert [one.prompt_token_ids for one in trees] == [[0, 1]] * 3 + [[3, 4, 5]] + [[6]] * 2

    def tokens(completions):
        return [
            (one.prompt_token_ids, one.index, one.token_ids, one.text, one.finish_reason)
            for one in completions
        ]

    assert tokens(flat(generate(target, prompts, params, max_slots=2))) == tokens(trees)
    assert tokens(flat(generate_tree(target, head, prompts, params, **TREES))) == tokens(trees)
    # Each is what a request of its own seed gets.
    alone = [(prompt, child) for prompt, own in zip(prompts, params, strict=True) for child in own.each()]
    assert alone[0][1].seed == 7
    again = llm.generate([prompt for prompt, _ in alone], [child for _, child in alone])
    assert [one.token_ids for one in again] == [one.token_ids for one in trees]
    assert len({tuple(one.token_ids) for one in trees[:3]}) == 3
    # Without a seed too they are not all the same.
    drawn = llm.generate("ab", SamplingParams(temperature=1.0, n=4, max_tokens=12))
    assert len({tuple(one.token_ids) for one in drawn[0].outputs}) > 1


def test_chats_are_what_the_template_says(llm):
    params = SamplingParams(max_tokens=4)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chats = [
        [{"role": "user", "content": "ab"}],
        [{"role": "user", "content": parts[:1]}, {"role": "assistant", "content": "b"}],
    ]
    answers = llm.chat(chats, params)
    assert [one.prompt for one in answers] == ["abx", "abx"]
    assert (
        answers
        == llm.generate(["abx"] * 2, params)
        == [*llm.chat(chats[0], params), *llm.chat(chats[1], params)]
    )
    [unprompted] = llm.chat(chats[0], params, add_generation_prompt=False)
    assert unprompted.prompt == "ab"
    [continued] = llm.chat(chats[1], params, continue_final_message=True)
    assert (continued.prompt, continued.token_ids) == ("ab", llm.generate("ab", params)[0].token_ids)
    signed = [{"role": "user", "content": "a", "sign": True}]
    [completion] = llm.chat(signed, params, chat_template_kwargs={"sign": "b"}, use_tqdm=False)
    assert completion.prompt == "abx"
    assert [len(each.outputs) for each in llm.chat(chats, dataclasses.replace(params, n=2))] == [2, 2]


def test_bars_of_one_s_own(llm, capsys):
    calls = []

    class Bar(tqdm):
        def update(self, n=1):
            calls.append(n)
            return super().update(n)

        def close(self):
            calls.append("closed")
            super().close()

    params = SamplingParams(max_tokens=2, n=2)
    llm.generate("ab", params, use_tqdm=functools.partial(Bar, disable=True))
    assert sum(calls[: calls.index("closed")]) == 2
    for use in (True, False):
        assert len(llm.generate("ab", params, use_tqdm=use)[0].outputs) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("nothing_runs", "no_type_checks")
class TestRefused:
    def test_keywords_that_belong_elsewhere(self, llm):
        chat = [{"role": "user", "content": "ab"}]
        for call, given in ((llm.generate, "ab"), (llm.chat, chat), (llm.stream, "ab")):
            with pytest.raises(
                TypeError,
                match=r"no argument temperature; put it into SamplingParams.*=0\.7\)",
            ):
                call(given, temperature=0.7)
            with pytest.raises(TypeError, match="no argument lora_request"):
                call(given, SamplingParams(), lora_request=None)
        with pytest.raises(TypeError, match=r"chat_template_kwargs=\{"):
            llm.chat(chat, enable_thinking=False)
        with pytest.raises(TypeError, match=r'as a prompt: \{"prompt_token_ids": '):
            llm.generate(prompt_token_ids=[[1]], prompts=None)
        with pytest.raises(TypeError, match="positional argument"):
            llm.generate("ab", SamplingParams(), True)
        with pytest.raises(TypeError, match="no argument add_genaration_prompt"):
            llm.chat(chat, add_genaration_prompt=False)

    def test_arguments_of_vllm_s(self, llm):
        for kind, name in ((LLM, "LLM"), (AsyncLLM, "AsyncLLM")):
            said = f"{name} has no argument"
            with pytest.raises(
                TypeError, match=f"^{said} gpu_memory_utilization; set XLA_PYTHON_CLIENT_MEM_F"
            ):
                kind(gpu_memory_utilization=0.9)
            with pytest.raises(TypeError, match=f"^{said} device; set JAX_PLATFORMS=cpu"):
                kind(device="cpu")
            with pytest.raises(TypeError, match=f"zzz; nothing here .*; {said} widht; did you mean width"):
                kind(zzz=1, widht=2)
            for argument in ("task", "logits_processors", "temporal"):
                with pytest.raises(TypeError, match=f"^{said} {argument}; (?!leave it out)"):
                    kind(**{argument: "embed"})
            with pytest.raises(ValueError, match="capacity or max_model_len, which are two names of one"):
                kind(max_model_len=100, capacity=100)
        with pytest.raises(TypeError, match=r"modles; did you mean model\?"):  # not *models
            AsyncLLM(modles="demo")
        with pytest.raises(TypeError, match="max_token; did you mean max_tokens"):
            SamplingParams(max_token=2)
        with pytest.raises(
            TypeError, match=r"^StructuredOutputsParams has no argument jsn; did you mean json"
        ):
            StructuredOutputsParams(jsn="{}")

    @pytest.mark.parametrize("name", vllm_names.IMPORTS)
    def test_names_of_vllm_s(self, name):
        with pytest.raises(ImportError, match=f"^jetspec_jax has no {name}: "):
            exec(f"from jetspec_jax import {name}")
        assert not hasattr(jetspec_jax, f"{name}s")

    @pytest.mark.parametrize("name", vllm_names.ATTRIBUTES)
    def test_attributes_of_vllm_s(self, llm, name):
        for thing, kind in ((llm, "LLM"), (LLM, "LLM"), (AsyncLLM, "AsyncLLM")):
            assert not hasattr(thing, name)
            with pytest.raises(AttributeError, match=f"^{kind} has no {name}: .*") as error:
                getattr(thing, name)
            assert vllm_names.ATTRIBUTES[name] in str(error.value)

    def test_the_module_of_sampling_parameters(self):
        assert sampling_params.SamplingParams is SamplingParams
        assert sampling_params.StructuredOutputsParams is StructuredOutputsParams
        with pytest.raises(ImportError, match=r"sampling_params has no GuidedDecodingParams: use Structured"):
            from jetspec_jax.sampling_params import GuidedDecodingParams  # noqa: F401
        with pytest.raises(ImportError, match="cannot import name 'LLM'"):
            from jetspec_jax.sampling_params import LLM  # noqa: F401

    def test_no_sentence_is_about_what_there_is(self):
        for call, sentences in (
            (LLM, vllm_names.ENGINE),
            (LLM.generate, vllm_names.CALLS),
            (LLM.chat, vllm_names.CALLS),
            (SamplingParams, vllm_names.SAMPLING),
            (StructuredOutputsParams, vllm_names.STRUCTURED),
        ):
            assert not {*inspect.signature(call).parameters} & {*sentences}
        assert not {*jetspec_jax.__all__} & {*vllm_names.IMPORTS}

    @pytest.mark.parametrize("use_tqdm", [None, 1, "yes"])
    def test_use_tqdm(self, llm, use_tqdm):
        with pytest.raises(TypeError, match="use_tqdm must be True or False"):
            llm.generate("ab", use_tqdm=use_tqdm)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"add_generation_prompt": 1}, "add_generation_prompt must be True or False"),
            ({"continue_final_message": "yes"}, "continue_final_message must be True or False"),
            ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs must be a mapping"),
            ({"sampling_params": {"n": 2}}, "sampling_params must be SamplingParams or a list"),
        ],
        ids=str,
    )
    def test_settings_of_a_chat(self, llm, arguments, message):
        with pytest.raises(TypeError, match=message):
            llm.chat([{"role": "user", "content": "ab"}], **arguments)

    def test_how_the_prompts_of_chats_end(self, llm):
        chat, begun = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}
        with pytest.raises(ValueError, match="cannot both be true"):
            llm.chat([chat, begun], add_generation_prompt=True, continue_final_message=True)
        with pytest.raises(ValueError, match=r"^messages\[1\]: continue_final_message needs .* not 'user'"):
            llm.chat([[chat, begun], [chat]], continue_final_message=True)

    def test_templates_of_models_that_are_loaded(self, llm, target):
        with pytest.raises(
            ValueError, match="chat_template has no effect on a target that is loaded already"
        ):
            LLM(target, chat_template=TEMPLATE)
        with pytest.raises(TypeError, match=r"all chats of an LLM have one template: LLM\(chat_template=…\)"):
            llm.chat([{"role": "user", "content": "ab"}], chat_template=TEMPLATE)

    def test_several_completions_cannot_be_followed(self, llm, target, head):
        params = SamplingParams(n=2)
        for call in (lambda: llm.stream("ab", params), lambda: trace_rounds(target, head, [1], params)):
            with pytest.raises(ValueError, match="n must be 1 for a stream or a trace, not 2"):
                call()
        with pytest.raises(TypeError, match="a prompt must be"):
            llm.stream(None)
        with pytest.raises(TypeError, match="no integer"):
            llm.stream(["ab", "ab"])

    def test_one_target(self, target):
        assert LLM(model=target).target is LLM(target=target).target is LLM(target).target is target
        for given in ({"target": target}, {"target": "demo"}):
            with pytest.raises(ValueError, match="give the target once"):
                LLM(**given, model="demo")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("target", value) for value in (None, 5, b"demo", ["demo"])),
            *(("model", value) for value in (None, 5)),
            *(("draft_head", value) for value in (5, ["demo"])),
            *(
                (name, value)
                for name in ("budget", "width", "candidates")
                for value in ("16", 16.0, True, [16])
            ),
            *(("depth", value) for value in ("3", 3.0, False)),
            *(("algorithm", value) for value in (5, ["chain"], object)),
            *(("capacity", value) for value in ("64", 64.0, True)),
            *(("max_slots", value) for value in ("2", 2.0, True)),
            *(("dtype", value) for value in (None, 5)),
            *(("implementation", value) for value in (5, ["xla"])),
            *(("ignore_config_keys", value) for value in ("key", 5, None)),
            *(("compilation_cache", value) for value in (None, 5, True)),
            *(("chat_template", value) for value in (5, b"{{ messages }}")),
        ],
        ids=str,
    )
    def test_types_of_settings(self, target, head, name, value):
        arguments = {"draft_head": head, name: value}
        arguments |= {} if name in ("target", "model") else {"target": target}
        with pytest.raises(TypeError, match=f"{name.removeprefix('draft_')}|target|algorithm") as raised:
            LLM(**arguments)
        assert " must be " in str(raised.value) or " is its name" in str(raised.value)
        if name in inspect.signature(generate_tree).parameters and name not in ("target", "draft_head"):
            with pytest.raises(TypeError, match=r" must be | is its name"):
                generate_tree(target, head, [[1]], SamplingParams(max_tokens=4), **{name: value})

    def test_hints_of_calls_are_refused_by_name(self, llm, target, head):
        for call in (llm.generate, llm.stream, functools.partial(generate_tree, target, head)):
            with pytest.raises(TypeError, match="no argument routing; give the hints to the tree algorithm"):
                call([1], routing={"task": "math"})

    def test_models_that_are_none(self, target, head):
        for call in (
            lambda: generate(None, [[1]]),
            lambda: generate("demo", [[1]]),
            lambda: generate_tree(head, head, [[1]]),
            lambda: logits(head, [[1]]),
        ):
            with pytest.raises(
                TypeError, match="the target must be a Target, as load_target returns it, not "
            ):
                call()
        for call in (
            lambda: generate_tree(target, None, [[1]]),
            lambda: generate_tree(target, target, [[1]]),
            lambda: draft_logits(target, None, [[1]]),
        ):
            with pytest.raises(
                TypeError, match="the draft head must be a Head, as load_draft_head returns it"
            ):
                call()
        with pytest.raises(TypeError, match="tree must be a TokenTree"):
            tree_logits(target, [[1]], [[1]])

    @pytest.mark.parametrize(
        ("ids", "error", "message"),
        [
            (None, TypeError, r"must be rows of token ids, \[B, T\], not None"),
            ([1, 2], TypeError, r"token_ids\[0\] must be a list of token ids, not 1"),
            (np.ones((1, 2)), TypeError, "float64"),
            ([[1, 2], [3]], ValueError, "rows of one length, not of 1, 2 tokens"),
            ([[1, 64]], ValueError, r"token id 64 in token_ids\[0\]"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_ids_of_forwards(self, target, head, ids, error, message):
        for call in (logits, lambda target, ids: draft_logits(target, head, ids)):
            with pytest.raises((TypeError, ValueError), match=message) as raised:
                call(target, ids)
            assert type(raised.value) is error


def test_representations(llm, target, head):
    assert repr(target) == "Target(qwen3, 1 layer of 32, vocabulary of 64, float32, with a tokenizer)"
    assert repr(head) == "Head(1 layer of 32, vocabulary of 64, block size 8, causal)"
    assert repr(llm) == f"LLM({target!r}, {head!r}, budget=16)"
    assert repr(LLM(target)) == f"LLM({target!r}, None, plain decoding)"
    [output] = llm.generate([1], SamplingParams(max_tokens=4, ignore_eos=True))
    [completion] = output.outputs
    assert repr(output) == f"RequestOutput([{completion!r}])"
    text = (
        f"Completion(text={completion.text!r}, 4 tokens, finish_reason='length', {completion.rounds} rounds, "
    )
    assert repr(completion) == text + f"{completion.mean_acceptance_length:.2f} tokens a round)"
