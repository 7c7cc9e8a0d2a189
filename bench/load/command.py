"""``python -m bench load``: one engine under load: latency, prefill, many slots, and the host.

The parts are measured in the given order, and the report is written after each part; ``--resume`` keeps the
parts that it has. First a tiny pair in float32 serves a few requests by plain decoding and with trees: all
tokens must be those of plain decoding without load.

* prefill: prompt tokens per second, from the arrival of all prompts to their first tokens.
* ttft: time to first token of a short prompt, which arrives while other requests decode.
* gaps: time between tokens of decoding requests while a long prompt arrives.
* shared: time to first token of a second request with the same prefix.
* host: time of the engine's thread, by live slots.
* traffic: methods in turn on random prompts, with fixed numbers of concurrent requests (``--concurrency``) or
  with random arrivals (``--rates``).
* demo: the same with the pair of ``--target`` and real prompts. ``--warm-up-seconds`` and ``--seconds`` show
  how well "auto" does after so many seconds of traffic.
* structured: decoding requests beside a request with a grammar, with the same pair.
"""

import argparse
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import numpy as np

from bench.common.methods import AUTO, PLAIN_METHOD, Method
from bench.common.options import check_known, check_least
from bench.common.pair import Pair, load_pair, random_pair, shapes_of
from bench.common.prompts import encode_prompts, load_prompts
from bench.common.report import add_report_arguments, check_report, measured_on, opening_of, publish
from bench.common.shapes import SHAPES, find_pair_shape
from bench.load import traffic, waits
from bench.load.arrivals import Lengths, random_prompts
from bench.load.driving import Load
from bench.load.report import PARTS, notes_of, tables_of
from jetspec_jax import SamplingParams, enable_compilation_cache
from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.checkpoint.source import resolve_dtype
from jetspec_jax.cli.options import MODELS
from jetspec_jax.config import read_json
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.demo import DEMO
from jetspec_jax.progress import Progress
from jetspec_jax.tree import bucket_for
from pallas_kernels.tree_attention import implementations

#: The default parts: those of one model, and the demo pair's.
USUAL_PARTS = tuple(part for part in PARTS if part != "traffic")
# Defaults by whether there is a GPU: a published shape there, and a small one on a CPU.
_USUAL = {
    True: {
        "shape": "qwen3-8b",
        "prompts": ["512", "2048", "4096", "8192", "8x1024"],
        "long_prompt": 16384,
        "shared_tokens": 4096,
        "buckets_up_to": 128,
        "least_nodes": 2,
        "concurrency": [1, 2, 4, 8, 16, 32, 64],
        "num_prompts": 64,
    },
    False: {
        "shape": "tiny",
        "prompts": ["256", "4x128"],
        "long_prompt": 1024,
        "shared_tokens": 512,
        "buckets_up_to": 16,
        "least_nodes": 8,
        "concurrency": [1, 4],
        "num_prompts": 8,
    },
}
# The engine that measures latency: tokens of a slot beyond its prompt, slots, and nodes.
_ROOM, _BESIDE, _NODES = 1024, 8, 16
# Tokens of a slot of the engine with many slots.
_CROWDED_CAPACITY = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add(
        "--shape",
        help=f"shape of the random weights: {', '.join(SHAPES)} (default: qwen3-8b on a GPU, else tiny)",
    )
    add("--parts", nargs="+", default=list(USUAL_PARTS), metavar="PART", help=f"among {', '.join(PARTS)}")
    add("--prompts", nargs="+", metavar="N", help="prompts of prefill: 2048 is one prompt, 8x1024 are eight")
    add("--long-prompt", type=int, help="tokens of the long prompt of gaps")
    add("--shared-tokens", type=int, help="tokens of the prefix of shared; a multiple of 64")
    add("--slots", type=int, default=64, help="slots in host (default: 64)")
    usual = [1, 8, 32, 64]
    add("--host-slots", type=int, nargs="+", default=usual, help="numbers of decoding slots in host")
    add("--buckets-up-to", type=int, help="most nodes of a tree of auto")
    add("--least-nodes", type=int, help="fewest nodes of these trees (default: 2 on a GPU, else 8)")
    add("--concurrency", type=int, nargs="+", help="concurrent requests in traffic and demo")
    add("--rates", type=float, nargs="+", default=[], help="requests per second in traffic and demo")
    add(
        "--budgets",
        type=int,
        nargs="+",
        default=[16],
        help="nodes of fixed trees in traffic and demo (default: 16)",
    )
    add("--num-prompts", type=int, help="number of prompts of traffic and demo")
    add(
        "--prompt-tokens",
        default="lognormal:128:0.5",
        help="lengths in traffic: N, uniform:A:B or lognormal:M:S",
    )
    add(
        "--output-tokens",
        default="uniform:32:96",
        help="lengths of outputs in traffic and demo, in the same form",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="temperature of traffic and demo; prompt i has seed i (default: 0)",
    )
    add(
        "--seconds",
        type=float,
        help="length of a turn of traffic and demo, with prompts over and over (default: each prompt once)",
    )
    add(
        "--warm-up-seconds",
        type=float,
        help="length of the first turn of auto (default: two prompts a slot)",
    )
    add("--count", type=int, default=24, help="short prompts of ttft, dispatches of host (default: 24)")
    add("--repeats", type=int, default=3, help="timed runs (default: 3)")
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (default: 0)")
    add("--implementation", help=f"tree attention: {', '.join(implementations())} (default: the best)")
    models = {"target": DEMO, "dtype": "auto", "ignore_config_keys": []}
    MODELS.add(parser, [*models, "draft_head", "fp8_activations"], **models)
    add("--compilation-cache", default="auto", help='folder, "auto" or "off" (default: auto)')
    add_report_arguments(parser, "load")
    add("--resume", action="store_true", help="keep the parts of the report at --json")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables, and writes the JSON and the plot.

    Raises:
        RuntimeError: A method does not give plain decoding's tokens.
    """
    _check(arguments)
    check_report(arguments)
    enable_compilation_cache(arguments.compilation_cache)
    report = _begin(arguments)
    measured = Measured(arguments)
    left = [part for part in arguments.parts if part not in report["parts"]]
    with Progress(total=len(left) + 1, unit="part") as bar:
        if left:
            bar.set_description("check")
            report["tokens_checked"] = check(arguments)
        bar.update()
        for part in left:
            bar.set_description(part)
            result = getattr(measured, part)(bar.set_postfix_str)
            report["parts"][part] = {"device": report["device"], "result": result}
            report["notes"] = notes_of(report["parts"])
            write_json(arguments.json, report)
            bar.update()
    title = f"{arguments.shape}, {measured_on(report)}"
    publish(arguments, report, tables_of(report["parts"]), report["notes"], title=title)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Fills in the device's defaults, and checks all settings; raises ValueError."""
    for name, value in _USUAL[jax.default_backend() == "gpu"].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    check_known("parts", arguments.parts, PARTS)
    check_least(arguments, 1, "slots", "host_slots", "concurrency", "num_prompts", "count", "repeats")
    check_least(arguments, 1, "seconds", "warm_up_seconds")
    check_least(arguments, 2, "least_nodes", "budgets")
    for text in arguments.prompts:
        if waits.parse_prompts(text)[0] > _BESIDE:
            raise ValueError(f"--prompts {text}: at most {_BESIDE} prompts can arrive together")
    for name in ("prompt_tokens", "output_tokens"):
        Lengths.parse(getattr(arguments, name))
    if min(arguments.rates, default=1) <= 0:
        raise ValueError(f"--rates must be positive, not {min(arguments.rates):g}")
    if max(arguments.host_slots) > arguments.slots:
        raise ValueError(f"--host-slots {max(arguments.host_slots)} is more than --slots {arguments.slots}")
    target = find_pair_shape(arguments.shape).target
    if (need := longest(arguments)) > target.max_position_embeddings:
        raise ValueError(
            f"--prompts, --long-prompt or --shared-tokens need {need} tokens, and {arguments.shape} has a "
            f"context of {target.max_position_embeddings}"
        )


def longest(arguments: argparse.Namespace) -> int:
    """Tokens per slot of the engine that measures latency."""
    lengths = [waits.parse_prompts(text)[1] for text in arguments.prompts]
    return max(*lengths, arguments.long_prompt, arguments.shared_tokens + waits.TAIL) + _ROOM


def _begin(arguments: argparse.Namespace) -> dict[str, Any]:
    """A new report, or the report to resume.

    Raises:
        ValueError: The report to resume has other settings.
    """
    shape = find_pair_shape(arguments.shape)
    opening = opening_of("load", arguments)
    report = {
        **opening,
        "shape": arguments.shape,
        "target": opening["arguments"]["target"],
        "shapes": shapes_of(shape.target, shape.head),
        "dtype": str(resolve_dtype(arguments.dtype)),
        "parts": {},
        "notes": [],
    }
    if not (arguments.resume and arguments.json.exists()):
        return report
    # Older reports lack the target, which was the demo's.
    kept = {"target": DEMO, **read_json(arguments.json)}
    for name in ("benchmark", "shape", "target", "dtype", "device", "jax"):
        if kept.get(name) != report[name]:
            raise ValueError(f"--resume: {name} of {arguments.json} is {kept.get(name)}, not {report[name]}")
    report["parts"] = {part: kept["parts"][part] for part in PARTS if part in kept["parts"]}
    report["tokens_checked"] = kept.get("tokens_checked")
    report["notes"] = notes_of(report["parts"])
    return report


def check(arguments: argparse.Namespace) -> int:
    """Compares trees with plain decoding on a tiny pair in float32; returns the number of compared tokens.

    Raises:
        RuntimeError: The tokens differ.
    """
    rng, pair = np.random.default_rng(arguments.seed), random_pair("tiny", resolve_dtype("float32"))
    prompts = [
        (prompt, SamplingParams(max_tokens=12, temperature=float(number % 2), seed=number, ignore_eos=True))
        for number, prompt in enumerate(random_prompts([5, 70, 140, 33], 512, rng))
    ]
    trees = Method(AUTO, AUTO, TreeSettings(_NODES, algorithm=AUTO))
    return traffic.check_outputs(pair, [trees], prompts, 256)


class Measured:
    """Measures the parts, each by the method of its name. Engines are made when needed, one at a time."""

    def __init__(self, arguments: argparse.Namespace):
        self._given = arguments
        self._loads: dict[str, Load] = {}

    @cached_property
    def _pair(self) -> Pair:
        return random_pair(self._given.shape, resolve_dtype(self._given.dtype))

    @cached_property
    def _real(self) -> Pair:
        self._close()  # before other weights are read
        return load_pair(self._given, self._given.dtype)

    @property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self._given.seed)

    def _close(self) -> None:
        for load in self._loads.values():
            load.close()
        self._loads.clear()

    def _load(self, kind: str, pair: Pair, settings: TreeSettings, **plan: Any) -> Load:
        """The engine of a kind; any other engine is closed first."""
        if kind not in self._loads:
            self._close()
            self._loads[kind] = Load(pair, settings, implementation=self._given.implementation, **plan)
        return self._loads[kind]

    @property
    def _waiting(self) -> Load:
        """The engine that measures latency: few slots and long prompts."""
        settings, capacity = TreeSettings(_NODES, algorithm=AUTO), longest(self._given)
        plan = {"slots": _BESIDE, "capacity": capacity, "live": (1,), "least_nodes": _NODES}
        return self._load("waits", self._pair, settings, **plan)

    def prefill(self, step: Callable[[str], None]) -> Any:
        """See `bench.load.waits.measure_prefill`."""
        prompts = [waits.parse_prompts(text) for text in self._given.prompts]
        return waits.measure_prefill(self._waiting, prompts, self._given.repeats, self._rng)

    def ttft(self, step: Callable[[str], None]) -> Any:
        """See `bench.load.waits.measure_first_tokens`."""
        return waits.measure_first_tokens(self._waiting, _BESIDE - 1, self._given.count, self._rng)

    def gaps(self, step: Callable[[str], None]) -> Any:
        """See `bench.load.waits.measure_gaps`."""
        given = self._given
        return waits.measure_gaps(self._waiting, _BESIDE - 1, given.long_prompt, given.repeats, self._rng)

    def shared(self, step: Callable[[str], None]) -> Any:
        """See `bench.load.waits.measure_shared`."""
        given = self._given
        return waits.measure_shared(self._waiting, given.shared_tokens, given.repeats, self._rng)

    def host(self, step: Callable[[str], None]) -> Any:
        """See `bench.load.waits.measure_host`."""
        given = self._given
        settings = TreeSettings(bucket_for(given.buckets_up_to), algorithm=AUTO)
        plan = {"slots": given.slots, "capacity": _CROWDED_CAPACITY, "least_nodes": given.least_nodes}
        load = self._load("many", self._pair, settings, **plan)
        return waits.measure_host(load, given.host_slots, given.count, self._rng)

    def structured(self, step: Callable[[str], None]) -> Any:
        """See `bench.load.waits.measure_structured`."""
        capacity = self._real.target.config.max_position_embeddings
        load = self._load("structured", self._real, TreeSettings(_NODES), slots=_BESIDE, capacity=capacity)
        return waits.measure_structured(load, _BESIDE - 1, self._given.repeats, self._rng)

    def traffic(self, step: Callable[[str], None]) -> Any:
        """See `bench.load.traffic.measure_traffic`."""
        given, rng = self._given, self._rng
        lengths = Lengths.parse(given.prompt_tokens).draw(given.num_prompts, rng, 512)
        prompts = random_prompts(lengths, self._pair.target.config.vocab_size, rng)
        return self._traffic(self._pair, prompts, step)

    def demo(self, step: Callable[[str], None]) -> Any:
        """Like `traffic`, with the given pair and the demo's prompts."""
        prompts = encode_prompts(self._real.target, load_prompts(DEMO)[: self._given.num_prompts])
        return self._traffic(self._real, prompts, step)

    def _traffic(self, pair: Pair, prompts: list[list[int]], step: Callable[[str], None]) -> Any:
        self._close()
        given, rng = self._given, self._rng
        outputs = Lengths.parse(given.output_tokens).draw(len(prompts), rng, 256)
        requests = [
            (
                prompt,
                SamplingParams(max_tokens=most, temperature=given.temperature, seed=number, ignore_eos=True),
            )
            for number, (prompt, most) in enumerate(zip(prompts, outputs, strict=True))
        ]
        auto = TreeSettings(given.buckets_up_to, algorithm=AUTO)
        methods = [
            PLAIN_METHOD,
            Method("chain", None, TreeSettings(pair.head.config.block_size, 1)),
            Method(AUTO, AUTO, auto),
            *(Method(f"tree {budget}", None, TreeSettings(budget)) for budget in given.budgets),
        ]
        return traffic.measure_traffic(pair, methods, requests, given, step)
