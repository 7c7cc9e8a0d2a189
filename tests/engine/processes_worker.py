"""One of several processes that decode together: ``python -m tests.engine.processes_worker SETTINGS``, in JSON.

Keys of the settings: "process" as ``[index, count, port]``, "case" as the name of a function below, and "out",
a file for what it returns.
"""

import json
import sys
from pathlib import Path

import jax

import tests.conftest  # noqa: F401  (programs are compiled as in the tests)
from jetspec_jax import LLM, Head, SamplingParams, Target, generate, generate_tree
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.device.joining import join
from jetspec_jax.device.mesh import make_mesh
from jetspec_jax.device.processes import is_first
from jetspec_jax.engine import runner
from jetspec_jax.sampling import params
from tests.decode.tiny import TINY, random_head, random_target, word_tokenizer

PROMPTS = [[3, 1, 4], [5] * 40]
DRAWN = 1000
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
#: A stream of this is far from its end when its first piece comes.
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def pair(mesh=None):
    target, head = random_target(TINY, 0, tokenizer=word_tokenizer(64)), random_head(TINY, 0)
    if mesh is None:
        return target, head
    weights = place(target.weights, target.config, mesh), place(head.weights, head.config, mesh)
    target = Target(target.config, weights[0], target.eos_token_ids, target.tokenizer, mesh)
    return target, Head(head.config, weights[1], mesh)


def decoded(target, head, seed=None):
    """What the processes decode together, and what one device decodes alone."""
    one = SamplingParams(**{**vars_of(SAMPLED), "seed": seed})
    found = {
        "greedy": generate_tree(target, head, PROMPTS, LONG, budget=16, width=3),
        "drawn": generate_tree(target, head, PROMPTS, one, budget=16, width=3),
    }
    text = found["greedy"][0].text
    stop = SamplingParams(max_tokens=60, ignore_eos=True, stop=text[20:22])
    found["stop"] = generate_tree(target, head, PROMPTS[:1], stop, budget=16, width=3)
    return {name: [own.token_ids for own in each] for name, each in found.items()}


def vars_of(own):
    return {name: getattr(own, name) for name in own.__dataclass_fields__}


def together(mesh):
    index = jax.process_index()
    # Processes draw different seeds, and the clock of one is a hundred times as fast.
    params.draw_seed = lambda: DRAWN + index
    sys.modules["jetspec_jax.engine.planning"].draw_seed = params.draw_seed
    clock = runner.time.perf_counter
    target, head = pair(mesh)
    found = decoded(target, head)
    if index:
        runner.time = type("Clock", (), {"perf_counter": staticmethod(lambda: 100 * clock())})
    auto = generate_tree(target, head, PROMPTS, LONG, budget=16, algorithm="auto")
    found["auto"] = [own.token_ids for own in auto]
    found["sizes"] = [own.tree_sizes for own in auto]
    llm = LLM(target, head, budget=16, width=3)
    stream, pieces = llm.stream(PROMPTS[0], LONG), []
    for piece in stream:
        pieces.append(piece)
        if is_first():
            stream.close()
    found["pieces"], found["ended"] = len(pieces), stream.completion is None
    unlike = [PROMPTS[0], [5] * (40 + index)]
    try:
        generate_tree(target, head, unlike, LONG, budget=16, width=3)
    except ValueError as error:
        found["refused"] = str(error)
    found["plain"] = [own.token_ids for own in generate(target, PROMPTS[:1], LONG)]
    return found


def main(settings):
    jax.config.update("jax_num_cpu_devices", 2)
    index, count, port = settings["process"]
    join(f"localhost:{port}", count, index)
    found = globals()[settings["case"]](make_mesh(2 * count))
    Path(settings["out"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
