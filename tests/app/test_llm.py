"""`LLM` on the embedded demo pair, and what the pair must be."""

import json

import jax
import pytest

from jetspec_jax import LLM, SamplingParams, generate, generate_tree, load_draft_head
from jetspec_jax.decode.settings import TreeSettings, serving_algorithm
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_PROMPTS, DEMO_TARGET
from jetspec_jax.llm import PLAIN_NOTICE
from train.head.export import export_head

MESSAGES = [{"role": "user", "content": "def read_lines(path):"}]


@pytest.fixture(scope="module")
def llm():
    return LLM(budget=16)


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line)["text"] for line in DEMO_PROMPTS.read_text().splitlines()]


def test_texts_and_token_ids_are_the_same_prompt(llm):
    text = "import os\n"
    params = SamplingParams(max_tokens=12)
    by_text, by_ids = llm.generate([text, llm.encode(text)], params)
    [alone] = llm.generate(text, params)
    assert by_text == by_ids == alone
    assert by_text.text == llm.target.tokenizer.decode(by_text.token_ids)


def test_the_demo_s_head_has_its_name(llm):
    assert LLM("demo", "demo", budget=16).draft_head.config == llm.draft_head.config


@pytest.mark.wide
def test_a_template_of_one_s_own(tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    llm = LLM(budget=1, chat_template=tmp_path / "own.jinja")
    assert llm.chat(MESSAGES, SamplingParams(max_tokens=1))[0].prompt == "[def read_lines(path):]"
    with pytest.raises(FileNotFoundError, match=r"none\.jinja"):
        LLM(chat_template=tmp_path / "none.jinja")


# As Gemma's templates say it.
ALTERNATING = """{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"""


class TestChatsThatCannotBe:
    @pytest.fixture
    def template(self, llm, monkeypatch):
        return lambda text: monkeypatch.setattr(llm.target.tokenizer, "chat_template", text)

    def test_the_template_s_own_words(self, llm, template):
        template(ALTERNATING)
        said = "the chat template refuses the conversation: Conversation roles must alternate"
        with pytest.raises(ValueError, match=f"^{said}$"):
            llm.chat(MESSAGES * 2)
        with pytest.raises(ValueError, match=rf"^messages\[1\]: {said}$"):
            llm.chat([MESSAGES, MESSAGES * 2])


def test_settings_are_checked_also_without_a_head():
    with pytest.raises(ValueError, match=r"budget must be in 1\.\.256"):
        LLM(DEMO_TARGET, budget=500)


@pytest.fixture(scope="class")
def plain_head(llm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "head"
    export_head("demo", folder, "jetspec", without_selector=True)
    return load_draft_head(folder, target=llm.target)


class TestWithoutATreeThatIsNamed:
    """On a CPU."""

    @pytest.fixture(autouse=True)
    def on_a_cpu(self, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")

    def test_decoding_is_plain_and_the_log_says_so_once(self, llm, caplog):
        usual, params = LLM(llm.target, llm.draft_head), SamplingParams(max_tokens=6)
        with pytest.raises(ValueError, match="prompt is empty"):
            usual.generate([[]], params)
        assert not caplog.records
        for _ in range(2):
            [completion] = usual.generate(["import os\n"], params)
        assert set(completion.accept_lengths) == {1}
        assert [one.message for one in caplog.records if "decoding plainly" in one.message] == [PLAIN_NOTICE]

    def test_any_setting_of_a_tree_asks_for_trees(self, llm, plain_head):
        settings = {"budget": 16}, {"width": 3}, {"depth": 4}, {"candidates": 9}, {"algorithm": "accum_logp"}
        for given in (*settings, {"budget": 128}):
            assert LLM(llm.target, plain_head, **given).settings == TreeSettings(**given)
            # The width is the algorithm's, and there are at least the selector's 16 candidates.
            chosen = {"candidates": 32, "width": 32, **given}
            if "algorithm" in given:
                chosen |= {"candidates": 16, "width": 7}
            if "candidates" in given:
                del chosen["width"]
            assert LLM(llm.target, llm.draft_head, **given).settings == TreeSettings(**chosen)
        assert LLM(llm.target, llm.draft_head, budget=1).settings.budget == 1

    def test_a_server_chooses_sizes_itself_on_a_gpu_alone(self, monkeypatch):
        assert serving_algorithm() is None
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert serving_algorithm() == "auto"

    def test_another_device_gets_the_default_tree(self, llm, plain_head, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert LLM(llm.target, plain_head).settings == TreeSettings()
        assert LLM(llm.target, llm.draft_head).settings == TreeSettings(width=32, candidates=32)


def test_the_pair_is_small():
    files = [f for folder in (DEMO_TARGET, DEMO_DRAFT_HEAD) for f in folder.iterdir()]
    assert sum(f.stat().st_size for f in files) <= 20_000_000


def test_the_stated_figures_are_what_the_pair_promises():
    figures = json.loads((DEMO_TARGET.parent / "evaluation.json").read_text())
    readme = (DEMO_TARGET.parent / "README.md").read_text()
    shapes = ["budget=16/width=1", *(f"budget={b}/width=7" for b in (16, 64, 128))]
    tau = [figures[f"tau/T=0/{shape}"] for shape in shapes]
    assert tau == sorted(tau)
    assert figures["tau/T=0/budget=64/width=7"] >= 3.0
    ours = figures["bits_per_byte/target"]["all"]
    baselines = [v["all"] for k, v in figures.items() if k.startswith("bits_per_byte/") and "target" not in k]
    assert ours < 0.8 * min(baselines)
    assert figures["repetition/greedy text"] < 2 * figures["repetition/held-out text"]
    for value in tau:
        assert f"{value:.2f}" in readme


@pytest.mark.wide
def test_the_pair_drafts_as_well_as_stated(llm, prompts):
    # A mis-wired head stays exact and gets about 1: only the acceptance length shows it.
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    ids = [llm.encode(prompt) for prompt in prompts[:4]]
    # As many slots as two prompts got above, which shares their programs.
    plain = generate(llm.target, ids, params, max_slots=2)
    tau = []
    for budget, width in ((16, 1), (16, 7), (64, 7)):
        shape = {"budget": budget, "width": width, "max_slots": 2}
        trees = generate_tree(llm.target, llm.draft_head, ids, params, **shape)
        assert [c.token_ids for c in trees] == [c.token_ids for c in plain]
        lengths = [n for c in trees for n in c.accept_lengths]
        tau.append(sum(lengths) / len(lengths))
    assert tau == sorted(tau), tau
    assert tau[2] >= 3.0, tau
