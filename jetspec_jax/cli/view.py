"""``jetspec-jax tree``: decodes a prompt, draws the tree of a round, and writes a page of all rounds."""

import argparse
import codecs
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jetspec_jax.checkpoint.files import check_writable
from jetspec_jax.cli.options import SAMPLING
from jetspec_jax.cli.prompts import GivenPrompt, encode, read_prompts
from jetspec_jax.cli.settings import add_decoding_options, load_llm, sampling_params
from jetspec_jax.decode.settings import DEFAULT_BUDGET, TreeSettings
from jetspec_jax.demo import DEMO
from jetspec_jax.device.processes import is_first
from jetspec_jax.engine.output import Completion
from jetspec_jax.inspect.trace import RoundTrace, trace_rounds
from jetspec_jax.llm import LLM
from jetspec_jax.progress import unseen
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import algorithm_of, name_of
from jetspec_jax.view.data import trace_data
from jetspec_jax.view.page import write_page
from jetspec_jax.view.terminal import ASCII, UNICODE, Signs, draw_round, headline
from jetspec_jax.view.tokens import cut, pieces, token_label, visible

# Decimals of log-probabilities in a page: more are not visible, and would make the page larger.
_PAGE_DIGITS = 3
# The most characters that are printed of the text before a round.
_TAIL = 48


def add_tree_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``jetspec-jax``."""
    parser = commands.add_parser("tree", help="see the trees of a generation", description=_tree.__doc__)
    # Without a budget a CPU uses plain decoding, which has no trees to show.
    add_decoding_options(parser, max_tokens=64, budget=DEFAULT_BUDGET)
    parser.set_defaults(run=_tree)
    parser.add_argument("--round", type=int, metavar="K", help="number of the round to draw (default: 1)")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that steps through all rounds"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with all rounds, or with round K alone"
    )


def _tree(arguments: argparse.Namespace) -> int:
    """Draws a round's tree with its scores and its accepted path; --html writes a page of all rounds."""
    if arguments.round is not None and arguments.round < 1:
        raise ValueError(f"--round counts from 1, not {arguments.round}")
    page = arguments.html if is_first() else None
    if page is not None:
        check_writable(page)
    prompts, params = read_prompts(arguments), sampling_params(arguments)
    if len(prompts) != 1:
        raise ValueError(f"tree takes one prompt, not {len(prompts)}")
    if (arguments.data_parallel_size or 1) > 1:
        raise ValueError(
            f"--data-parallel-size {arguments.data_parallel_size}: one prompt can only use one copy"
        )
    llm = load_llm(arguments)
    run = _trace(llm, prompts[0], params, arguments)
    if page is not None:
        write_page(page, run.data(run.rounds, digits=_PAGE_DIGITS))
        print(f"{len(run.rounds)} rounds in {page}", file=sys.stderr)
    if arguments.round is not None and arguments.round > len(run.rounds):
        took = f"{len(run.rounds)} round{'s' * (len(run.rounds) != 1)}"
        raise ValueError(f"--round {arguments.round}: the generation took {took}")
    if arguments.json:
        wanted = run.rounds if arguments.round is None else [run.rounds[arguments.round - 1]]
        print(json.dumps(run.data(wanted)))
    else:
        _draw(run, arguments.round or 1)
    return 0


@dataclass(frozen=True)
class _Run:
    """A traced generation."""

    llm: LLM
    prompt: list[int]
    rounds: list[RoundTrace]
    completion: Completion
    settings: dict[str, Any]

    def data(self, rounds: list[RoundTrace], **digits: int) -> dict[str, Any]:
        """Some rounds as JSON values."""
        tokenizer = self.llm.target.tokenizer
        return trace_data(self.prompt, rounds, self.completion, tokenizer, self.settings, **digits)


def _trace(llm: LLM, prompt: GivenPrompt, params: SamplingParams, arguments: argparse.Namespace) -> _Run:
    """Decodes to the end, with a progress bar on a terminal if it takes more than two seconds."""
    encoded, tree = encode(llm, prompt, arguments), llm.settings
    traced = trace_rounds(
        llm.target,
        llm.draft_head,
        encoded,
        params,
        tree,
        implementation=arguments.implementation,
    )
    rounds = []
    with tqdm(total=params.max_tokens, unit=" tokens", delay=2, disable=unseen(), leave=False) as bar:
        for traced_round in traced:
            rounds.append(traced_round)
            bar.update(len(traced_round.committed))
    assert traced.completion is not None, "all rounds are done"
    return _Run(llm, encoded.ids.tolist(), rounds, traced.completion, _settings(tree, params, arguments))


def _settings(tree: TreeSettings, params: SamplingParams, arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the rounds as JSON values; None for those without influence."""
    paths = {name: str(value) for name in ("draft_head", "profile") if (value := getattr(arguments, name))}
    sampling: dict[str, Any] = dict.fromkeys(option.field for option in SAMPLING.options)
    sampling |= SAMPLING.given(arguments)
    return {
        "target": str(arguments.target or DEMO),
        "draft_head": paths.get("draft_head"),
        "budget": tree.budget,
        **tree.breadth._asdict(),
        "depth": tree.depth,
        "algorithm": name_of(algorithm_of(tree.algorithm)) if tree.budget > 1 else None,
        "algorithm_option": ", ".join(arguments.algorithm_option or ()) or None,
        "profile": paths.get("profile"),
        "task": arguments.task,
        "mode": arguments.mode,
        **sampling,
        "temperature": params.temperature,
        "seed": params.seed if params.temperature > 0 else None,
    }


def _draw(run: _Run, number: int) -> None:
    """Prints a round: the text before it, the tree, and the committed text."""
    signs = UNICODE if _prints_unicode() else ASCII
    ascii_only = signs is ASCII
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    tokenizer, drawn = run.llm.target.tokenizer, run.rounds[number - 1]
    texts = pieces(tokenizer, [*run.prompt, *run.completion.token_ids])
    first = drawn.start + 1
    print(headline(drawn, number, len(run.rounds), run.settings["budget"]))
    before = "".join(texts[: drawn.start])
    print(cut(f"behind  {_tail(before, signs, width)}", width, signs.ellipsis))

    def label(token: int) -> str:
        return token_label(tokenizer, token, ascii_only=ascii_only)

    for line in draw_round(drawn, label, signs=signs, width=width, colour=sys.stdout.isatty()):
        print(line)
    added = visible("".join(texts[first : first + len(drawn.committed)]), ascii_only=ascii_only)
    print(cut(f"commits {added}", width, signs.ellipsis))


def _tail(text: str, signs: Signs, width: int | None) -> str:
    """The end of a text on one line."""
    length = _TAIL if width is None else max(1, min(_TAIL, width - 16))
    shown = visible(text[-length:], ascii_only=signs is ASCII)
    return shown if len(text) <= length else f"{signs.ellipsis} {shown}"


def _prints_unicode() -> bool:
    """Whether the output's encoding has all characters, unlike some code pages."""
    return codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")
