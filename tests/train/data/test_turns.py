"""Golden conversations: what of them is learnt, token by token, by each family's rules of writing."""

import numpy as np
import pytest

from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET
from tests.train.data.templates import CHANNELS, GEMMA, LLAMA, QWEN
from train.data.prompts import Entry
from train.data.rendering import Encoder


def user(content):
    return {"role": "user", "content": content}


def assistant(content, thought=None, *calls):
    message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message


TALK = [user("a b"), assistant("c d"), user("e"), assistant("f g")]
THINKING = [user("a b"), assistant("c d", "x y"), user("e"), assistant("f g", "z")]
CALL = {"name": "look", "arguments": {"at": "k"}}
CALLING = [
    user("a b"),
    assistant(None, "x y", CALL),
    {"role": "tool", "content": "r"},
    assistant("c d", "z"),
    user("e"),
    assistant("f g"),
]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.fixture
def encoder():
    return Encoder(load_tokenizer(DEMO_TARGET))


def marked(encoder, document):
    """A document's text with each run of tokens to learn in «»."""
    pieces, tokens = [], document.tokens.tolist()
    edges = np.flatnonzero(np.diff(document.learn.astype(int), prepend=0, append=0)).tolist()
    for begin, end in zip([0, *edges], [*edges, len(tokens)], strict=True):
        text = encoder.tokenizer.decode(tokens[begin:end], skip_special_tokens=False)
        pieces.append(f"«{text}»" if begin in edges[::2] else text)
    return "".join(pieces)


def golden(encoder, template, messages, tools=None, **more):
    encoder.tokenizer.chat_template = template
    documents = encoder.documents(Entry("f:3", "messages", messages, tools, **more))
    for document in documents:
        # The masks are of the tokens that the whole text has.
        text = encoder.tokenizer.decode(document.tokens.tolist(), skip_special_tokens=False)
        ids = encoder.tokenizer.encode(text, add_special_tokens=False)
        assert document.tokens.tolist() == ids
    return [marked(encoder, document) for document in documents]


def test_several_turns_in_one_document(encoder):
    assert golden(encoder, LLAMA, TALK) == [
        "<|im_start|>user<|endoftext|>a b<|im_end|><|im_start|>assistant<|endoftext|>«c d<|im_end|>»"
        "<|im_start|>user<|endoftext|>e<|im_end|><|im_start|>assistant<|endoftext|>«f g<|im_end|>»"
    ]
    assert golden(encoder, GEMMA, TALK) == [
        "<|im_start|>user\na b<|im_end|>\n<|im_start|>model\n«c d<|im_end|>»\n"
        "<|im_start|>user\ne<|im_end|>\n<|im_start|>model\n«f g<|im_end|>»\n"
    ]


def test_dropped_thoughts_are_learnt_where_they_were_written(encoder):
    first = "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    assert golden(encoder, QWEN, THINKING) == [
        f"{first}«<think>\nx y\n</think>\n\nc d<|im_end|>»\n",
        f"{first}c d<|im_end|>\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\nz\n</think>\n\nf g<|im_end|>»\n",
    ]
    first = "<|im_start|>user\na b<|im_end|><|im_start|>assistant"
    assert golden(encoder, CHANNELS, THINKING) == [
        f"{first}«|analysis\nx y<|im_end|><|im_start|>assistant|final\nc d<|im_end|>»",
        f"{first}|final\nc d<|im_end|><|im_start|>user\ne<|im_end|><|im_start|>assistant"
        "«|analysis\nz<|im_end|><|im_start|>assistant|final\nf g<|im_end|>»",
    ]


def test_calls_and_their_results(encoder):
    """The thoughts before a call stay until the next question: both turns share a document."""
    tools = '<|im_start|>system\n[{"type": "function", "function": {"name": "look"}}]<|im_end|>\n'
    first = f"{tools}<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    call = '<tool_call>look {"at": "k"}</tool_call><|im_end|>'
    result = "\n<|im_start|>user\n<tool_response>r</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert golden(encoder, QWEN, CALLING, TOOLS) == [
        f"{first}«<think>\nx y\n</think>\n\n{call}»{result}«<think>\nz\n</think>\n\nc d<|im_end|>»\n",
        f"{first}{call}{result}c d<|im_end|>\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nf g<|im_end|>»\n",
    ]


def test_an_answer_that_its_length_ended_has_no_end_mark(encoder):
    assert golden(encoder, LLAMA, TALK, cut=True) == [
        "<|im_start|>user<|endoftext|>a b<|im_end|><|im_start|>assistant<|endoftext|>«c d<|im_end|>»"
        "<|im_start|>user<|endoftext|>e<|im_end|><|im_start|>assistant<|endoftext|>«f g»"
    ]


def test_arguments_of_a_conversation_reach_its_template(encoder):
    template = "{{ word }}" + LLAMA
    encoder.tokenizer.chat_template = template
    entry = Entry("f:3", "messages", TALK[:2], template_arguments={"word": "w"})
    assert marked(encoder, *encoder.documents(entry)).startswith("w<|im_start|>user")
    reserved = Entry("f:3", "messages", TALK[:2], template_arguments={"tokenize": True})
    with pytest.raises(ValueError, match="f:3: tokenize cannot be template arguments"):
        encoder.documents(reserved)


def test_a_completion_is_learnt_after_its_prompt(encoder):
    [document] = encoder.documents(Entry("f:3", "prompt", "a b", answer=" c"))
    assert marked(encoder, document) == "a b« c»"
    assert encoder.prompt(Entry("f:3", "prompt", "a b", answer=" c")).tolist() == encoder.tokenizer.encode(
        "a b"
    )


def test_every_turn_is_asked_with_its_own_history(encoder):
    encoder.tokenizer.chat_template = QWEN
    entry = Entry("f:3", "messages", [*CALLING, user("h")], TOOLS)

    def texts(prompts):
        return [encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in prompts]

    prompts = texts(encoder.prompts(entry, every=True))
    assert [text.count("<|im_start|>") for text in prompts] == [3, 5, 7, 9]
    assert [text.count("<think>") for text in prompts] == [0, 1, 0, 0]
    assert all(text.endswith("<|im_start|>assistant\n") for text in prompts)
    assert texts(encoder.prompts(entry)) == prompts[-1:]
    # All requests of a conversation have one root, and another beginning has another.
    roots = {encoder.root(Entry("f", "messages", entry.value[:end], TOOLS)) for end in (1, 2, 4, 7)}
    assert len(roots) == 1
    assert encoder.root(Entry("f", "messages", TALK[:1], TOOLS)) in roots
    assert encoder.root(Entry("f", "messages", [user("other")], TOOLS)) not in roots


@pytest.mark.parametrize(
    ("template", "messages", "tools", "complaint"),
    [
        (LLAMA, THINKING, None, "does not write the thoughts of message 1"),
        (LLAMA, TALK, TOOLS, "the chat template does not write tools"),
        (GEMMA, [{"role": "system", "content": "s"}, *TALK], None, "refuses .*roles must alternate"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", TALK, None, "not write the content of message 1"),
    ],
)
def test_what_a_template_cannot_write_is_refused_by_its_line(encoder, template, messages, tools, complaint):
    encoder.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"^f:3: .*{complaint}"):
        encoder.documents(Entry("f:3", "messages", messages, tools))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('what is ' + messages[0].content) }}",
        "{{ messages[0].content | int(default='x') + messages }}",
        "{{ {}[messages[0].content].other.more }}",
    ],
)
def test_a_template_s_error_repeats_no_text(encoder, template):
    encoder.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"^f:3: the chat template ") as error:
        encoder.documents(Entry("f:3", "messages", [user("opensesame"), assistant("b")]))
    assert "opensesame" not in str(error.value)
