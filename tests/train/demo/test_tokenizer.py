"""The tokenizer and the token streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from jetspec_jax.config import parse_model_config
from jetspec_jax.models import build, weights_of
from train.demo.corpus import LIBRARY, TRAIN, CorpusManifest, read_corpus
from train.demo.target import target_json, write_target
from train.demo.tokenizer import END_OF_TEXT, SPECIAL, Tokenizer
from train.demo.tokens import concatenate, draw_windows, encode_split, line_starts

TEXTS = [
    "def f(self, x_1):\n\tif x:\n\t    return  12345 != x  # done\n\n\n",
    "  leading, trailing  \n",
    "é 漢字 🐍\r\n\x00\x7f",
    f"print('{END_OF_TEXT}')\n",
    "",
]


@pytest.fixture(scope="module")
def documents(corpus, recipe):
    return read_corpus(corpus, CorpusManifest.read(recipe.manifest_path()))


@pytest.fixture(scope="module")
def tokenizer(documents, recipe):
    return Tokenizer.train(documents.values(), recipe.vocab_size)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_never_becomes_a_special_token(tokenizer):
    specials = [tokenizer.id_of(token) for token in SPECIAL]
    assert not set(tokenizer.encode("".join(SPECIAL))) & set(specials)
    assert specials == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="absent"):
        tokenizer.id_of("absent")


def test_text_cut_at_lines_tokenises_alike(tokenizer):
    lines = ["def get_path_0(self, line):", "\n", "    if line is None:", "\n", "        return 0", "\n"]
    cut = [i for line in ("".join(lines[:2]), "".join(lines[4:])) for i in tokenizer.encode("x\n" + line)]
    whole = tokenizer.encode("x\n" + "".join(lines[:2])) + tokenizer.encode("x\n" + "".join(lines[4:]))
    assert cut == whole
    assert tokenizer.encode("".join(lines[:1])) + tokenizer.encode("\n") == tokenizer.encode(
        "".join(lines[:2])
    )


def test_transformers_reads_the_same_tokenizer(tokenizer, recipe, tmp_path):
    write_target(tmp_path / "target", recipe, tokenizer, _weights(recipe))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "target")
    for text in TEXTS[:3]:
        assert loaded(text)["input_ids"] == tokenizer.encode(text)
        assert loaded.decode(tokenizer.encode(text)) == text
    assert loaded.eos_token_id == tokenizer.id_of(END_OF_TEXT)
    assert "<|im_start|>" in loaded.chat_template


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="not 5000"):
        Tokenizer.train(["a few words"], 5000)


def _weights(recipe):
    return weights_of(build(parse_model_config(target_json(recipe)), rngs=nnx.Rngs(0)))


def test_library_code_is_repeated(tokenizer, documents):
    once, twice = (encode_split(tokenizer, documents, TRAIN, library_repeats=n) for n in (1, 2))
    library = [x for s, x in documents.items() if (s.split, s.kind) == (TRAIN, LIBRARY)]
    assert len(twice) - len(once) == sum(len(tokenizer.encode(x)) + 1 for x in library)


def test_windows_begin_anywhere_and_lie_inside():
    stream = jnp.arange(10, dtype=jnp.uint16)
    windows = np.asarray(draw_windows(jax.random.key(0), stream, 200, 4))
    assert (np.diff(windows, axis=1) == 1).all()
    assert set(windows[:, 0]) == set(range(7))
    with pytest.raises(ValueError, match="no window of 11"):
        draw_windows(jax.random.key(0), stream, 1, 11)


def test_lines_start_after_newlines():
    stream = concatenate([[5, 9, 6, 9, 9, 7]], 0)
    assert stream.tolist() == [0, 5, 9, 6, 9, 9, 7]
    assert line_starts(stream, np.array([9]), before_end=2).tolist() == [3, 5]
