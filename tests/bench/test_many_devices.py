"""The benchmarks that decode prompts on several devices, on a tiny random pair."""

import argparse

import numpy as np
import pytest

from bench.common.methods import PLAIN_METHOD
from bench.common.pair import add_pair_arguments, describe_pair, load_pair
from bench.common.report import measured_on
from bench.common.workload import Workload
from bench.decode.measure import Bench
from jetspec_jax import SamplingParams, generate_tree
from tests.decode.tiny import save_tiny_pair
from tests.meshes import need_devices
from train.head.replay import Text, draft_along

pytestmark = pytest.mark.wide

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5]]
PARAMS = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 1.0, 0.7)]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    need_devices(4)
    target, head = save_tiny_pair(tmp_path_factory.mktemp("pair"))
    parser = argparse.ArgumentParser()
    add_pair_arguments(parser, prompts=1, max_tokens=1)

    def call(*words):
        return load_pair(parser.parse_args(["--target", target, "--draft-head", head, *words]), "auto")

    return call


def tokens(completions):
    return [completion.token_ids for completion in completions]


def test_the_pair_lies_where_the_command_line_says(load):
    several = load("--tensor-parallel-size", "2", "--data-parallel-size", "2")
    places = [[device.id for device in mesh.devices.flat] for mesh in several.target.meshes]
    assert places == [[0, 1], [2, 3]]
    one = load()
    assert one.target.meshes == (None,)
    work = Workload([], PROMPTS, PARAMS, [None] * len(PROMPTS))
    reports = [{**describe_pair(pair, [work]), "device": "H200", "jax": "1"} for pair in (one, several)]
    assert [report["devices"] for report in reports] == [1, 4]
    assert [measured_on(report) for report in reports] == [
        "float32, H200, JAX 1",
        "float32, 4 x H200, JAX 1",
    ]
    decoded = [generate_tree(*pair, PROMPTS, PARAMS, budget=16, width=3) for pair in (one, several)]
    assert tokens(decoded[0]) == tokens(decoded[1])


def test_drafts_along_texts(load):
    text = Text(PROMPTS[0], [1, 2, 3] * 9, 20, None, SamplingParams(temperature=1.0, seed=3))
    found = [
        draft_along(*load(*places), [text], 3, implementation="xla").candidates
        for places in ((), ("--tensor-parallel-size", "2"))
    ]
    assert (found[0].tokens == found[1].tokens).all()
    assert np.allclose(found[0].log_probs, found[1].log_probs, atol=1e-4)


def test_all_copies_decode_the_prompts_of_a_method(load):
    work, runs = Workload([], PROMPTS, PARAMS, [None] * len(PROMPTS)), []
    for places in ((), ("--data-parallel-size", "2")):
        bench = Bench(*load(*places), {0.0: work}, batch=1, implementation="xla")
        [found] = bench.measure([PLAIN_METHOD], 1, lambda *_: None)
        runs.append(found[PLAIN_METHOD, 0.0])
    assert tokens(runs[0].completions) == tokens(runs[1].completions)
    assert len(runs[1].first_token_seconds) == len(PROMPTS)
