"""Rows and messages that say themselves what is learnt, and keys that nobody knows."""

import json

import pytest

from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.serve.chat import ChatRequest
from jetspec_jax.serve.completions import CompletionRequest
from jetspec_jax.serve.messages import Message
from tests.train.data.templates import LLAMA, QWEN
from tests.train.folders import learnt, read
from train.command import main
from train.data import keys, rendering
from train.data.keys import check_ignored
from train.data.messages import EXCLUDING, INCLUDING, WEIGHT
from train.data.prompts import Dropped, Entry, read_entries
from train.data.rendering import Encoder

ASK = {"role": "user", "content": "a b"}
WRONG, RIGHT = {"role": "assistant", "content": "c d"}, {"role": "assistant", "content": "f g"}
#: Every way to say that a turn is not learnt, and that it is.
WAYS = [(key, out, not out) for key in (WEIGHT, *INCLUDING) for out in (0, 0.0, False)]
WAYS += [(key, out, 0) for key in EXCLUDING for out in (1, True)]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(load_tokenizer(DEMO_TARGET))


def entries(tmp_path, *rows, ignored=()):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dropped = Dropped()
    found = read_entries(path, dropped=dropped, ignore_data_keys=ignored)
    return found, [reason.removeprefix(f"{path}:") for reason in dropped.reasons]


def taught(encoder, entry):
    return [
        [text.strip() for text in learnt(encoder.tokenizer, document)]
        for document in encoder.documents(entry)
    ]


class TestTurns:
    @pytest.mark.parametrize(("key", "out", "within"), WAYS)
    def test_an_excluded_turn_is_history_and_not_learnt(self, tmp_path, encoder, key, out, within):
        messages = [ASK, WRONG | {key: out}, ASK | {key: None}, RIGHT | {key: within}]
        said = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d", key: out}, ASK, RIGHT]
        log = {"request": {"model": "m", "messages": messages[:3]}, "response": answered(RIGHT)}
        found, dropped = entries(tmp_path, {"messages": messages}, {"conversations": said}, log)
        assert dropped == []
        whole = encoder.documents(Entry("f", "messages", [ASK, WRONG, ASK, RIGHT]))[0].tokens
        for entry in found:
            assert taught(encoder, entry) == [["f g"]]
            assert encoder.documents(entry)[0].tokens.tolist() == whole.tolist()

    def test_a_template_never_sees_the_keys(self, tmp_path, encoder, monkeypatch):
        more = "{% for m in messages %}{{ m.weight }}{{ m.train }}{% endfor %}"
        monkeypatch.setattr(encoder.tokenizer, "chat_template", LLAMA + more)
        found, _ = entries(tmp_path, {"messages": [ASK, WRONG | {"train": False}, ASK, RIGHT]})
        assert "0" not in encoder.tokenizer.decode(encoder.prompt(found[0]))

    def test_turns_of_a_template_that_drops_thoughts(self, tmp_path, encoder, monkeypatch):
        monkeypatch.setattr(encoder.tokenizer, "chat_template", QWEN)
        thinking = [m | {"reasoning_content": "x"} for m in (WRONG, RIGHT)]
        row = {"messages": [ASK, thinking[0] | {"weight": 0}, ASK, thinking[1]]}
        [entry], _ = entries(tmp_path, row)
        assert taught(encoder, entry) == [["<think>\nx\n</think>\n\nf g"]]

    def test_the_target_answers_no_excluded_turn(self, tmp_path, encoder):
        out = {"weight": 0}
        rows = [[ASK, WRONG | out, ASK, RIGHT], [ASK, RIGHT, ASK, WRONG | out], [ASK, WRONG | out, ASK]]
        found, _ = entries(tmp_path, *({"messages": row} for row in rows))
        last = [encoder.prompts(found[number])[0].tolist() for number in (0, 2)]
        assert last[0] == last[1] == encoder.prompt(found[0]).tolist()
        assert [prompt.tolist() for prompt in encoder.prompts(found[0], every=True)] == [last[0]]
        assert [prompt.tolist() for prompt in encoder.prompts(found[2], every=True)] == [last[0]]
        assert len(encoder.prompts(found[1], every=True)) == 1
        with pytest.raises(ValueError, match=r"rows\.jsonl:2: what the target would answer is excluded"):
            encoder.prompts(found[1])

    def test_nothing_is_left(self, tmp_path, encoder):
        [entry], _ = entries(tmp_path, {"messages": [ASK, WRONG | {"weight": 0}]})
        with pytest.raises(ValueError, match="all messages of the assistant are excluded from learning"):
            encoder.documents(entry)

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            (RIGHT | {"weight": 0.5}, '"weight" of message 1 must be 0 or 1, or false or true, not 0.5'),
            (RIGHT | {"train": "no"}, "\"train\" of message 1 must be 0 or 1, or false or true, not '…'"),
            (RIGHT | {"weight": 1, "train": False}, "weight and train of message 1 contradict each other"),
            (
                ASK | {"train": True},
                '"train" of message 1, a message of the user, includes it, and only messages',
            ),
        ],
    )
    def test_what_cannot_be_obeyed_is_refused_by_its_line(self, tmp_path, message, reason):
        found, [said] = entries(tmp_path, {"messages": [ASK, message]}, {"text": "a"})
        assert [entry.value for entry in found] == ["a"]
        assert said.startswith(f"1: {reason}")


def answered(message):
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


class TestRows:
    @pytest.mark.parametrize(("key", "out", "within"), WAYS)
    @pytest.mark.parametrize(
        "row",
        [
            {"text": "a"},
            {"prompt": "a"},
            {"messages": [ASK, RIGHT]},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"request": {"messages": [ASK]}, "response": answered(RIGHT)},
            {"custom_id": "a", "body": {"messages": [ASK]}},
        ],
        ids=lambda row: next(iter(row)),
    )
    def test_an_excluded_row_is_dropped_and_named(self, tmp_path, row, key, out, within):
        found, dropped = entries(tmp_path, row | {key: out}, row | {key: within}, {"text": "b"})
        assert len(found) == 2
        assert dropped == ["1: a key of the row excludes it from learning"]

    def test_without_learning_no_row_is_excluded(self, tmp_path):
        assert len(entries(tmp_path, {"text": "a", "weight": 0, "odd": 1}, ignored=None)[0]) == 1


class TestUnknownKeys:
    @pytest.mark.parametrize(
        "row",
        [
            {"messages": [ASK, RIGHT], "odd": 1},
            {"messages": [ASK, RIGHT | {"odd": 1}]},
            {"messages": [ASK | {"odd": 1}, RIGHT]},
            {"request": {"messages": [ASK], "odd": 1}, "response": answered(RIGHT)},
            {"request": {"body": {"messages": [ASK | {"odd": 1}]}}, "response": answered(RIGHT)},
            {"custom_id": "a", "body": {"messages": [ASK], "odd": 1}},
        ],
    )
    def test_they_are_refused_by_line_and_can_be_accepted(self, tmp_path, row):
        found, [said] = entries(tmp_path, row, {"text": "b"})
        assert len(found) == 1
        assert said == (
            "1: unknown keys ['odd'] of the row or its messages; if none of them changes what is to be "
            "learnt, pass ignore_data_keys=['odd'], on the command line --ignore-data-key odd"
        )
        found, dropped = entries(tmp_path, row, ignored=("odd",))
        assert (len(found), dropped) == (1, [])

    def test_what_changes_a_prompt_and_is_not_supported_is_unknown(self, tmp_path):
        """A system prompt beside messages, an older list of functions, another template."""
        more = {"system": "x", "functions": [], "chat_template": "x", "chosen": [], "label": False}
        for key, value in more.items():
            _, [said] = entries(tmp_path, {"messages": [ASK, RIGHT], key: value}, {"text": "b"})
            assert f"unknown keys ['{key}']" in said

    def test_all_that_this_server_answers_and_returns_is_known(self):
        for request in (ChatRequest, CompletionRequest):
            assert not request.model_fields.keys() - keys._ROW
        assert not Message.model_fields.keys() - keys._MESSAGE

    def test_a_known_key_is_never_ignored(self):
        check_ignored(["odd"])
        with pytest.raises(ValueError, match="train, weight cannot be ignored: --ignore-data-key is for"):
            check_ignored(["weight", "odd", "train"])

    def test_the_option_of_the_command(self, tmp_path, capsys):
        path, out = tmp_path / "rows.jsonl", tmp_path / "out"
        rows = [
            {"messages": [ASK, WRONG | {"weight": 0}, ASK, RIGHT], "odd": 1},
            {"text": "x", "train": False},
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["data", "--model", "demo", "--prompts", str(path), "--mode", "corpus", "--out", str(out)]
        assert main(command) == 2
        assert "on the command line --ignore-data-key odd" in capsys.readouterr().err
        assert main([*command, "--ignore-data-key", "odd"]) == 0
        assert "excluded or cannot be used: 1, listed in" in capsys.readouterr().out
        [document] = read(out)
        assert [text.strip() for text in learnt(load_tokenizer(DEMO_TARGET), document)] == ["f g"]
        assert main([*command, "--ignore-data-key", "weight"]) == 2
        assert "weight cannot be ignored" in capsys.readouterr().err


class TestWork:
    def long(self, turns, text="x" * 40):
        return [{"role": role, "content": text} for _ in range(turns) for role in ("user", "assistant")]

    def test_too_many_turns_are_refused_before_they_are_rendered(self, encoder, monkeypatch):
        monkeypatch.setattr(rendering, "render_chat", None)
        entry = Entry("f:3", "messages", self.long(1500, "x" * 60))
        for reads in (encoder.documents, lambda entry: encoder.prompts(entry, every=True)):
            with pytest.raises(
                ValueError, match=r"^f:3: 1,500 turns in \d{3},\d{3} characters; .* at most 33,5"
            ):
                reads(entry)

    def test_fewer_are_read_and_an_excluded_turn_does_not_count(self, encoder, monkeypatch):
        messages = self.long(6)
        characters = sum(len(str(message)) for message in messages)
        monkeypatch.setattr(rendering, "MOST_HISTORY", 6 * characters)
        assert len(encoder.documents(Entry("f", "messages", messages))) == 1
        monkeypatch.setattr(rendering, "MOST_HISTORY", 6 * characters - 1)
        with pytest.raises(ValueError, match="split the conversation"):
            encoder.documents(Entry("f", "messages", messages))
        messages[1]["weight"] = 0
        assert len(encoder.documents(Entry("f", "messages", messages))) == 1
        # The end alone is rendered once.
        assert len(encoder.prompts(Entry("f", "messages", messages))) == 1
