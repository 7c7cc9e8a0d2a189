"""The embedded demo: a small trained target and its draft head, in Hugging Face layout (see README.md)."""

from pathlib import Path

#: The word for either of them wherever a checkpoint is named.
DEMO = "demo"
DEMO_TARGET = Path(__file__).parent / "target"
DEMO_DRAFT_HEAD = Path(__file__).parent / "draft_head"
DEMO_PROMPTS = Path(__file__).parent / "prompts.jsonl"
