"""Keys of a config that a caller wants ignored: which may be, and which were."""

from collections.abc import Collection, Iterator

#: The option of every command that gives ``ignore_config_keys``, once for each key.
IGNORE_OPTION = "--ignore-config-key"


class IgnoredKeys(Collection[str]):
    """Keys that a caller vouches for as having no effect, in one config or in several that go together.

    Only unknown keys can be ignored. One that is understood, whatever it says, is heeded; to ask for more is
    an error (`check`), unless the same name is unknown elsewhere: in another object, or in the other config
    of a pair. Who reads one config need not know this class: a list of keys will do.
    """

    def __init__(self, keys: Collection[str] = ()):
        """Nothing has been read yet."""
        self._keys = frozenset(keys)
        self._ignored: set[str] = set()
        self._understood: dict[str, str] = {}

    def __contains__(self, key: object) -> bool:
        """Whether the caller vouches for a key."""
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        """The keys."""
        return iter(self._keys)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._keys)

    def note(self, where: str, *, understood: Collection[str] = (), ignored: Collection[str] = ()) -> None:
        """Says what became of the keys of an object, these among them."""
        self._understood |= dict.fromkeys(self._keys.intersection(understood), where)
        self._ignored |= self._keys.intersection(ignored)

    def check(self) -> None:
        """Refuses keys that are understood wherever they were met; for when all has been read.

        Raises:
            ValueError: There are some.
        """
        needless = sorted(self._understood.keys() - self._ignored)
        if needless:
            wheres = ", ".join(dict.fromkeys(self._understood[key] for key in needless))
            raise ValueError(
                f"{wheres}: {needless} cannot be ignored: such keys are understood, and what they say is "
                f"heeded; ignore_config_keys ({IGNORE_OPTION}) is for unknown keys"
            )
