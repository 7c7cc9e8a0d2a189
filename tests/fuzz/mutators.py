"""What is done to a checkpoint's folder: its bytes, its JSON, its tensors, and its files as a whole."""

import json
import math
import os
import re

import numpy as np

DEEP = 20_000
#: What stands where something else should.
VALUES = (
    *(None, True, False, 0, 1, 2, 3, -1, 1.5, 10**6, 10**9, 2**31, 2**63, 2**64, 10**400, -(10**400)),
    *(1e-320, 1e-30, 1e30, 1e308, math.inf, -math.inf, math.nan),
    *("", "x", "\ud800", "\0", "a" * 5000, "9" * 5000, "../model.safetensors", "/etc/passwd", "~", "qwen3"),
    *([], {}, [[]], [None], [0], [1] * 3000, ["full_attention"], {"a": {}}, {"rope_type": []}),
)
DTYPES = ("F32", "BF16", "F16", "F64", "I8", "U8", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "F4", "", 5)
LARGEST = 10**9  # of a shape


def pick(rng, items):
    """One of several, whatever they are: NumPy would make arrays of them."""
    return items[int(rng.integers(len(items)))]


def mutate(folder, rng):
    """Does one thing to one file; says what."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    path = pick(rng, paths)
    # The interesting files are small or few: often one of those.
    if rng.random() < 0.7:
        path = pick(rng, [own for own in paths if own.suffix in (".json", ".safetensors")])
    choices = [flip, truncate, overwrite, replace, swap_files]
    if path.suffix == ".json":
        choices += 4 * [change_value, change_value, drop_key, add_key, write_number, repeat_key, nest]
    if path.suffix == ".safetensors":
        choices += 4 * [change_header, change_header, change_values, change_length]
    change = pick(rng, choices)
    return f"{change.__name__} {path.relative_to(folder)}: {change(path, rng)}"


def flip(path, rng):
    """Changes single bytes, half of them near the beginning."""
    content = bytearray(path.read_bytes())
    places = []
    for _ in range(int(rng.integers(1, 8)) if content else 0):
        near = min(len(content), 400) if rng.random() < 0.5 else len(content)
        places.append(int(rng.integers(near)))
        content[places[-1]] ^= int(rng.integers(1, 256))
    path.write_bytes(content)
    return f"bytes {places}"


def truncate(path, rng):
    """Takes the end away, or adds some."""
    content = path.read_bytes()
    kept = int(rng.integers(len(content) + 1))
    path.write_bytes(content[:kept] if rng.random() < 0.7 else content + rng.bytes(kept % 1000))
    return f"{kept} bytes of {len(content)}"


def overwrite(path, rng):
    """Another content altogether."""
    contents = (b"", b"\0" * 64, rng.bytes(300), b"[]", b"null", b'"', b"{", b"\xff\xfe{}", b"[" * DEEP)
    index = int(rng.integers(len(contents)))
    path.write_bytes(contents[index])
    return f"content {index}"


def replace(path, rng):
    """Takes the file away, or puts in its place what is no file."""
    os.unlink(path)
    kind = pick(rng, ("nothing", "folder", "pipe", "dangling link", "link to itself", "link to a device"))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to({"link to itself": path.name, "link to a device": "/dev/null"}.get(kind, "nowhere"))
    return kind


def swap_files(path, rng):
    """Gives two files each other's content, or one another name."""
    others = sorted(own for own in path.parent.iterdir() if own.is_file() and own != path)
    if not others or rng.random() < 0.4:
        other = path.with_name(pick(rng, ("a" * 200 + path.suffix, f"other{path.suffix}", "model.bin")))
        path.rename(other)
        return f"renamed {other.name[:20]}"
    other = pick(rng, others)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)
    return f"with {other.name}"


def _places(value, path=()):
    """Every place in a JSON value, as container and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key, (*path, key)
        # Vocabularies are large: their first entries stand for all.
        if len(path) < 6:
            yield from list(_places(inner, (*path, key)))[:40]


def _edited(path, edit):
    """Edits a file's JSON, if it is JSON still."""
    try:
        raw = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return "no JSON any more"
    places = list(_places(raw))
    if not isinstance(raw, dict) or not places:
        return "nothing in it"
    said = edit(raw, places)
    path.write_text(json.dumps(raw))
    return said


def change_value(path, rng):
    def edit(_, places):
        container, key, where = pick(rng, places)
        value = pick(rng, VALUES)
        if rng.random() < 0.2:
            value = pick(rng, places)[0]  # what is somewhere else
            value = json.loads(json.dumps(value))
        container[key] = value
        return f"{where} = {str(value)[:40]!r}"

    return _edited(path, edit)


def drop_key(path, rng):
    def edit(_, places):
        container, key, where = pick(rng, places)
        del container[key]
        return f"{where}"

    return _edited(path, edit)


def add_key(path, rng):
    def edit(raw, places):
        names = ("zoom", "text_config", "rope_scaling", "quantization_config", "layer_types", "dflash_config")
        containers = [raw, *(inner[key] for inner, key, _ in places if isinstance(inner[key], dict))]
        name, value = pick(rng, (*names, "auto_map", "eos_token_id", "\ud800", "")), pick(rng, VALUES)
        pick(rng, containers)[name] = value
        return f"{name!r} = {str(value)[:40]!r}"

    return _edited(path, edit)


def write_number(path, rng):
    """Puts what JSON may hold and Python would not write in place of a number."""
    text = path.read_text(errors="replace")
    numbers = list(re.finditer(r"(?<=[:\[, ])-?\d+(\.\d+)?", text))[:200]
    if not numbers:
        return "no number"
    found, number = (
        pick(rng, numbers),
        pick(rng, ("1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "1e5", "-0")),
    )
    path.write_text(text[: found.start()] + number + text[found.end() :])
    return f"{number[:10]} at {found.start()}"


def repeat_key(path, rng):
    """Says something twice."""

    def edit(raw, places):
        return pick(rng, [where for container, _, where in places if container is raw])[0]

    key = _edited(path, edit)
    # Whatever was done to the text before, it need not be Unicode any more.
    more = f', "{key}": {json.dumps(pick(rng, VALUES))}}}'.encode("utf-8", "surrogatepass")
    path.write_bytes(path.read_bytes().rstrip()[:-1] + more)
    return key


def nest(path, rng):
    """Puts a deeply nested value in place of another."""
    text = path.read_text(errors="replace")
    places = [found.end() for found in re.finditer(r":\s*", text)][:100]
    if not places:
        return "no place"
    place, depth = pick(rng, places), pick(rng, (50, 900, DEEP))
    path.write_text(text[:place] + "[" * depth + "]" * depth + ", " + '"deep": ' + text[place:])
    return f"{depth} deep at {place}"


def _header(content):
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _with_header(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def change_header(path, rng):
    """Lies about a tensor: its name, type, shape or place."""
    try:
        header, data = _header(path.read_bytes())
    except (ValueError, RecursionError):
        return "no header any more"
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return "no tensors"
    name, other = pick(rng, names), pick(rng, names)
    entry = header[name]
    kind = pick(
        rng, ("name", "dtype", "shape", "offsets", "gone", "added", "twin", "swapped", "metadata", "value")
    )
    if kind == "name":
        header[pick(rng, ("x", "", "\ud800", "a" * 3000, name + ".bias", "lm_head.weight"))] = header.pop(
            name
        )
    elif kind == "dtype":
        entry["dtype"] = pick(rng, DTYPES)
    elif kind == "shape":
        shape = entry["shape"]
        shapes = (shape[::-1], [*shape, 1], [1, *shape], [], [0], [-1], [LARGEST] * 3, [2**63], [1.5], "x")
        entry["shape"] = pick(rng, shapes)
    elif kind == "offsets":
        begin, end = entry["data_offsets"]
        pairs = (
            [0, end - begin],
            [end, begin],
            [begin, end + 4],
            [begin + 4, end],
            [2**63, 2**64],
            [-4, 0],
            [],
        )
        entry["data_offsets"] = pick(rng, pairs)
    elif kind == "gone":
        del header[name]
    elif kind == "added":
        header["surplus.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    elif kind == "twin":
        header[name] = dict(header[other])
    elif kind == "swapped":
        header[name], header[other] = header[other], header[name]
    elif kind == "metadata":
        header["__metadata__"] = pick(rng, VALUES)
    else:
        entry[pick(rng, list(entry))] = pick(rng, VALUES)
    path.write_bytes(_with_header(header, data))
    return f"{kind} of {name}"


def change_values(path, rng):
    """Writes values into a float32 tensor that no training gives."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    if start + 4 > len(content):
        return "no values any more"
    value = pick(rng, (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 0.0, 1e6))
    count = int(rng.integers(1, 20))
    for place in rng.integers((len(content) - start) // 4, size=count).tolist():
        content[start + 4 * place : start + 4 * place + 4] = np.float32(value).tobytes()
    path.write_bytes(content)
    return f"{count} times {value}"


def change_length(path, rng):
    """Lies about the length of the header."""
    content = path.read_bytes()
    length = pick(rng, (0, 1, 7, len(content), 10**8, 2**63, 2**64 - 1, int(rng.integers(len(content) + 1))))
    path.write_bytes(length.to_bytes(8, "little") + content[8:])
    return f"{length}"
