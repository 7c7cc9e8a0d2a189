"""The command, on the embedded demo pair."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jetspec_jax
from jetspec_jax import LLM, SamplingParams
from jetspec_jax.cli import command as cli
from jetspec_jax.cli import generating, info
from jetspec_jax.decode.settings import DEFAULT_BUDGET
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.device import memory
from jetspec_jax.engine.output import Completion, Logprob
from jetspec_jax.llm import PLAIN_NOTICE
from pallas_kernels.dispatch import gpu_problem

PROMPT = "def read_lines(path):"
SMALL = ("--budget", "16", "--max-tokens", "24")


@pytest.fixture(scope="module")
def llm():
    return LLM(budget=16)


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_text_is_the_target_s_and_the_check_passes(capsys, llm):
    code, out, err = run(capsys, "generate", "--check", "--stats", *SMALL, PROMPT)
    assert code == 0
    [expected] = llm.generate([PROMPT], SamplingParams(max_tokens=24))
    assert out == expected.text + "\n"
    assert f"all {len(expected.token_ids)} tokens equal plain decoding's" in err
    trees, plain, ratio, _ = err.splitlines()[-4:]
    assert "tokens per round" in trees
    assert plain.startswith(f"plain decoding: {len(expected.token_ids)} tokens in ")
    assert re.fullmatch(r"\d+\.\d\d times as fast as plain decoding", ratio)


@pytest.mark.skipif(gpu_problem() is None, reason="a GPU's default is a tree")
def test_a_cpu_decodes_plainly_unless_a_tree_is_named(capsys):
    code, out, err = run(capsys, "generate", "--json", "--max-tokens", "6", PROMPT)
    assert code == 0
    assert set(json.loads(out)["accept_lengths"]) == {1}
    assert err.count(f"jetspec-jax: {PLAIN_NOTICE}\n") == 1
    assert cli._parser().parse_args(["tree", PROMPT]).budget == DEFAULT_BUDGET


def test_plain_decoding_is_not_compared_with_itself(capsys):
    code, _, err = run(capsys, "generate", "--check", "--stats", "--budget", "1", "--max-tokens", "6", PROMPT)
    assert code == 0
    assert "plain decoding: 6 tokens in " in err
    assert "times as fast" not in err


def test_json_is_one_object_with_the_figures(capsys, llm):
    code, out, _ = run(
        capsys,
        *("generate", "--json", *SMALL),
        *("--temperature", "0.7", "--top-p", "0.9", "--top-k", "50", "--seed", "5", PROMPT),
    )
    report = json.loads(out)
    params = SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9, top_k=50, seed=5)
    [expected] = llm.generate([PROMPT], params)
    assert code == 0
    assert report["text"] == expected.text
    assert report["token_ids"] == expected.token_ids
    assert report["finish_reason"] == expected.finish_reason
    assert report["accept_lengths"] == expected.accept_lengths
    assert report["rounds"] == len(expected.accept_lengths)
    assert report["mean_acceptance_length"] == pytest.approx(expected.mean_acceptance_length)
    assert report["tokens_per_second"] == pytest.approx(len(expected.token_ids) / report["seconds"])


def test_json_has_what_is_told_of_tokens():
    """Token ids are names there, as everywhere in JSON; without being asked for, nothing stands there."""
    told = [{5: Logprob(-0.5, 2, "a"), 7: Logprob(-0.25, 1, "b")}]
    completion = Completion("a", [5], "length", [1], [1], logprobs=told, prompt_logprobs=[None, told[0]])
    run = generating._Run([completion], 1.0, True)
    row = {
        "5": {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
    }
    report = json.loads(json.dumps(generating._report(completion, run)))
    assert report["logprobs"] == [row]
    assert report["prompt_logprobs"] == [None, row]
    assert (
        not {"logprobs", "prompt_logprobs"}
        & generating._report(Completion("a", [5], "length", [1], [1]), run).keys()
    )


def test_the_prompt_may_come_from_standard_input(capsys, monkeypatch, llm):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    code, out, _ = run(capsys, "generate", "--budget", "16", "--max-tokens", "8")
    assert code == 0
    assert out == llm.generate([PROMPT], SamplingParams(max_tokens=8))[0].text + "\n"


@pytest.mark.parametrize("command", ["generate", "tree"])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_that_the_prompt_is_read_from_it(capsys, monkeypatch, command, terminal):
    typed = io.TextIOWrapper(io.BytesIO(b""))
    typed.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdin", typed)
    code, _, err = run(capsys, command, "--budget", "8")
    assert code == 2
    told = "jetspec-jax: the prompt is read from standard input; Ctrl-D ends it\n"
    assert err.startswith(told) == terminal
    assert err.count(told) == terminal


def test_input_that_is_no_text_is_bad_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    code, out, err = run(capsys, "generate", "--budget", "16", "--max-tokens", "8")
    assert code == 2
    assert out == ""
    assert "can't decode" in err


@pytest.mark.wide
def test_several_prompts_decode_together_under_headings(capsys, llm, tmp_path):
    path = tmp_path / "prompts.jsonl"
    prompts = [PROMPT, "import os\n"]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    arguments = ("generate", "--budget", "16", "--max-tokens", "8", "--prompt-file", str(path))
    expected = [completion.text for completion in llm.generate(prompts, SamplingParams(max_tokens=8))]
    code, out, err = run(capsys, *arguments, "--stats")
    assert code == 0
    assert out == "".join(f"==> {path}:{i} <==\n{text}\n" for i, text in enumerate(expected, start=1))
    assert "16 tokens in 2 completions in " in err
    code, out, _ = run(capsys, *arguments, "--json")
    assert [json.loads(line)["text"] for line in out.splitlines()] == expected


def test_a_chat_is_answered_by_its_template(capsys, llm):
    code, out, _ = run(capsys, "generate", "--budget", "16", "--max-tokens", "8", "--chat", "--json", PROMPT)
    [expected] = llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(max_tokens=8))
    assert code == 0
    assert json.loads(out)["token_ids"] == expected.token_ids


def test_a_target_without_a_tokenizer_takes_and_gives_token_ids(capsys, llm, tmp_path):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if (DEMO_TARGET / name).exists():
            (tmp_path / name).symlink_to(DEMO_TARGET / name)
    pair = ("--target", str(tmp_path), "--draft-head", str(DEMO_DRAFT_HEAD), "--budget", "16")
    ids = llm.encode(PROMPT)
    given = ("--token-ids", ",".join(map(str, ids)), "--max-tokens", "8")
    code, out, _ = run(capsys, "generate", *pair, *given)
    assert code == 0
    [expected] = llm.generate([ids], SamplingParams(max_tokens=8))
    assert out == ",".join(map(str, expected.token_ids)) + "\n"
    code, _, err = run(capsys, "generate", *pair, PROMPT)
    assert code == 2
    assert "the target has no tokenizer" in err


def test_a_failed_check_names_the_first_difference(capsys, monkeypatch):
    def altered(*arguments, shown):
        completion = real(*arguments, shown=shown)
        if not shown:
            completion.token_ids[5] = 77
        return completion

    real = generating._stream
    monkeypatch.setattr(generating, "_stream", altered)
    code, _, err = run(capsys, "generate", "--check", "--budget", "16", "--max-tokens", "12", PROMPT)
    assert code == 1
    assert "token 5 is" in err
    assert "plain decoding's is 77" in err


def test_one_difference_among_several_completions_is_exit_code_1(capsys, monkeypatch):
    generate = LLM.generate

    def altered(llm, *arguments, budget):
        completions = generate(llm, *arguments, budget=budget)
        completions[0].outputs[0].token_ids[2] ^= budget == 1
        return completions

    monkeypatch.setattr(LLM, "generate", altered)
    code, _, err = run(capsys, "generate", "--check", "--max-tokens", "4", "-n", "2", PROMPT)
    assert code == 1
    assert err.count("check failed: token 2 is") == 1
    assert err.count("equal plain decoding's") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "prompt is empty"),
        (["generate", "--budget", "257", "x"], "budget must be in 1..256"),
        (["generate", "--implementation", "cuda", "x"], "no implementation 'cuda'"),
        (["generate", "--target", "no/such-target", "x"], "no/such-target"),
        (["info", str(DEMO_TARGET), "--target", str(DEMO_TARGET)], "is a target, not a draft head"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [ValueError("so"), TypeError("so"), OSError("so"), RuntimeError("so"), ImportError("so"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_what_goes_wrong_is_one_sentence_and_exit_code_2(capsys, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(info, "describe", fail)
    code, out, err = run(capsys, "info", "demo")
    assert (code, out) == (2, "")
    assert err == f"jetspec-jax: {'MemoryError' if isinstance(error, MemoryError) else 'so'}\n"


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "jetspec_jax", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(f"jetspec-jax {jetspec_jax.__version__} (JAX ")
    assert ran.stderr == ""


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "jetspec_jax", "info", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(gpu_problem() is None, reason="it can run here")
def test_a_kernel_that_cannot_run_says_why(capsys):
    code, out, err = run(capsys, "generate", "--implementation", "pallas_triton", "--budget", "16", PROMPT)
    assert code == 2
    assert out == ""
    assert f"pallas_triton cannot run: {gpu_problem()}" in err
    assert err.count("\n") == 1


def test_too_little_memory_is_bad_luck_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda mesh=None: 10 * 2**20)
    code, out, err = run(capsys, "generate", PROMPT)
    assert code == 2
    assert out == ""
    assert err.startswith("jetspec-jax: too little memory")
    assert "weights of the draft head" in err


def test_info_describes_a_head_and_its_fit(capsys):
    arguments = ("info", str(DEMO_DRAFT_HEAD), "--target", str(DEMO_TARGET), "--json")
    code, out, _ = run(capsys, *arguments)
    report = json.loads(out)
    assert code == 0
    assert report["fits"] is True
    assert report["kind"] == "draft head"
    assert report["block_size"] == 16
    assert report["parameters"] * 2 < report["file_bytes"] < report["parameters"] * 2 + 10_000


def test_info_on_a_head_that_does_not_fit(capsys, tmp_path):
    config = json.loads((DEMO_TARGET / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    code, out, _ = run(capsys, "info", str(DEMO_DRAFT_HEAD), "--target", str(tmp_path))
    assert code == 1
    assert "no: the draft head does not fit the target" in out
    assert "tap layers [5, 7] lie outside" in out


def test_info_tells_windows_from_the_whole_context(capsys, tmp_path):
    """Half of the layers keep every token, the others at most 3 pages of 64 for a window of 128."""
    config = json.loads((DEMO_TARGET / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(DEMO_TARGET / "model.safetensors")
    reports = [json.loads(run(capsys, "info", str(path), "--json")[1]) for path in (DEMO_TARGET, tmp_path)]
    of_token = 2 * 2 * 2 * 64  # keys and values of 2 heads of 64 in 2 bytes
    assert [r["cache_bytes_per_token_bf16"] for r in reports] == [8 * of_token, 4 * of_token]
    assert [r["cache_bytes_of_windows_bf16"] for r in reports] == [0, 4 * 192 * of_token]


def test_a_target_without_a_head_is_told_how_to_get_one(capsys):
    where = "to make a draft head for it: https://github.com/jetspec/jetspec_jax/blob/main/docs/your-model.md"
    assert run(capsys, "info", str(DEMO_TARGET))[1].endswith(f"\n\n{where}\n")
    for other in ("demo", str(DEMO_DRAFT_HEAD)):
        assert "your-model.md" not in run(capsys, "info", other)[1]
    code, _, err = run(capsys, "generate", "--model", str(DEMO_TARGET), "--max-tokens", "1", PROMPT)
    assert code == 0
    assert "no --draft-head for this target: plain decoding; to make one: https://" in err
    assert (Path(__file__).parents[2] / "docs" / "your-model.md").is_file()


def test_info_demo_lists_both(capsys):
    code, out, _ = run(capsys, "info", "demo")
    assert code == 0
    assert "kind                         target" in out
    assert "fits                         yes" in out
