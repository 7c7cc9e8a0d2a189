"""A checkpoint's tokenizer."""

from pathlib import Path
from typing import Any

from jetspec_jax.progress import waiting


def load_tokenizer(folder: Path) -> Any:
    """The folder's transformers tokenizer, or None when it has none.

    Raises:
        ValueError: It is one in Python only, which cannot decode token by token.
    """
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        return None
    with waiting(f"loading the tokenizer of {folder.name}"):
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{folder}: {type(tokenizer).__name__} has no fast form; a tokenizer.json is needed")
    return tokenizer
