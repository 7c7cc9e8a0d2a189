"""Request logs and ShareGPT as entries, and everything that is refused by its line."""

import json

import pytest

from train.data.prompts import Dropped, read_entries

ASK = {"role": "user", "content": "how many?"}
TELL = {"role": "assistant", "content": "three"}
REQUEST = {"model": "m", "messages": [ASK], "temperature": 0.7}
TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "count", "arguments": '{"of": "cats"}'}}


def response(*messages, reason="stop"):
    choices = [
        {"index": i, "message": message, "finish_reason": reason} for i, message in enumerate(messages)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": {"total_tokens": 3}}


def chunk(reason=None, index=0, **delta):
    choice = {"index": index, "delta": delta, "finish_reason": reason}
    return {"id": "r1", "object": "chat.completion.chunk", "choices": [choice]}


USAGE = {"id": "r1", "object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 3}}
CHUNKS = [
    chunk(role="assistant", content=""),
    chunk(content="th"),
    chunk(content="ree"),
    chunk("stop"),
    USAGE,
]
STREAM = "".join(f"data: {json.dumps(own)}\n\n" for own in CHUNKS) + "data: [DONE]\n\n"
BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": REQUEST}
BATCHED = {"custom_id": "a", "response": {"status_code": 200, "body": response(TELL)}, "error": None}


def read(tmp_path, *rows, dropped=None, limit=None):
    path = tmp_path / "log.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return read_entries(path, limit, dropped=dropped)


def lines(entries):
    return [int(entry.where.rpartition(":")[2]) for entry in entries]


class TestPairs:
    @pytest.mark.parametrize(
        "rows",
        [
            [{"request": REQUEST, "response": response(TELL)}],
            [{"request": {"body": REQUEST}, "response": {"status_code": 200, "body": response(TELL)}}],
            [{"request": REQUEST, "response": CHUNKS}],
            [{"request": REQUEST, "response": STREAM}],
            [REQUEST, response(TELL)],
            [REQUEST, *CHUNKS],
            [BATCH, BATCHED],
        ],
    )
    def test_a_request_and_its_response_are_a_conversation(self, tmp_path, rows):
        [entry] = read(tmp_path, *rows)
        assert (entry.kind, entry.value, entry.cut) == ("messages", [ASK, TELL], False)

    def test_several_choices_are_several_answers(self, tmp_path):
        other = {"role": "assistant", "content": "3"}
        entries = read(tmp_path, REQUEST, response(TELL, other))
        assert [entry.value[-1] for entry in entries] == [TELL, other]
        assert lines(entries) == [1, 1]

    def test_requests_stay_in_order_and_without_answers_they_are_prompts(self, tmp_path):
        rows = [REQUEST, BATCH, REQUEST, response(TELL), {"text": "a"}, REQUEST]
        entries = read(tmp_path, *rows)
        assert [(line, len(e.value)) for line, e in zip(lines(entries), entries, strict=True)] == [
            (1, 1), (3, 2), (5, 1), (6, 1), (2, 1)
        ]  # fmt: skip

    def test_a_limit_counts_entries(self, tmp_path):
        entries = read(tmp_path, REQUEST, response(TELL), REQUEST, *CHUNKS, "nonsense", limit=2)
        assert lines(entries) == [1, 3]

    def test_calls_and_thoughts_of_a_stream_are_joined(self, tmp_path):
        def call(**own):
            return chunk(tool_calls=[{"index": 0, **own}])

        chunks = [
            *(chunk(reasoning="I co"), chunk(reasoning="unt."), chunk(content=None)),
            call(id="c", type="function", function={"name": "count", "arguments": ""}),
            *(call(function={"arguments": piece}) for piece in ('{"of"', ': "cats"}')),
            chunk("tool_calls"),
        ]
        [entry] = read(tmp_path, REQUEST | {"tools": [TOOL]}, *chunks)
        arguments = {"name": "count", "arguments": {"of": "cats"}}
        assert entry.value[1] == {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I count.",
            "tool_calls": [{"id": "c", "type": "function", "function": arguments}],
        }
        assert entry.tools == [TOOL]

    def test_a_completion_continues_its_prompt(self, tmp_path):
        completion = {"object": "text_completion", "choices": [{"text": "b", "finish_reason": "length"}]}
        pieces = [
            {"object": "text_completion", "id": "x", "choices": [{"text": text, "finish_reason": reason}]}
            for text, reason in (("b", None), ("c", "stop"))
        ]
        entries = read(tmp_path, {"prompt": "a"}, completion, {"prompt": "a"}, *pieces)
        assert [(e.kind, e.value, e.answer, e.cut) for e in entries] == [
            ("prompt", "a", "b", True),
            ("prompt", "a", "bc", False),
        ]

    def test_arguments_of_the_template(self, tmp_path):
        more = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
        [entry] = read(tmp_path, REQUEST | more, response(TELL))
        assert entry.template_arguments == {"enable_thinking": False, "reasoning_effort": "low"}

    def test_an_answer_that_its_length_ended_is_marked(self, tmp_path):
        [entry] = read(tmp_path, REQUEST, response(TELL, reason="length"))
        assert entry.cut


class TestShareGpt:
    def test_turns_become_messages(self, tmp_path):
        turns = [
            {"from": "human", "value": "how many?"},
            {"from": "function_call", "value": '{"name": "count", "arguments": {"of": "cats"}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "three"},
        ]
        row = {"conversations": turns, "system": "Count.", "tools": json.dumps([TOOL]), "id": 1}
        [entry] = read(tmp_path, row)
        call = {"type": "function", "function": {"name": "count", "arguments": {"of": "cats"}}}
        assert (entry.kind, entry.tools) == ("messages", [TOOL])
        assert entry.value == [
            {"role": "system", "content": "Count."},
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            TELL,
        ]

    def test_the_older_call_of_a_function_is_one_of_tools(self, tmp_path):
        old = {"role": "assistant", "content": None, "function_call": CALL["function"]}
        [entry] = read(tmp_path, {"messages": [ASK, old]})
        assert entry.value[1]["tool_calls"][0]["function"]["arguments"] == {"of": "cats"}


SECRET = "opensesame"
IMAGE = {"type": "image_url", "image_url": {"url": SECRET}}
TEXT_PART = {"type": "text", "text": SECRET}
#: Rows that cannot be used, each of which holds a secret, and what is said of them.
REFUSED = [
    ({"messages": [{"role": "user", "content": [TEXT_PART, IMAGE]}]}, "is of type 'image_url'"),
    ({"messages": [{"role": "narrator", "content": SECRET}]}, "message 0 has the role 'narrator'"),
    ({"messages": [{"role": SECRET * 9, "content": "a"}]}, "message 0 has the role '…'"),
    (
        {"messages": [ASK, TELL | {"tool_calls": [{"function": {"name": "f", "arguments": SECRET}}]}]},
        "arguments of a call in message 1 must be a JSON object",
    ),
    (
        {"messages": [ASK, TELL | {"reasoning": SECRET, "thinking": "other"}]},
        "reasoning and thinking of message 1 differ",
    ),
    ({"messages": [ASK], "tools": SECRET}, '"tools" is a text that is not JSON'),
    ({"conversations": [{"from": "alien", "value": SECRET}]}, "turn 0 has the role 'alien'"),
    ({"conversations": [{"from": "function_call", "value": SECRET}]}, "turn 0 must be the JSON of a call"),
    ({"request": REQUEST, "response": {"error": SECRET}}, 'the response has no "choices"'),
    ({"request": REQUEST, "response": {"status_code": 500, "body": SECRET}}, "the request failed"),
    ({"request": REQUEST, "response": f"data: {SECRET}\n"}, "an event of the stream is not JSON"),
    ({"request": REQUEST, "response": CHUNKS[:2]}, "the stream ends before its last chunk"),
    (
        {"request": REQUEST, "response": response(TELL, reason="content_filter")},
        "the answer ended by content_filter",
    ),
    ({"request": REQUEST, "response": SECRET}, "is a text that is neither JSON nor an event stream"),
    ({"request": REQUEST, "response": response(TELL, reason=None)}, "has no finish_reason"),
    (
        {"request": {"messages": [ASK, TELL]}, "response": response(TELL)},
        "the response continues the request's last message",
    ),
    ({"messages": [ASK, TELL], "continue_final_message": True}, 'a request with "continue_final_message"'),
    ({"request": {"prompt": SECRET, "echo": True}, "response": response(TELL)}, 'a request with "echo"'),
    (f'{{"messages": "{SECRET}', "not JSON"),
]


class TestRefusals:
    @pytest.mark.parametrize(("row", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
    def test_by_line_without_its_text(self, tmp_path, caplog, row, reason):
        dropped = Dropped()
        entries = read(tmp_path, {"text": "a"}, row, {"text": "b"}, dropped=dropped)
        assert [entry.value for entry in entries] == ["a", "b"]
        [said] = dropped.reasons
        assert said.startswith(f"{tmp_path / 'log.jsonl'}:2: ")
        assert reason in said
        assert SECRET not in caplog.text + said

    def test_responses_of_nobody(self, tmp_path):
        dropped = Dropped()
        rows = [response(TELL), REQUEST, response(TELL), response(TELL), {"text": "a"}, BATCHED]
        assert lines(read(tmp_path, *rows, dropped=dropped)) == [2, 5]
        assert [reason.split(": ", 1)[1].split(";")[0] for reason in dropped.reasons] == [
            "a response without its request in the row before it",
            "a second response to one request",
            "no row has the request of this response's custom_id",
        ]

    def test_a_second_response_before_the_request(self, tmp_path):
        dropped = Dropped()
        early = [{"custom_id": "a", "response": {"body": response(TELL)}} for _ in range(2)]
        entries = read(tmp_path, *early, {"custom_id": "a", "body": REQUEST}, dropped=dropped)
        assert [len(own.value) for own in entries] == [2]
        assert dropped.reasons == [f"{tmp_path / 'log.jsonl'}:2: another response has the same custom_id"]

    def test_a_response_that_may_be_of_two_requests(self, tmp_path):
        """As a server of many streams may log them: nothing is taught that was perhaps not answered."""
        dropped, ask, tell = Dropped(), REQUEST, response(TELL)
        rows = [ask, ask, tell, tell, ask, tell, {"text": "a"}, ask, ask, tell, ask, tell, tell, ask, tell]
        entries = read(tmp_path, *rows, dropped=dropped)
        taught = [line for line, own in zip(lines(entries), entries, strict=True) if len(own.value) == 2]
        assert taught == [5, 14]
        said = [reason.removeprefix(f"{tmp_path / 'log.jsonl'}:").split(": ") for reason in dropped.reasons]
        assert [int(line) for line, _ in said] == [3, 4, 10, 12, 13]
        assert [reason[:5] for _, reason in said] == ["two r", "a res", "two r", "two r", "a res"]

    def test_streams_that_run_together(self, tmp_path):
        dropped, others = Dropped(), [own | {"id": "r2"} for own in CHUNKS[:-1]]
        rows = [{"text": "a"}, REQUEST, *CHUNKS[:2], REQUEST, *others, REQUEST, *CHUNKS[2:], REQUEST]
        entries = read(tmp_path, *rows, dropped=dropped)
        # The second was whole; the first lacks its end, which must not be the third's answer.
        assert [len(own.value) for own in entries] == [1, 2, 1, 1]
        assert lines(entries)[1:] == [5, 10, 14]
        said = [reason.removeprefix(f"{tmp_path / 'log.jsonl'}:") for reason in dropped.reasons]
        assert [int(reason.split(":")[0]) for reason in said] == [2, 11, 12, 13]
        assert "a chunk of a stream that began before" in said[1]

    def test_a_conversation_that_has_its_answer_gets_no_other(self, tmp_path):
        with pytest.raises(ValueError, match=r"log.jsonl:2: a response without its request"):
            read(tmp_path, {"messages": [ASK, TELL]}, response(TELL))

    def test_nesting_without_end(self, tmp_path):
        deep = "[" * 900 + "]" * 900
        with pytest.raises(ValueError, match=r"log.jsonl:1: .*must be"):
            read(tmp_path, f'{{"messages": [{{"role": "user", "content": {deep}}}]}}')

    def test_a_stream_with_a_broken_chunk_is_no_answer(self, tmp_path):
        dropped = Dropped()
        rows = [{"text": "a"}, REQUEST, *CHUNKS[:2], '{"id": "r1", "obj', *CHUNKS[2:]]
        assert lines(read(tmp_path, *rows, dropped=dropped)) == [1]
        said = [reason.rpartition("log.jsonl:")[2][:2] for reason in dropped.reasons]
        assert said == ["2:", "5:", "6:", "7:", "8:"]
