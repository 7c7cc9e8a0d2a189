"""The model card of an exported head: its figures, how to serve it, and the licence of its target."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.gguf.header import is_gguf, read_header
from train.pair.judge import table_of

#: The folder, in that of the head, of the head without its selector.
WITHOUT_SELECTOR = "without_selector"
# The front matter of a Hugging Face card, and the licence in it.
_FRONT = re.compile(r"---\n(.*?)\n---", re.DOTALL)
_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LICENCE = re.compile(r"^license:[ \t]*['\"]?([\w.+-]+)", re.MULTILINE)


def licence_of(target: Path) -> str | None:
    """The licence that a target's folder or GGUF file names: in its metadata, card, or licence file."""
    if is_gguf(target):
        licence = read_header(target).metadata.get("general.license")
        return None if licence is None else str(licence)
    if (card := target / "README.md").is_file():
        front = _FRONT.match(card.read_text(encoding="utf-8", errors="replace"))
        if front and (licence := _LICENCE.search(front[1])):
            return licence[1]
    for path in sorted(target.glob("LICENSE*")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip():
                return line.strip()
    return None


def card_of(
    target: str, licence: str | None, depth: int, report: Mapping[str, Any], prompts: Mapping[str, Any]
) -> str:
    """The text of a card; ``report`` is that of the judgement, ``prompts`` as in ``prompts.json``."""
    budget, kept, dropped = report["recommended_budget"], prompts["kept"], prompts["dropped"]
    others = "; ".join(f"{count} {reason}" for reason, count in report["prompts_not_judged"].items() if count)
    vllm = {"method": "dflash", "model": f"FOLDER/{WITHOUT_SELECTOR}", "num_speculative_tokens": depth}
    named = "name no licence: see its page before you share this head"
    evaluated = ""
    if prompts["evaluated"]:
        sets = ", ".join(prompts["evaluated"])
        evaluated = f", among them all that share {prompts['run']} words in a row with a text of {sets}"
    front = []
    if licence is not None:
        named = f"name the licence {licence}"
        # The first line of a licence file is a name, and no identifier of the hub.
        known = _IDENTIFIER.fullmatch(licence) is not None
        key = "license: " if known else "license: other\nlicense_name: "
        front = ["---", key + json.dumps(licence), "library_name: jetspec-jax", "---", ""]
    lines = [
        *front,
        f"# A draft head for {target}",
        "",
        "Made by `python -m train pair` of jetspec-jax. A draft head changes no token that is decoded, "
        "except where rounding decides between two likely tokens; in 16 bits that happens in many texts.",
        "",
        f"```sh\njetspec-jax serve --model {target} --draft-head FOLDER --budget {budget}\n```",
        "",
        *(["On the device below plain decoding was as fast as trees, or faster.", ""] if budget == 1 else []),
        f"`{WITHOUT_SELECTOR}/` has the head alone, for vLLM and SGLang, whose selectors differ:",
        "",
        f"```sh\nvllm serve {target} --speculative-config '{json.dumps(vllm)}'\n```",
        "",
        "## Figures",
        "",
        f"{report['prompts']} held-out prompts, one at a time; {report['dtype']}, {report['device']}, JAX "
        f"{report['jax']}. Held-out prompts that were not judged: {others or 'none'}.",
        "",
        *table_of(report),
        "",
        "Equal outputs are those with the tokens of plain decoding up to their end.",
        "",
        "## Training",
        "",
        f"There were {sum(kept.values()):,} prompts, held-out ones included ({_listed(kept)}). "
        f"{sum(dropped.values()):,} others were dropped{evaluated}; {prompts['left_out']:,} were not needed.",
        "",
        "## Licence",
        "",
        f"The head was trained on answers of the target, whose files {named}.",
    ]
    return "\n".join(lines) + "\n"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
