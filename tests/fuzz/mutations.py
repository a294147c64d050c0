"""Changes to a checkpoint that know its formats: the text of a header, the opcodes of a pickle, the fields of a zip.

A byte turned at random is refused by the first check; what is still well formed goes further.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

from tests.fuzz.seeds import Files, text

Mutation = Callable[[Random, bytes], bytes]

NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    8,
    16,
    255,
    256,
    65536,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**30,
    10**400,
]
TEXTS = [
    "",
    "a",
    "8",
    "../canary/x",
    "/canary/x",
    "..",
    ".",
    "a/b",
    "config.json",
    "ckptx.json",
    ".metadata",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.7.x.weight",
    "model.layers.-1.x",
    "model.layers.*.mlp.up_proj.weight",
    "*",
    "0.weight",
    "model.layers.²",
    "__0_0.distcp",
    "model.safetensors",
    "a\x1b[31mb",
    "a\nb",
    "\u202ea",
    "\ud800",
    "x" * 5000,
    "9" * 5000,
    "a\0b",
    "F32",
    "BF16",
    "U8",
    "F4",
    "torch.float32",
    "model.layers." + "9" * 4000 + ".x",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "mixtral",
    "\u0663",
]
VALUES: list[Any] = [
    *NUMBERS,
    *TEXTS,
    None,
    True,
    False,
    0.5,
    float("nan"),
    float("inf"),
    -0.0,
    [],
    {},
    [[]],
    {"a": {}},
    [1, 2],
    [0, 1 << 64],
    [1 << 40, 1 << 40],
    [1] * 70,
    {"x": [None]},
]


def mutate_json(random: Random, data: bytes) -> bytes:
    """One value, key or row of a JSON document is changed, dropped, doubled or moved."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(random, data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            break
        holder, key = random.choice(places)
        what = random.randrange(7)
        if what <= 2:
            holder[key] = _nudged(random, holder[key])
        elif what == 3:
            del holder[key]
        elif what == 4:
            other, place = random.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                # Copies: a value may hold the other, and nothing may hold itself.
                holder[key], other[place] = deepcopy(other[place]), deepcopy(holder[key])
        elif what == 5 and isinstance(holder, dict):
            names = [name for each, name in places if isinstance(name, str) and each is not holder]
            holder[random.choice([*TEXTS, *names])] = holder.pop(key)
        elif isinstance(holder, list):
            holder.insert(key, deepcopy(random.choice(VALUES)))
        else:
            holder[random.choice(TEXTS)] = deepcopy(random.choice(VALUES))
    written = json.dumps(document)
    if random.random() < 0.1:  # a key twice
        written = written.replace("{", "{" + json.dumps(random.choice(TEXTS)) + ": 1, ", 1)
    return written.encode("utf-8", "surrogatepass")


def _places(document: Any) -> Any:
    stack = [document] if isinstance(document, dict | list) else []
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            yield node, key
            if isinstance(node[key], dict | list):
                stack.append(node[key])


def _nudged(random: Random, value: Any) -> Any:
    if type(value) is int and random.random() < 0.7:
        return random.choice((value + 1, value - 1, value * 2, -value, value // 2, *random.sample(NUMBERS, 3)))
    if isinstance(value, str) and random.random() < 0.7:
        return random.choice((value + "x", value[:-1], value.upper(), f"../{value}", *random.sample(TEXTS, 3)))
    return deepcopy(random.choice(VALUES))


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Bytes are turned, dropped, doubled or cut off."""
    spoiled = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(spoiled) + 1)
        what = random.randrange(5)
        if what == 0 and at < len(spoiled):
            spoiled[at] ^= 1 << random.randrange(8)
        elif what == 1:
            del spoiled[at : at + random.choice((1, 4, 8, 100))]
        elif what == 2:
            spoiled[at:at] = random.choice((b"\0", b"\xff" * 8, b"}", b"a" * 100, bytes(spoiled[at : at + 64])))
        elif what == 3:
            spoiled[at : at + 8] = random.choice(NUMBERS[:-2]).to_bytes(9, "little", signed=True)[:8]
        else:
            del spoiled[at:]
    return bytes(spoiled)


def mutate_header(random: Random, data: bytes) -> bytes:
    """The header of a safetensors file, with its length put right; or the length; or the bytes after it."""
    length = int.from_bytes(data[:8], "little")
    raw, body = data[8 : 8 + length], data[8 + length :]
    what = random.randrange(10)
    if what == 0:
        return random.choice(NUMBERS[:-2]).to_bytes(9, "little", signed=True)[:8] + data[8:]
    if what == 1:
        return data[:8] + raw + random.choice((body[:-1], body + b"\0", b"", body * 2))
    try:
        rows = json.loads(raw) if what == 2 else {}
        info = rows["__metadata__"]["DCP_SHARDING_INFO"]
        rows["__metadata__"]["DCP_SHARDING_INFO"] = mutate_json(random, info.encode()).decode("utf-8", "replace")
        raw = json.dumps(rows).encode()
    except Exception:  # there is none, or nothing to read any more
        raw = mutate_json(random, raw)
    return len(raw).to_bytes(8, "little") + raw + body


# Opcodes to slip in: values that are dear, wrong, or not what they seem.
_SNIPPETS = [
    b"K\x01\x85q\xf00" + b"h\xf0h\xf0\x86q\xf00" * 60 + b"h\xf0",
    b")" + b"\x85" * 100_000,
    b"]" * 3000 + b"a" * 2999,
    b"N",
    b"}",
    b"]",
    b")",
    b"\x88",
    b"0",
    b"(",
    b"t",
    b"R",
    b"b",
    b"u",
    b"s",
    b"e",
    b"a",
    b"\x81",
    b"Q",
    b"\x86",
    b"\x8f",
    b"\x91",
    b"\x90",
    b"G\x7f\xf8\0\0\0\0\0\0",
    b"\x8a\x0a" + b"\xff" * 10,
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"cbuiltins\ngetattr\n",
    b"ctorch\nSize\n",
    b"ccollections\nOrderedDict\n)R",
    b"h\0",
    b"h\x05",
    b"r\xff\xff\xff\x7f",
    b"\x97",
    b"\x98",
    b"\x8b\xff\xff\xff\xff",
]


def mutate_pickle(random: Random, data: bytes) -> bytes:
    """An opcode is dropped, doubled, moved, or given another argument; or others are slipped in."""
    try:
        found = list(pickletools.genops(data))
    except Exception:  # what is no pickle any more
        return mutate_bytes(random, data)
    ends = [at for _, _, at in found[1:] if at is not None] + [len(data)]
    parts = [data[at:end] for (_, _, at), end in zip(found, ends, strict=True)]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(len(parts))
        what = random.randrange(8)
        if what == 0:
            parts[at] = b""
        elif what == 1:
            parts[at] *= random.choice((2, 3, 1000))
        elif what == 2:
            other = random.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif what == 3:
            parts[at] = random.choice(_SNIPPETS)
        elif what == 4:
            parts[at] += random.choice(_SNIPPETS)
        else:
            valued = [
                i
                for i, (_, arg, _) in enumerate(found)
                if isinstance(arg, str | int) and parts[i][:1] in b"KMJXT\x8c\x8a"
            ]
            if valued:
                at = random.choice(valued)
                parts[at] = _pickled(random, found[at][1])
    return b"".join(parts)


def _pickled(random: Random, value: str | int) -> bytes:
    nudged = _nudged(random, value)
    if isinstance(nudged, str):
        return text(nudged)
    if type(nudged) is int:
        encoded = pickle.encode_long(nudged)[:255]
        return b"\x8a%c" % len(encoded) + encoded
    return random.choice(_SNIPPETS)


def mutate_zip(random: Random, data: bytes) -> bytes:
    """A member of an archive is changed, dropped, doubled or renamed; or a field of the zip is."""
    what = random.randrange(4)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # what is no zip any more
        return mutate_bytes(random, data)
    if what == 0:
        return _mutate_fields(random, data)
    if what == 1:
        return mutate_bytes(random, data)
    pickles = [i for i, (name, _) in enumerate(members) if name.endswith("data.pkl")]
    if not members:
        return mutate_bytes(random, data)
    if what == 2 and pickles:
        at = pickles[0]
        members[at] = members[at][0], mutate_pickle(random, members[at][1])
    else:
        at = random.randrange(len(members))
        name, content = members[at]
        changed = random.choice(
            ([], [(name, content)] * 2, [(name + "x", content)], [(name, content[:-1])], [(name, b"")])
        )
        members[at : at + 1] = changed
    stream = io.BytesIO()
    method = random.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members:
            if name not in archive.namelist():
                archive.writestr(zipfile.ZipInfo(name), content, method)  # of 1980: a case follows from its seed
    return stream.getvalue()


def _mutate_fields(random: Random, data: bytes) -> bytes:
    """A field of 2, 4 or 8 bytes right behind a signature."""
    places = [at for at in range(len(data) - 60) if data[at : at + 2] == b"PK"]
    spoiled = bytearray(data)
    for _ in range(random.choice((1, 2))):
        at = random.choice(places) + random.randrange(4, 46)
        width = random.choice((2, 4, 4, 8))
        value = random.choice(
            (*NUMBERS[:-4], int.from_bytes(data[at : at + width], "little") + random.choice((-1, 1, 64)))
        )
        spoiled[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(spoiled)


def _mutation_of(name: str) -> Mutation:
    if name.endswith(".json"):
        return mutate_json
    if name.endswith(".safetensors"):
        return mutate_header
    if name.endswith(".metadata"):
        return mutate_pickle
    return mutate_zip if name.endswith((".bin", ".pt", ".distcp")) else mutate_bytes


def mutate(random: Random, files: Files) -> Files:
    """A checkpoint with one file changed, or several; or one that is missing, doubled, renamed, or another's."""
    files = dict(files)
    for _ in range(random.choice((1, 1, 1, 2))):
        name = random.choice(sorted(files))
        what = random.randrange(40)
        if what == 0:
            del files[name]
        elif what == 1:
            other = random.choice(sorted(files))
            files[name], files[other] = files[other], files[name]
        elif what == 2:
            files[random.choice(("model.safetensors", "pytorch_model.bin", ".metadata", "ckptx.json", "x/y.json"))] = (
                files[name]
            )
        elif what == 3:
            files[name] = random.choice((b"", b"{}", b"[]", b"null", b"\x80\x04N.", b"version https://git-lfs"))
        elif what == 4:
            files[name] = mutate_bytes(random, files[name])
        else:
            files[name] = _mutation_of(name)(random, files[name])
        if not files:
            break
    return files
