"""Prompt sets: the demo's own held-out prompts, or a JSONL file."""

import json
from pathlib import Path

from jetspec_jax.demo import DEMO_PROMPTS


def load_prompts(name: str, count: int | None = None) -> list[str]:
    """The texts of a prompt set.

    Args:
        name: "demo", or a JSONL file whose lines are objects with a "text".
        count: Take only so many.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not what it should be (file and line number), or there are too few prompts.
    """
    path = DEMO_PROMPTS if name == "demo" else Path(name)
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or not text:
            raise ValueError(f'{path}:{number}: expected an object with a non-empty "text"')
        texts.append(text)
    if not texts or (count is not None and count > len(texts)):
        raise ValueError(f"{path} holds {len(texts)} prompts, asked for {count or 'at least one'}")
    return texts[:count]
