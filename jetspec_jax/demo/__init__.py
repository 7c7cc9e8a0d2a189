"""The embedded demo: a small trained target and its draft head, in Hugging Face layout (see README.md)."""

from pathlib import Path
from typing import Any

#: The word for either of them wherever a checkpoint is named.
DEMO = "demo"
DEMO_TARGET = Path(__file__).parent / "target"
DEMO_DRAFT_HEAD = Path(__file__).parent / "draft_head"
DEMO_PROMPTS = Path(__file__).parent / "prompts.jsonl"


def head_at(path_or_id: Any) -> Any:
    """Where a draft head is: `DEMO` stands for the embedded one here, and for the target everywhere else."""
    return DEMO_DRAFT_HEAD if path_or_id == DEMO else path_or_id
