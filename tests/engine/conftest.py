"""The tiny pair that most modules serve, of full attention only; some make another under the same name."""

import pytest

from tests.decode.tiny import TINY, random_head, random_target, with_windows, word_tokenizer

CONFIG = with_windows(TINY, None)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0)


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 0)


@pytest.fixture(scope="module")
def models(head):
    return random_target(CONFIG, 0, tokenizer=word_tokenizer(CONFIG.vocab_size)), head
