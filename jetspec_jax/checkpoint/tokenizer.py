"""A checkpoint's tokenizer."""

from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.content import CheckpointError, check_regular, small_files
from jetspec_jax.progress import waiting

# Files of which one is enough for there to be a tokenizer.
FILES = ("tokenizer.json", "tokenizer_config.json")

# A text that a tokenizer is tried on.
_TEXT = "def f(x): return 'é'\n"


def load_tokenizer(folder: Path) -> Any:
    """The folder's transformers tokenizer, or None when it has none.

    No code of the folder is run, and nothing is fetched.

    Raises:
        CheckpointError: It is one in Python only, which cannot decode token by token, or the folder's files
            are not readable, or too large.
    """
    if not any((folder / name).exists() for name in FILES):
        return None
    for name in FILES:
        check_regular(folder / name)
    small_files(folder)  # which transformers reads whole
    try:
        with waiting(f"loading the tokenizer of {folder.name}"):
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            fast = hasattr(tokenizer, "backend_tokenizer")
            # Some files are read without complaint and fail later: better here, by name.
            if fast:
                tokenizer.decode(tokenizer.encode(_TEXT))
    except BaseException as error:
        # The library raises whatever its parsers do, and where its Rust code panics, no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        line = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{folder}: the tokenizer's files cannot be read: {line}") from error
    if not fast:
        raise CheckpointError(
            f"{folder}: {type(tokenizer).__name__} has no fast form; a tokenizer.json is needed"
        )
    return tokenizer
