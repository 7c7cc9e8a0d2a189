"""The draft head of SmolLM2-135M-Instruct, in Hugging Face layout (see README.md)."""

from pathlib import Path

#: The word for either of them wherever a checkpoint is named.
SMOLLM2 = "smollm2"
SMOLLM2_DRAFT_HEAD = Path(__file__).parent / "draft_head"
