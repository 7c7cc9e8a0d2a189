"""The keys of a JSON object, read one by one, so that in the end every one has been accounted for."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from jetspec_jax.arguments import shown

#: The option of every command that gives ``ignore_config_keys``, once for each key.
IGNORE_OPTION = "--ignore-config-key"

#: The largest numbers that are read. Published models stay far below them, and what a file claims beyond
#: them is refused before anything is built of it.
MAX_LAYERS = 512
MAX_HEADS = 2**12  # heads, and elements of one
MAX_EXPERTS = 2**10
MAX_KERNEL = 2**6  # tokens that a convolution sees
MAX_SIZE = 2**20  # other sizes, and vocabularies
MAX_TOKENS = 2**30  # contexts and windows

#: The largest JSON or text file that is read. The largest tokenizers have a tenth of it. Parsing a file takes
#: several times its size.
MAX_TEXT_BYTES = 2**28

# The float32 numbers of full precision: models compute with no others.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127 * (2 - 2.0**-23)

# Keys of training, of the tokenizer and of transformers' own bookkeeping: no forward pass depends on them.
# Nor does one depend on keys that begin with an underscore, which transformers keeps for itself.
INERT_KEYS = frozenset(
    {
        "architectures",
        "auto_map",  # names code in the repository, which is never fetched nor run
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

# Keys that change the maths. They are read here only to be refused, unless they hold the one harmless value.
HARMLESS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1.0),
    "pretraining_tp": (None, 1),
    "tie_encoder_decoder": (None, False),
}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object, naming the file when it is not one.

    Raises:
        ValueError: The file is not a JSON object, gives a key two values, or is too large.
    """
    check_size(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except ValueError as error:  # of the JSON, or of its UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply") from error
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder, not a JSON file") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def check_size(path: Path) -> None:
    """Refuses a JSON or text file that is too large, before it is read.

    Raises:
        ValueError: It has more than `MAX_TEXT_BYTES`.
        OSError: It is not there.
    """
    if (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, and a JSON or text file may have {MAX_TEXT_BYTES:,} "
            f"({MAX_TEXT_BYTES // 2**20} MiB); replace it by the published file"
        )


class Fields:
    """A JSON object whose keys are *used*, *known to be inert*, or *known to change the maths*.

    A key that is none of these is an error in the end (`done`), because a key that is skipped in silence
    gives wrong text without a word. Whatever is read counts as used; keys that change the maths in most
    families (`HARMLESS_ONLY`) are checked in the end unless the family has read them. An unknown key may be
    ignored by the caller, and a null says no more than an absent key does.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, ignored: Collection[str] = ()):
        """Reads nothing yet.

        Args:
            raw: The object.
            where: What error messages call it.
            ignored: Unknown keys that the caller vouches for. A key that is understood is never ignored.
        """
        self.raw, self.where, self.ignored = raw, where, ignored
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, and not null; a null that is asked for counts as used."""
        if self.raw.get(key) is None:
            self.used.add(key)
            return False
        return True

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any kind; null counts as absent."""
        self.used.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def inert(self, *keys: str) -> None:
        """Says that keys of this family have no effect on a forward pass."""
        self.used.update(keys)

    def assume(self, **values: Any) -> None:
        """Gives keys that files of this family leave out the values that all their readers give them."""
        self.raw = {**self.raw, **{key: value for key, value in values.items() if key not in self}}

    def check_agree(self, key: str, newer: Any, older: Any, *replaced: str) -> None:
        """Checks that keys of the older dialect say what the key of the newer one says that replaced them.

        Args:
            key: That key; without it there is nothing to check.
            newer: What it says.
            older: What the others say.
            *replaced: The others.

        Raises:
            ValueError: They differ.
        """
        if key in self and newer != older:
            there = [name for name in replaced if name in self]
            raise ValueError(f"{self.where}: {key} and {', '.join(there)} mean the same and differ")

    def only(self, key: str, *harmless: Any, default: Any = None, feature: str = "") -> None:
        """Refuses a key that changes the maths, unless it has a harmless value.

        Args:
            key: The key.
            *harmless: Values that are supported.
            default: What it means when the key is absent or null.
            feature: What the others stand for, where the key does not say so.

        Raises:
            ValueError: It holds another.
        """
        value = self.get(key, default)
        if value not in harmless:
            said = (
                f"{key}={shown(value)}"
                if key in self
                else f"{key} is absent, which means {value!r}, and that"
            )
            listed = f"; it cannot be ignored, as {IGNORE_OPTION} is for unknown keys"
            raise ValueError(
                f"{self.where}: {said} changes the model and is not supported"
                f"{feature and f' ({feature})'}; supported: {', '.join(map(repr, harmless))}"
                f"{listed if key in self.ignored else ''}"
            )

    def integer(self, *keys: str, least: int = 1, most: int = MAX_SIZE, default: int | None = None) -> int:
        """An integer, under the first of several names that is there.

        Args:
            *keys: The names.
            least: The smallest that it may be.
            most: The largest that it may be.
            default: What it is where none of them is there; None refuses that.

        Raises:
            ValueError: It is none, or out of its range, or two names disagree.
        """
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
        """A positive number that float32 holds.

        Raises:
            ValueError: It is none.
        """
        value = self.get(key)
        if not is_number(value) or not value >= _SMALLEST:
            raise self.error(key, "a positive number", value)
        return float(value)

    def optional(self, key: str) -> float | None:
        """A positive number that float32 holds; None if it is not there.

        Raises:
            ValueError: As for `positive`.
        """
        return self.positive(key) if key in self else None

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A boolean; the string "false" must not count as true.

        Raises:
            ValueError: It is none.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def layers(self, key: str, length: int, *, surplus: int = 0) -> list[Any] | None:
        """A list with an entry for each of ``length`` layers; None if it is not there.

        Args:
            key: The key.
            length: How many entries are wanted.
            surplus: How many more a list may have, all or none of them, which are of no use.

        Raises:
            ValueError: It is no list, or of another length.
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
        """The fields of an object below this one; None if it is not there. The caller must say `done`.

        Raises:
            ValueError: It is no object.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return Fields(value, f"{self.where}: {key}", self.ignored)

    def name(self, *keys: str) -> str:
        """The first of several names that is there, or else the first."""
        return next((key for key in keys if key in self), keys[0])

    def error(self, key: str, wanted: str, value: Any) -> ValueError:
        """What is said of a value that is not what it should be."""
        return ValueError(f"{self.where}: {key} must be {wanted}, not {shown(value)}")

    def unread(self) -> set[str]:
        """Keys that nobody has read and that say something."""
        return {key for key, value in self.raw.items() if value is not None} - self.used

    def done(self, *, top: bool = False) -> None:
        """Refuses what nobody has read.

        Args:
            top: Whether this is a model's own object, which may hold inert keys, and harmless ones.

        Raises:
            ValueError: There are unknown keys, or keys that change the maths.
        """
        if top:
            for key, harmless in HARMLESS_ONLY.items():
                if key in self.raw and key not in self.used:
                    self.only(key, *harmless, default=harmless[0])
            self.used.update(INERT_KEYS, (key for key in self.raw if key.startswith("_")))
        if unknown := sorted(self.unread().difference(self.ignored)):
            options = " ".join(f"{IGNORE_OPTION} {key}" for key in unknown)
            raise ValueError(
                f"{self.where}: unknown keys {unknown}; if none of them changes the model's output, "
                f"pass ignore_config_keys={unknown}, on the command line {options}"
            )


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a number in the range of float32: 1e999 and NaN are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file, which may repeat a key but not give it two values."""
    raw: dict[str, Any] = {}
    for key, value in pairs:
        if key in raw and raw[key] != value:
            raise ValueError(f"{shown(key)} is there twice, with two values")
        raw[key] = value
    return raw
