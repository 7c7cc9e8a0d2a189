"""Checked access to a JSON object's keys: a key that no code has read is an error."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from jetspec_jax.arguments import decode_utf8, shortened, shown

#: The command-line option for ``ignore_config_keys``; it is repeated for each key.
IGNORE_OPTION = "--ignore-config-key"

#: Upper limits, far above all published models. A config beyond them is refused before anything is built.
MAX_LAYERS = 512
MAX_HEADS = 2**12  # heads, and elements of a head
MAX_EXPERTS = 2**10
MAX_KERNEL = 2**6  # width of a convolution, in tokens
MAX_SIZE = 2**20  # other sizes, and vocabularies
MAX_TOKENS = 2**30  # contexts and windows


class Bound(NamedTuple):
    """Bounds of a file that is parsed whole, two to ten times those of the largest published files.

    Parsers turn a value into up to 200 bytes of memory.
    """

    bytes: int
    values: int


CONFIG = Bound(4 * 2**20, 2**18)
#: Chat templates, also as texts in configs. A compiled one takes 10 KB for a value.
TEMPLATE = Bound(2**20, 2**14)
INDEX = Bound(32 * 2**20, 2**20)
#: Headers of safetensors, of which the library refuses larger ones. A tensor has twelve values.
HEADER = Bound(100_000_000, 2**21)
#: Tokenizers, vocabularies, and files of unknown kinds.
LARGE = Bound(64 * 2**20, 2**22)
# Published files have at least four bytes per value. With fewer, parsers could need more than 64 bytes of
# memory per byte of a file.
_VALUE_BYTES = 3
# Bytes that are counted at a time.
_PART = 2**20

# The most characters of a list of keys in an error message.
_LONGEST_LIST = 600
# The normal range of float32.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127 * (2 - 2.0**-23)

# Keys for training, for the tokenizer and for transformers itself: no forward pass depends on them, nor on
# keys that begin with an underscore, which transformers reserves.
INERT_KEYS = frozenset(
    {
        "architectures",
        "auto_map",  # refers to code in the repository, which is never fetched nor run
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cls_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)

# Keys that change the maths, with the values that do not. Any other value is refused.
HARMLESS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1.0),
    "pretraining_tp": (None, 1),
    "tie_encoder_decoder": (None, False),
}


def read_json(path: Path, bound: Bound = CONFIG) -> dict[str, Any]:
    """Reads a JSON object from a file; a repeated key must have the same value."""
    check_size(path, bound)
    try:
        raw = json.loads(decode_utf8(path.read_bytes(), "it"), object_pairs_hook=_object)
    except ValueError as error:  # of the JSON, or of its UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply") from error
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder, not a JSON file") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def check_size(path: Path, bound: Bound = CONFIG) -> None:
    """Refuses a JSON or text file with too many bytes or values, before it is parsed."""
    size = path.stat().st_size
    if size > bound.bytes:
        raise ValueError(
            f"{path} has {size:,} bytes; it may have {bound.bytes:,} ({bound.bytes // 2**20} MiB), more than "
            "any published file"
        )
    check_values(_parts(path), size, bound, str(path), lines=path.suffix in (".txt", ".model"))


def _parts(path: Path) -> Iterator[bytes]:
    """A file in parts. It is opened when the first is needed, because a pipe can be read only once."""
    with path.open("rb") as file:
        while part := file.read(_PART):
            yield part


def check_values(parts: Iterable[bytes], size: int, bound: Bound, where: str, *, lines: bool = False) -> None:
    """Refuses JSON with too many values, by its brackets, colons and commas.

    Those in strings are counted too. Published files have too few of them to matter.

    Parts are read only as far as needed; ``size`` is in bytes. With ``lines`` it is a vocabulary with a value
    per line instead of JSON.
    """
    most, count = min(bound.values, max(size // _VALUE_BYTES, _PART // 4)), 0
    if size <= most:
        return
    for part in parts:
        count += len(part) - len(part.translate(None, b"\n" if lines else b"[{:,"))
        if count > most:
            raise ValueError(
                f"{where} has more than {most:,} values in its {size:,} bytes, more than any published file, "
                "and would take too much memory"
            )


class Fields:
    """A JSON object that records which of its keys were read.

    `done` raises an error for each unread key, because an ignored key can silently change the model's output.
    Keys that change the maths in most families (`HARMLESS_ONLY`) are checked by `done` unless the family has
    read them. Unread keys may be allowed by the caller. A null counts as an absent key. All methods raise
    ValueError for a value of the wrong type or range, for keys that disagree, and for a missing key without a
    default.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, ignored: Collection[str] = ()):
        """A key in ``ignored`` may stay unread, unless some reader knows it."""
        self.raw, self.where, self.ignored = raw, where, ignored
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is present and not null. A key with null is marked as read."""
        if self.raw.get(key) is None:
            self.used.add(key)
            return False
        return True

    def get(self, key: str, default: Any = None) -> Any:
        """The value of any type; the default if the key is absent or null."""
        self.used.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def inert(self, *keys: str) -> None:
        """Marks keys that have no effect on a forward pass as read."""
        self.used.update(keys)

    def assume(self, **values: Any) -> None:
        """Sets default values of absent keys, for defaults on which all readers of a family agree."""
        self.raw = {**self.raw, **{key: value for key, value in values.items() if key not in self}}

    def check_agree(self, key: str, newer: Any, older: Any, *replaced: str) -> None:
        """Checks that ``key``, if present, has the meaning of the older keys that it replaced.

        ``newer`` and ``older`` are the values read from either.
        """
        if key in self and newer != older:
            older_keys = [name for name in replaced if name in self]
            raise ValueError(f"{self.where}: {key} and {', '.join(older_keys)} mean the same and differ")

    def only(self, key: str, *harmless: Any, default: Any = None, feature: str = "") -> None:
        """Refuses a key that changes the maths, unless it has a harmless value.

        Args:
            key: The key.
            *harmless: Values that are supported.
            default: The value if the key is absent or null.
            feature: The feature that other values switch on, if the key does not say so.
        """
        value = self.get(key, default)
        if value not in harmless:
            setting = (
                f"{key}={shown(value)}"
                if key in self
                else f"{key} is absent, which means {value!r}, and that"
            )
            hint = f"; it cannot be ignored, as {IGNORE_OPTION} is for unknown keys"
            raise ValueError(
                f"{self.where}: {setting} changes the model and is not supported"
                f"{feature and f' ({feature})'}; supported: {', '.join(map(repr, harmless))}"
                f"{hint if key in self.ignored else ''}"
            )

    def integer(self, *keys: str, least: int = 1, most: int = MAX_SIZE, default: int | None = None) -> int:
        """An integer from ``least`` to ``most`` that may be stored under any of several keys."""
        found = {key: value for key in keys if (value := self.get(key)) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            raise ValueError(f"{self.where}: {' and '.join(found)} mean the same and differ: {values}")
        value = values[0] if values else default
        if not is_int(value) or value < least:
            raise self.error(self.name(*keys), f"an integer of at least {least}", value)
        if value > most:
            raise self.error(self.name(*keys), f"at most {most}", value)
        return value

    def positive(self, key: str) -> float:
        """A positive number within the range of float32."""
        value = self.get(key)
        if not is_number(value) or not value >= _SMALLEST:
            raise self.error(key, "a positive number", value)
        return float(value)

    def optional(self, key: str) -> float | None:
        """As `positive`, but None if the key is absent."""
        return self.positive(key) if key in self else None

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean; strings such as "false" are refused."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def layers(self, key: str, length: int, *, surplus: int = 0) -> list[Any] | None:
        """A list with one entry per layer; None if the key is absent.

        It may have exactly ``surplus`` more entries, which are dropped.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(key, "a list", value)
        if len(value) not in (length, length + surplus):
            raise ValueError(f"{self.where}: {len(value)} {key} for {length} layers")
        return value[:length]

    def object(self, key: str) -> "Fields | None":
        """The fields of a nested object; None if the key is absent. The caller must call `done` on it."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return Fields(value, f"{self.where}: {key}", self.ignored)

    def name(self, *keys: str) -> str:
        """The first of several keys that is present; if none is, the first."""
        return next((key for key in keys if key in self), keys[0])

    def error(self, key: str, expected: str, value: Any) -> ValueError:
        """The error for a value of the wrong type or range."""
        return ValueError(f"{self.where}: {key} must be {expected}, not {shown(value)}")

    def unread(self) -> set[str]:
        """Keys that were not read and are not null."""
        return {key for key, value in self.raw.items() if value is not None} - self.used

    def done(self, *, top: bool = False) -> None:
        """Refuses unread keys; the ``top`` object of a model may have `INERT_KEYS` and `HARMLESS_ONLY`."""
        if top:
            for key, harmless in HARMLESS_ONLY.items():
                if key in self.raw and key not in self.used:
                    self.only(key, *harmless, default=harmless[0])
            self.used.update(INERT_KEYS, (key for key in self.raw if key.startswith("_")))
        if unknown := sorted(self.unread().difference(self.ignored)):
            options = shortened(" ".join(f"{IGNORE_OPTION} {key}" for key in unknown), _LONGEST_LIST)
            names = shortened(str(unknown), _LONGEST_LIST)
            raise ValueError(
                f"{self.where}: unknown keys {names}; if none of them changes the model's output, "
                f"pass ignore_config_keys={names}, on the command line {options}"
            )


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a number in the range of float32; 1e999 and NaN are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs; a repeated key must have the same value."""
    raw: dict[str, Any] = {}
    for key, value in pairs:
        if key in raw and raw[key] != value:
            raise ValueError(f"key {shown(key)} occurs twice with different values")
        raw[key] = value
    return raw
