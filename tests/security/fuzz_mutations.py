"""Mutations of valid examples: of bytes, text, and the structure of JSON, HTTP, safetensors and pickles."""

import itertools
import json
import pickletools
import struct
from random import Random

NUMBERS = (0, 1, 2, 255, 256, 65535, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, (1 << 63) - 1)
ODD_TEXTS = (
    *(
        "\0",
        "\r",
        "\r\n",
        "\n",
        "\t",
        "\x1b]52;c;QQ==\x07",
        "\x1b[2J",
        "\x9b2J",
        "\u202e",
        "\u200b",
        "\u2028",
        "\ufeff",
    ),
    *("\u00b2", "\uff11", "\u0661", "\u00bd", "\U0001d7d8", "\ud800", "\udfff", "e\u0301" * 30, "\U0001f600", "\u00df"),
    *("9" * 5000, "1e400", "-1e-400", "0x10", "NaN", "-Infinity", "1_0", "--1", "1/0", "0/0", "1e5000", "10**9", "-0"),
    *("/", "..", "../../../x", "%s%n", "{}", "{0.__class__}", "$", "\\", '"', "'", "`", "[link=x]", "<|eot|>", "</s>"),
    *(",", ";", ":", "=", ".", "@[0:1]", "#", "&", "*", "?", "~", " ", "  ", "null", "true", "none", "auto"),
)
BRACKETS = ("[", "{", "(", '{"a":', "[[", "\\frac{", "\\sqrt{", "\\boxed{", "<a>", "a.", "-", "^{", "'", '"', "\\left(")
ODD_VALUES = (
    *(None, True, False, 0, -1, 1 << 31, -(1 << 63), 1 << 64, 10**400, 0.0, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x" * 5000, "\0", "\ud800", "\x1b[2J", "1", "none", "auto", "../x", [], {}, [[]], [None], {"": None}),
    *({"kind": "x"}, {"\x1b[2J": 1}, [0] * 2000, {"a": {"a": {"a": {}}}}, [{}], ["\u202e"], -1.5, "1e400"),
)
LARGEST = 1 << 20


def bytes_of(random: Random, data: bytes, seeds: list[bytes]) -> bytes:
    """Apply one to six edits: bits, integers of any width, pieces removed, repeated, moved or taken from another
    example."""
    data = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        at = _place(random, len(data))
        end = min(len(data), at + random.choice((1, 2, 4, 8, 16, 64, 500)))
        edit = random.randrange(9)
        if edit == 0 and data:
            data[at] ^= 1 << random.randrange(8)
        elif edit == 1 and data:
            data[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        elif edit in (2, 3):
            width = random.choice((1, 2, 4, 8))
            number = random.choice((*NUMBERS, len(data), random.randrange(300))) * random.choice((1, 1, 1, -1))
            packed = (number & ((1 << 8 * width) - 1)).to_bytes(width, random.choice(("little", "little", "big")))
            data[at : at + width] = packed
        elif edit == 4:
            del data[at:end]
        elif edit == 5:
            data[at:at] = data[at:end] * random.choice((1, 2, 50))
        elif edit == 6:
            data[at:at] = random.randbytes(random.choice((1, 3, 8, 64)))
        elif edit == 7:
            other = random.choice(seeds)
            start = _place(random, len(other))
            data[at:end] = other[start : start + random.choice((4, 32, 256))]
        else:
            del data[_place(random, len(data)) :]
    return bytes(data[:LARGEST])


def _place(random: Random, size: int) -> int:
    """Return a position in data of this size; every third is near the beginning or the end, where headers are."""
    near = random.randrange(6)
    if near == 0:
        return min(max(0, size - 1), random.randrange(64))
    if near == 1:
        return max(0, size - 1 - random.randrange(64))
    return random.randrange(size) if size else 0


def text_of(random: Random, data: bytes, seeds: list[bytes]) -> bytes:
    """The same for text: unusual words, endless brackets, pieces of other examples."""
    text = decoded(data)
    for _ in range(random.choice((1, 1, 2, 3, 5))):
        at = random.randrange(len(text) + 1)
        end = min(len(text), at + random.choice((0, 1, 3, 10, 40)))
        edit = random.randrange(8)
        if edit in (0, 1):
            text = text[:at] + random.choice(ODD_TEXTS) + text[end:]
        elif edit == 2:
            many = random.choice((2, 20, 45, 300, 5000))
            text = text[:at] + random.choice(BRACKETS) * many + text[at:]
        elif edit == 3:
            text = text[:at] + text[end:]
        elif edit == 4:
            text = text[:at] + text[at:end] * random.choice((2, 3, 100, 3000)) + text[end:]
        elif edit == 5:
            other = decoded(random.choice(seeds))
            start = random.randrange(len(other) + 1)
            text = text[:at] + other[start : start + random.choice((5, 40, 400))] + text[end:]
        elif edit == 6:
            text = text[:at] + chr(random.choice((random.randrange(128), random.randrange(0x3000)))) + text[end:]
        else:
            return bytes_of(random, encoded(text), seeds)
        text = text[:LARGEST]
    return encoded(text)


def decoded(data: bytes) -> str:
    """Return text with every kind of fault that a string may have, including half surrogate pairs."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def encoded(text: str) -> bytes:
    """Undo `decoded` for UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def json_of(random: Random, data: bytes, seeds: list[bytes]) -> bytes:
    """Change one to three values or names of a JSON document; for every fourth input, change its text instead."""
    if random.randrange(4) == 0:
        return text_of(random, data, seeds)
    value = json.loads(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        value = changed_value(random, value, seeds)
    try:
        return encoded(json.dumps(value, ensure_ascii=random.random() < 0.5))
    except RecursionError:
        return text_of(random, data, seeds)


def changed_value(random: Random, root, seeds: list[bytes]):
    """Return a document with one change, applied in place where possible."""
    places = list(_places(root))
    if not places:
        return random.choice(ODD_VALUES)
    parent, key = random.choice(places)
    edit = random.randrange(8)
    if edit == 0 and isinstance(parent, dict):
        del parent[key]
    elif edit == 1 and isinstance(parent, dict):
        parent[random.choice((*ODD_TEXTS, key * 2))] = parent.pop(key)
    elif edit == 2 and isinstance(parent, list):
        parent[key:key] = [parent[key]] * random.choice((1, 1, 300))
    elif edit == 3:
        other, place = random.choice(places)
        parent[key] = other[place] if not isinstance(other[place], dict | list) else []
    elif edit == 4:
        deep = parent[key]
        for _ in range(random.choice((1, 5, 50, 400))):
            deep = [deep] if random.random() < 0.5 else {"a": deep}
        parent[key] = deep
    elif edit == 5 and isinstance(parent[key], str):
        parent[key] = decoded(text_of(random, encoded(parent[key]), seeds))
    elif edit == 6 and isinstance(parent[key], int | float):
        parent[key] = random.choice((*NUMBERS, -parent[key], parent[key] // 2, 10**400))
    else:
        parent[key] = json.loads(json.dumps(random.choice(ODD_VALUES)))
    return root


def _places(root):
    """Return (parent, key) of every value within a document."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in list(pairs):
            yield value, key
            waiting.append(item)


def toml_of(random: Random, data: bytes, seeds: list[bytes]) -> bytes:
    """Change values and names of a recipe, or its text."""
    import tomllib

    import tomli_w

    if random.randrange(2):
        return text_of(random, data, seeds)
    value = tomllib.loads(decoded(data))
    for _ in range(random.choice((1, 2))):
        value = changed_value(random, value, seeds)
    try:
        return encoded(tomli_w.dumps(value))
    except (TypeError, ValueError, AttributeError, RecursionError):  # TOML has no null, for example
        return text_of(random, data, seeds)


def lines_of(random: Random, data: bytes, seeds: list[bytes]) -> bytes:
    """Change one row of a JSONL file, or its text."""
    lines = data.split(b"\n")
    index = random.randrange(len(lines))
    if lines[index].strip():
        lines[index] = json_of(random, lines[index], seeds)
    else:
        return text_of(random, data, seeds)
    return b"\n".join(lines)


def http_of(random: Random, data: bytes, seeds: list[bytes]) -> bytes:
    """Change the body as JSON with a correct length, the head as text, or all of it as bytes."""
    head, mark, body = data.partition(b"\r\n\r\n")
    edit = random.randrange(6)
    if edit == 0:
        return bytes_of(random, data, seeds)
    if edit == 1:
        head = text_of(random, head, [seed.partition(b"\r\n\r\n")[0] for seed in seeds])
    else:
        body = json_of(random, body, [seed.partition(b"\r\n\r\n")[2] for seed in seeds])
    if edit > 1 or random.randrange(2):
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length:")]
        head = b"\r\n".join([*lines, b"Content-Length: %d" % len(body)])
    return head + mark + body


def safetensors_of(random: Random, data: bytes, seeds: list[bytes]) -> bytes:
    """Change the header as JSON with a correct length, or bytes."""
    if random.randrange(2):
        return bytes_of(random, data, seeds)
    (length,) = struct.unpack_from("<Q", data)
    header = json_of(random, data[8 : 8 + length], [b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def pickle_of(random: Random, data: bytes, seeds: list[bytes]) -> bytes:
    """Omit, repeat or move instructions of a pickle, or change their arguments; or change bytes."""
    if random.randrange(2):
        return bytes_of(random, data, seeds)
    starts = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(starts)]
    for _ in range(random.choice((1, 1, 2, 4))):
        index = random.randrange(len(parts))
        edit = random.randrange(5)
        if edit == 0:
            del parts[index]
        elif edit == 1:
            parts[index:index] = [parts[index]] * random.choice((1, 2, 1000))
        elif edit == 2:
            other = random.randrange(len(parts))
            parts[index], parts[other] = parts[other], parts[index]
        elif edit == 3:
            parts[index] = parts[index][:1] + bytes_of(random, parts[index][1:], [data])
        else:
            parts[index] = random.choice((b"N", b"]", b"}", b")", b"K\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff"))
    return b"".join(parts)[:LARGEST]
