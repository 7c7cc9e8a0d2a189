"""The card of an exported head, and the licence of its target."""

import pytest

from tests.loading.gguf_files import CONFIGS, random_tensors, write_gguf
from train.pair.card import card_of, licence_of

REPORT = {
    "recommended_budget": 64,
    "prompts": 40,
    "prompts_not_judged": {"calibrated the head": 4, "chose the weights": 0},
    "dtype": "bfloat16",
    "device": "NVIDIA H100",
    "jax": "0.11.2",
    "rows": [
        {
            "temperature": 0.0,
            "budget": 64,
            "tau": 4.5,
            "tokens_per_second": 2500.0,
            "plain_tokens_per_second": 1000.0,
            "times_plain": 2.5,
            "equal_outputs": 33,
        }
    ],
}
PROMPTS = {"kept": {"free": 1200, "gsm8k plain": 30}, "dropped": {"free: too short": 7}, "run": 10}
PROMPTS |= {"left_out": 25, "evaluated": ["gsm8k"]}


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"README.md": "---\ntags: [a]\nlicense: apache-2.0\n---\n# A model\n"}, "apache-2.0"),
        (
            {"README.md": "---\ntags: [a]\n---\nlicense: none of it\n", "LICENSE": "\n MIT License\n"},
            "MIT License",
        ),
        ({"README.md": "# A model\n"}, None),
        ({}, None),
    ],
)
def test_the_licence_of_a_folder(tmp_path, files, licence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert licence_of(tmp_path) == licence


def test_the_licence_of_a_gguf_file(tmp_path):
    raw = CONFIGS["qwen3"]
    for licence in ("apache-2.0", None):
        path = tmp_path / f"{licence}.gguf"
        write_gguf(path, raw, random_tensors(raw), metadata={"general.license": licence})
        assert licence_of(path) == licence


def test_a_card_has_figures_commands_and_the_licence():
    text = card_of("owner/name", "apache-2.0", 11, REPORT, PROMPTS)
    assert text.startswith('---\nlicense: "apache-2.0"\n')
    for part in (
        "jetspec-jax serve --model owner/name --draft-head FOLDER --budget 64\n",
        '"model": "FOLDER/without_selector", "num_speculative_tokens": 11}',
        "| 0 | 64 | 4.50 | 2500 | 1000 | 2.50 | 33 of 40 |",
        "40 held-out prompts, one at a time; bfloat16, NVIDIA H100, JAX 0.11.2.",
        "not judged: 4 calibrated the head.",
        "1,230 prompts, held-out ones included (1,200 free, 30 gsm8k plain). 7 others were dropped",
        "whose files name the licence apache-2.0.",
    ):
        assert part in text
    assert "plain decoding was as fast" not in text


def test_a_licence_without_an_identifier_of_the_hub_is_named():
    front = card_of("owner/name", "MIT License", 11, REPORT, PROMPTS).split("---\n")[1]
    assert front.splitlines()[:2] == ["license: other", 'license_name: "MIT License"']


def test_a_card_says_what_is_not_known_and_what_is_not_worth_it():
    text = card_of("owner/name", None, 11, {**REPORT, "recommended_budget": 1}, PROMPTS)
    assert text.startswith("# A draft head for owner/name\n")
    assert "name no licence: see its page before you share this head" in text
    assert "plain decoding was as fast as trees, or faster" in text
    text = card_of("owner/name", None, 11, REPORT, {**PROMPTS, "evaluated": []})
    assert "7 others were dropped; 25 were not needed." in text
