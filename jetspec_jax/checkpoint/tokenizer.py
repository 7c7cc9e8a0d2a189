"""A checkpoint's tokenizer and its end-of-sequence tokens."""

from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.content import (
    SMALL_PATTERNS,
    CheckpointError,
    check_regular,
    content_of,
    read_object,
    small_files,
)
from jetspec_jax.checkpoint.gguf.header import is_gguf, read_header
from jetspec_jax.checkpoint.gguf.tokenizer import read_tokenizer
from jetspec_jax.checkpoint.gguf.vocabulary import special_ids
from jetspec_jax.checkpoint.hub import local_path, resolve
from jetspec_jax.checkpoint.library import import_transformers
from jetspec_jax.checkpoint.pairs import PAIRS
from jetspec_jax.config import parse_eos_token_ids
from jetspec_jax.progress import waiting

# A folder with one of these files has a tokenizer.
FILES = ("tokenizer.json", "tokenizer_config.json")

# A byte-order mark, which transformers keeps at the beginning of a template's file.
_BOM = "\ufeff"
# A text to test a tokenizer with.
_TEXT = "def f(x): return 'é'\n"


def load_named_tokenizer(path_or_id: str | Path) -> Any:
    """Loads the tokenizer of a folder (``config.json`` is not needed), a GGUF file or a hub id."""
    folder = local_path(path_or_id)
    place = folder if path_or_id not in PAIRS and folder.is_dir() else resolve(path_or_id, SMALL_PATTERNS)
    if (tokenizer := load_tokenizer(place)) is None:
        raise FileNotFoundError(f"{place} holds no tokenizer; a folder of one has {' or '.join(FILES)}")
    return tokenizer


def load_tokenizer(folder: Path) -> Any:
    """Loads the transformers tokenizer of a checkpoint's folder or GGUF file; None if it has none.

    Code in the folder is not run, and nothing is downloaded.
    """
    if is_gguf(folder):
        header = read_header(folder)
        with waiting(f"loading the tokenizer of {folder.name}"), content_of(folder, Exception):
            return read_tokenizer(header)
    if not any((folder / name).exists() for name in FILES):
        return None
    for name in FILES:
        check_regular(folder / name)
    small_files(folder)  # checks the files that transformers reads whole
    try:
        with waiting(f"loading the tokenizer of {folder.name}"):
            tokenizer = import_transformers().AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            fast = hasattr(tokenizer, "backend_tokenizer")
            # Some broken files load without an error and would fail later without a file name.
            if fast:
                tokenizer.decode(tokenizer.encode(_TEXT))
    except BaseException as error:
        # The library raises any error of its parsers; a panic of its Rust code is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        line = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{folder}: the tokenizer's files cannot be read: {line}") from error
    if not fast:
        raise CheckpointError(
            f"{folder}: {type(tokenizer).__name__} has no fast form; a tokenizer.json is needed"
        )
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        tokenizer.chat_template = {name: text.removeprefix(_BOM) for name, text in templates.items()}
    elif templates is not None:
        tokenizer.chat_template = templates.removeprefix(_BOM)
    return tokenizer


def read_eos_token_ids(folder: Path, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of a target: those of its configs, and the tokenizer's ``eos_token``.

    An ``eos_token`` outside the vocabulary is ignored, because the target cannot emit it. Tokenizers may be
    extended after the model was trained.
    """
    with content_of(folder):
        if is_gguf(folder):
            ids = parse_eos_token_ids(special_ids(read_header(folder)), None, folder=folder)
        else:
            place = folder / "generation_config.json"
            generation = read_object(place) if place.exists() else None
            ids = parse_eos_token_ids(read_object(folder / "config.json"), generation, folder=folder)
    if beyond := [token for token in ids if token >= vocab_size]:
        raise CheckpointError(f"{folder}: eos_token_id {beyond} lies outside the vocabulary of {vocab_size}")
    if tokenizer is None or tokenizer.eos_token is None:
        return ids
    # `tokenizer.eos_token_id` may be the id of the unknown token.
    eos = tokenizer.backend_tokenizer.token_to_id(tokenizer.eos_token)
    return ids if eos is None or eos in ids or eos >= vocab_size else (*ids, eos)
