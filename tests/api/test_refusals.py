"""Every way an input is refused: by exit code and by name, in one line, with nothing left beside DST."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import ckptx
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.region import Region
from ckptx.errors import CkptxError
from ckptx.formats.dcp.metadata import DcpMetadata, parse_metadata
from ckptx.formats.dcp.metadata_writer import metadata_to_bytes
from ckptx.formats.torch_archive.archive import archive_frame
from tests.support.checkpoint_writers import (
    INDEX,
    LLAMA,
    SINGLE,
    Value,
    archive,
    framed,
    header,
    llama,
    names_in,
    tree_digest,
    value,
    write_dcp,
    write_hf,
    write_index,
    write_safetensors,
)

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456789\n"
SHARD = "model-00002-of-00002.safetensors"
W = "model.norm.weight"


class Case(NamedTuple):
    """One refusal: `make` writes the input below a directory and gives the SRC to pass."""

    name: str
    make: Callable[[Path], Path | str]
    exit: int
    said: str
    direction: str = "hf2dcp"
    options: Mapping[str, Any] = MappingProxyType({})
    inspects: bool = False
    """True when headers alone do not tell, so that `inspect` still works."""


HF: list[Case] = []
DCP: list[Case] = []


def hf(
    name: str, exit: int, said: str, shards: int = 2, **settings: Any
) -> Callable[[Callable[[Path], Path | str | None]], None]:
    """Adds a case: an HF checkpoint that the decorated function spoils."""

    def add(spoil: Callable[[Path], Path | str | None]) -> None:
        def make(root: Path) -> Path | str:
            write_hf(root / "hf", llama(), shards=shards)
            return spoil(root / "hf") or root / "hf"

        HF.append(Case(name, make, exit, said, **settings))

    return add


def dcp(name: str, exit: int, said: str, **settings: Any) -> Callable[[Callable[[Path], Path | None]], None]:
    """Adds a case: a directory that the decorated function makes a DCP."""

    def add(write: Callable[[Path], Path | None]) -> None:
        DCP.append(Case(name, lambda root: write(root / "dcp") or root / "dcp", exit, said, "dcp2hf", **settings))

    return add


# Files of an HF directory


@hf("a shard cut short", 3, rf'{SHARD}: tensor ".*" ends at byte \d+, but the file has \d+; the file is truncated')
def _(root: Path) -> None:
    with (root / SHARD).open("r+b") as file:
        file.truncate((root / SHARD).stat().st_size - 1)


@hf("a shard cut inside its header", 3, rf"{SHARD}: header ends at byte .* truncated")
def _(root: Path) -> None:
    with (root / SHARD).open("r+b") as file:
        file.truncate(100)


@hf("a header with a bit flipped", 3, rf"{SHARD}: ")
def _(root: Path) -> None:
    data = (root / SHARD).read_bytes()
    (root / SHARD).write_bytes(data.replace(b'"shape"', b'"shapf"', 1))


@hf("an overlong header", 3, rf"{SHARD}: header length is 18446744073709551615")
def _(root: Path) -> None:
    (root / SHARD).write_bytes(b"\xff" * 8 + (root / SHARD).read_bytes()[8:])


for _name in (SHARD, INDEX, "config.json"):

    @hf(f"git-lfs left a pointer for {_name}", 3, rf"{_name}: a git-lfs pointer, .*git lfs pull")
    def _(root: Path, name: str = _name) -> None:
        (root / name).write_bytes(LFS)


@hf("a missing shard", 3, rf"{SHARD}: no such file; the checkpoint is incomplete")
def _(root: Path) -> None:
    (root / SHARD).unlink()


@hf("a shard that is a dangling link", 3, rf"{SHARD}: symbolic link to ../blobs/abc, which does not exist")
def _(root: Path) -> None:
    (root / SHARD).unlink()
    (root / SHARD).symlink_to("../blobs/abc")


@hf("an index that lists a tensor no shard has", 3, r'lists tensor "extra" in .*, but no file contains it')
def _(root: Path) -> None:
    index = json.loads((root / INDEX).read_text())
    write_index(root, index["weight_map"] | {"extra": SHARD})


@hf("an index that does not list a tensor of a shard", 3, rf'does not list tensor "{W}"')
def _(root: Path) -> None:
    index = json.loads((root / INDEX).read_text())
    del index["weight_map"][W]
    write_index(root, index["weight_map"])


@hf("an index that says another shard", 3, rf'lists tensor "{W}" in model-00001.*, but it is in {SHARD}')
def _(root: Path) -> None:
    index = json.loads((root / INDEX).read_text())
    write_index(root, index["weight_map"] | {W: "model-00001-of-00002.safetensors"})


@hf("an index whose path climbs out", 3, r'file name "\.\./other\.safetensors" leads out of the checkpoint directory')
def _(root: Path) -> None:
    write_safetensors(root.parent / "other.safetensors", {"w": value("F32", 1)})
    write_index(root, {"w": "../other.safetensors"})


@hf("an index with an absolute path", 3, "leads out of the checkpoint directory")
def _(root: Path) -> None:
    write_safetensors(root.parent / "other.safetensors", {"w": value("F32", 1)})
    write_index(root, {"w": str(root.parent / "other.safetensors")})


@hf("an index with a key twice", 3, 'key "w" appears twice')
def _(root: Path) -> None:
    (root / INDEX).write_text('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}')


@hf("a tensor in two shards", 3, rf'tensor "{W}" is in both .* and .*; remove one of the files')
def _(root: Path) -> None:
    first = "model-00001-of-00002.safetensors"
    (root / first).write_bytes(framed(header({W: value("F32", 1)}), value("F32", 1)[2]))
    write_index(root, {W: first, "lm_head.weight": SHARD})


@hf("a tensor twice in a header", 3, 'key "w" appears twice', shards=1)
def _(root: Path) -> None:
    row = json.dumps({"dtype": "U8", "shape": [1], "data_offsets": [0, 1]})
    (root / SINGLE).write_bytes(framed(f'{{"w":{row},"w":{row}}}', b"x"))


@hf("a dtype nobody knows", 4, 'tensor "w" has dtype .F128.', shards=1)
def _(root: Path) -> None:
    row = {"dtype": "F128", "shape": [1], "data_offsets": [0, 16]}
    (root / SINGLE).write_bytes(framed({"w": row}, bytes(16)))


@hf("a dtype torch lacks", 4, "has dtype F6_E2M3, which torch lacks", shards=1, inspects=True)
def _(root: Path) -> None:
    row = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
    (root / SINGLE).write_bytes(framed({"w": row}, bytes(3)))
    (root / "config.json").unlink()


@hf("both a single file and an index", 3, "loaders disagree on which to use")
def _(root: Path) -> None:
    write_safetensors(root / SINGLE, llama())


@hf("a config that is no JSON", 3, r"config\.json: not JSON")
def _(root: Path) -> None:
    (root / "config.json").write_text("{")


@hf("LoRA names among the weights", 4, 'tensor ".*lora_A.weight" belongs to an adapter', shards=1, inspects=True)
def _(root: Path) -> None:
    write_safetensors(root / SINGLE, llama() | {"model.layers.0.self_attn.q_proj.lora_A.weight": value("BF16", 2, 8)})


@hf("a head that is missing and not declared tied", 3, "--tie-missing", shards=1, inspects=True)
def _(root: Path) -> None:
    write_safetensors(root / SINGLE, llama(head=False))


@hf("tied tensors that differ, and --tied drop", 3, "differ", shards=1, inspects=True, options={"tied": "drop"})
def _(root: Path) -> None:
    (root / "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))


# Directories


@hf("an empty directory", 3, "no checkpoint found, the directory is empty")
def _(root: Path) -> Path:
    (root.parent / "empty").mkdir()
    return root.parent / "empty"


@hf("no such path", 3, "gone: no such file or directory")
def _(root: Path) -> Path:
    return root.parent / "gone"


@hf("an unfinished output", 3, "an unfinished output of ckptx; run the conversion again with --resume")
def _(root: Path) -> Path:
    write_hf(root.parent / ".x.ckptx-partial" / "tree", llama())
    return root.parent / ".x.ckptx-partial" / "tree"


@hf("several checkpoints below", 3, r"contains 2 checkpoints; choose one: .*a, .*b")
def _(root: Path) -> Path:
    for name in "ab":
        write_hf(root / "runs" / name, llama())
    return root / "runs"


@hf("an adapter", 4, "is an adapter, not a model; add it to its model", direction="dcp2hf", inspects=True)
def _(root: Path) -> Path:
    write_safetensors(root.parent / "lora" / "adapter_model.safetensors", {"w": value("F32", 1)})
    (root.parent / "lora" / "adapter_config.json").write_text("{}")
    return root.parent / "lora"


@hf("a lost shard", 3, r"no shard covers \[0:1\]; missing shard-00001-model-00001-of-00001.safetensors, copy")
def _(root: Path) -> Path:
    metadata = {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [1]}}', "DCP_VERSION": "1.0", "format": "pt"}
    file = root.parent / "sharded" / "shard-00002-model-00001-of-00001.safetensors"
    write_safetensors(file, {"w": value("F32", 1)}, metadata)
    return file.parent


@hf(
    "a remote path",
    4,
    r"s3://bucket/model: is a URL \(s3://\), and ckptx reads and writes local paths only; copy to or from",
)
def _(root: Path) -> str:
    return "s3://bucket/model"


# pytorch_model.bin


def bin_directory(root: Path, data: bytes) -> Path:
    path = root.parent / "bin" / "pytorch_model.bin"
    path.parent.mkdir()
    path.write_bytes(data)
    return path.parent


@hf("git-lfs left a pointer for a .bin", 3, r"pytorch_model\.bin: a git-lfs pointer")
def _(root: Path) -> Path:
    return bin_directory(root, LFS)


@hf("a .bin cut short", 3, r"pytorch_model\.bin: damaged torch archive")
def _(root: Path) -> Path:
    return bin_directory(root, archive(value("F32", 4))[:-30])


@hf("a .bin from before torch 1.6", 4, r"pytorch_model\.bin: ")
def _(root: Path) -> Path:
    return bin_directory(root, pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2))


@hf("a .bin that is a bare tensor", 4, r"pytorch_model\.bin: expected a dict of named tensors, found a tensor")
def _(root: Path) -> Path:
    return bin_directory(root, archive(value("F32", 4)))


# DCP: .metadata

NORM = {W: value("F32", 4, 2)}


def halves(*spans: tuple[int, int]) -> dict[str, list[Region]]:
    return {W: [Region((begin, 0), (size, 2)) for begin, size in spans]}


@dcp("git-lfs left a pointer for .metadata", 3, r"\.metadata: a git-lfs pointer")
def _(root: Path) -> None:
    write_dcp(root, NORM)
    (root / ".metadata").write_bytes(LFS)


@dcp("a .metadata cut short", 3, r"\.metadata: pickle ends before its end mark")
def _(root: Path) -> None:
    write_dcp(root, NORM)
    (root / ".metadata").write_bytes((root / ".metadata").read_bytes()[:-20])


@dcp(
    "a .metadata that holds something else",
    3,
    r"\.metadata: expected the metadata of a torch DCP, found a pickled dict",
)
def _(root: Path) -> None:
    write_dcp(root, NORM)
    (root / ".metadata").write_bytes(pickle.dumps({"a": 1}, protocol=4))


@dcp("no .metadata beside .distcp files", 3, r"has \.distcp files but no \.metadata; the save was interrupted")
def _(root: Path) -> None:
    write_dcp(root, NORM)
    (root / ".metadata").unlink()


@dcp("a hole between chunks", 3, rf'tensor "{W}" of shape \[4, 2\]: no chunk covers \[1:2, 0:2\]')
def _(root: Path) -> None:
    write_dcp(root, NORM, halves((0, 1), (2, 2)))


@dcp("chunks that overlap", 3, rf'tensor "{W}" .*: more than one chunk covers \[2:3, 0:2\]')
def _(root: Path) -> None:
    write_dcp(root, NORM, halves((0, 3), (2, 2)))


@dcp("a chunk that lies outside", 3, rf'tensor "{W}" .*: a chunk is out of bounds at \[3:5, 0:2\]')
def _(root: Path) -> None:
    write_dcp(root, {W: value("F32", 5, 2)}, halves((0, 3), (3, 2)))
    rewrite(root, lambda metadata: {W: metadata.tensors[W]._replace(size=(4, 2))})


def rewrite(root: Path, tensors: Callable[[DcpMetadata], dict[str, Any]], path: str | None = None) -> None:
    """Writes `.metadata` anew with other tensors, or with another path for every chunk."""
    old = parse_metadata((root / ".metadata").read_bytes(), "")
    storage = {key: info._replace(path=path or info.path) for key, info in old.storage.items()}
    (root / ".metadata").write_bytes(metadata_to_bytes(DcpMetadata(tensors(old), old.objects, storage)))


@dcp("a .metadata whose path climbs out", 3, r'file name "\.\./__0_0\.distcp" leads out')
def _(root: Path) -> None:
    write_dcp(root, NORM)
    (root / "__0_0.distcp").rename(root.parent / "__0_0.distcp")
    rewrite(root, lambda metadata: dict(metadata.tensors), "../__0_0.distcp")


@dcp("a dtype of torch that is not converted", 4, "has dtype quint8, which is not supported")
def _(root: Path) -> None:
    write_dcp(root, NORM)
    rewrite(root, lambda metadata: {W: metadata.tensors[W]._replace(dtype="quint8")})


@dcp("LoRA names in a DCP", 4, "belongs to an adapter", inspects=True)
def _(root: Path) -> None:
    write_dcp(root, llama() | {"model.layers.0.mlp.up_proj.lora_B.weight": value("BF16", 8, 2)}, config=LLAMA)


# DCP: .distcp


@dcp("a missing .distcp", 3, r"__1_0\.distcp: no such file; the checkpoint is incomplete")
def _(root: Path) -> None:
    write_dcp(root, llama(), files=2)
    (root / "__1_0.distcp").unlink()


@dcp(
    "a .distcp cut short",
    3,
    r"__0_0\.distcp: has \d+ bytes, but \.metadata refers to bytes up to \d+; the file is truncated",
)
def _(root: Path) -> None:
    write_dcp(root, NORM)
    with (root / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)


@dcp("git-lfs left a pointer for a .distcp", 3, r"__0_0\.distcp: a git-lfs pointer")
def _(root: Path) -> None:
    write_dcp(root, NORM)
    (root / "__0_0.distcp").write_bytes(LFS)


def payload_case(
    name: str, exit: int, said: str, tensor: Value = NORM[W]
) -> Callable[[Callable[[Value], bytes]], None]:
    """A DCP with one tensor whose stored bytes the decorated function makes. Only reading them can tell."""

    def add(make: Callable[[Value], bytes]) -> None:
        @dcp(name, exit, said, inspects=True, options={"base": "none"})
        def _(root: Path) -> None:
            write_dcp(root, {W: tensor}, payloads={W: make(tensor)})

    return add


@payload_case("a payload that is no torch archive", 3, rf'__0_0\.distcp: tensor "{W}": ')
def _(tensor: Value) -> bytes:
    return b"\x93NUMPY" + bytes(1000)


@payload_case("a payload in safetensors", 4, rf'__0_0\.distcp: tensor "{W}": .*safetensors')
def _(tensor: Value) -> bytes:
    return framed(header({"w": tensor}), tensor[2])


def zipped(pickled: bytes, data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A torch archive by Python's own zip writer."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "data/0": data, "version": b"3\n"}.items():
            file.writestr(f"archive/{name}", content)
    return out.getvalue()


def pickle_of(tensor: Value) -> bytes:
    """`data.pkl` of a row-major tensor, taken out of its archive."""
    with zipfile.ZipFile(io.BytesIO(archive(tensor))) as file:
        return file.read("archive/data.pkl")


@payload_case("a payload that is compressed", 4, "is compressed, which is not supported")
def _(tensor: Value) -> bytes:
    return zipped(pickle_of(tensor), tensor[2], zipfile.ZIP_DEFLATED)


for _flag in ("conj", "neg"):

    @payload_case(f"a {_flag} view", 4, f"{_flag}.* view, whose stored bytes are not its values", value("C64", 2))
    def _(tensor: Value, flag: str = _flag) -> bytes:
        pickled = pickle_of(tensor)
        at = pickled.rindex(b"tq")  # of the arguments of the rebuild: storage, offset, ..., hooks, metadata
        view = b"}X%c\0\0\0%s\x88s" % (len(flag), flag.encode())
        return zipped(pickled[:at] + view + pickled[at:], tensor[2])


@payload_case("a payload of another dtype", 3, r"payload is float64 \[4, 1\], but \.metadata lists float32 \[4, 2\]")
def _(tensor: Value) -> bytes:
    return archive(("F64", (4, 1), tensor[2]))


@payload_case("a payload of another shape", 3, r"payload is float32 \[2, 4\], but \.metadata lists float32 \[4, 2\]")
def _(tensor: Value) -> bytes:
    return archive(("F32", (2, 4), tensor[2]))


@payload_case(
    "a payload with a bit flipped", 3, rf'tensor "{W}": CRC-32 of its bytes is [0-9a-f]{{8}}, but the archive'
)
def _(tensor: Value) -> bytes:
    data = bytearray(archive(tensor))
    data[len(archive_frame(DTYPES_BY_NAME["F32"], (4, 2)).head) + 3] ^= 0x10
    return bytes(data)


@dcp("no config beside a DCP", 3, r"has no config\.json.*pass --base PATH.*or --base none", inspects=True)
def _(root: Path) -> None:
    write_dcp(root, llama())


@dcp("a prefix no name has", 3, 'no tensor name begins with "app."', inspects=True, options={"source_prefix": "app."})
def _(root: Path) -> None:
    write_dcp(root, llama(), config=LLAMA)


@dcp("a DCP without a model", 3, "contains no model tensors", inspects=True)
def _(root: Path) -> None:
    write_dcp(root, {"optimizer.state.w.step": value("F32", 1)}, config=LLAMA)


@dcp("a base that is missing", 3, "gone: no such file or directory", inspects=True, options={"base": "/gone"})
def _(root: Path) -> None:
    write_dcp(root, llama())


CASES = [pytest.param(case, id=case.name) for case in HF + DCP]


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "dst"


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name_and_leaves_nothing(case: Case, tmp_path: Path, dst: Path) -> None:
    (tmp_path / "in").mkdir()
    source = case.make(tmp_path / "in")
    before = tree_digest(tmp_path / "in") if "dangling" not in case.name else ""
    with pytest.raises(CkptxError, match=case.said) as refusal:
        ckptx.convert(case.direction, source, dst, **case.options)
    assert refusal.value.exit_code == case.exit
    assert "\n" not in str(refusal.value)
    assert names_in(dst.parent) == []
    assert not before or tree_digest(tmp_path / "in") == before


@pytest.mark.parametrize("case", CASES)
def test_inspect_refuses_what_headers_tell(case: Case, tmp_path: Path) -> None:
    source = case.make(tmp_path)
    if isinstance(source, str):
        return
    if case.inspects:
        assert ckptx.inspect(source).exit == 0
    else:
        with pytest.raises(CkptxError, match=case.said) as refusal:
            ckptx.inspect(source)
        assert refusal.value.exit_code == case.exit


ON_THE_COMMAND_LINE = [
    "a shard cut short",
    "git-lfs left a pointer for model-00002-of-00002.safetensors",
    "an index that does not list a tensor of a shard",
    "a dtype nobody knows",
    "several checkpoints below",
    "an adapter",
    "a remote path",
    "a hole between chunks",
    "a missing .distcp",
    "a conj view",
    "a payload with a bit flipped",
    "no config beside a DCP",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ON_THE_COMMAND_LINE)
def test_on_the_command_line(name: str, tmp_path: Path, dst: Path) -> None:
    (case,) = (case for case in HF + DCP if case.name == name)
    (tmp_path / "in").mkdir()
    options = [f"--{key.replace('_', '-')}={given}" for key, given in case.options.items()]
    command = [sys.executable, "-m", "ckptx", "convert", case.direction, str(case.make(tmp_path / "in")), str(dst)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=os.environ | {"CKPTX_DEBUG": ""})
    assert done.returncode == case.exit
    assert done.stdout == ""
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("note: --base none"))
    assert line.startswith("error: ")
    assert names_in(dst.parent) == []


def test_a_class_that_has_no_place_in_metadata_is_not_executed(tmp_path: Path, dst: Path) -> None:
    write_dcp(tmp_path / "in", NORM)
    proof = tmp_path / "proof"
    for command in (b"cos\nsystem\n", b"cbuiltins\nexec\n", b"csubprocess\ncheck_output\n"):
        text = {b"e": f"open({str(proof)!r}, 'w')"}.get(command[10:11], f"touch {proof}").encode()
        call = command + b"X" + len(text).to_bytes(4, "little") + text + b"\x85R."
        (tmp_path / "in" / ".metadata").write_bytes(b"\x80\x02" + call)
        with pytest.raises(CkptxError, match="is not allowed in a checkpoint; nothing was executed") as refusal:
            ckptx.convert("dcp2hf", tmp_path / "in", dst)
        assert refusal.value.exit_code == 3
        assert not proof.exists()


def test_a_class_that_has_no_place_in_a_payload_is_not_executed(tmp_path: Path, dst: Path) -> None:
    proof = tmp_path / "proof"
    text = f"touch {proof}".encode()
    payload = zipped(b"\x80\x02cos\nsystem\nX" + len(text).to_bytes(4, "little") + text + b"\x85R.", NORM[W][2])
    write_dcp(tmp_path / "in", NORM, payloads={W: payload})
    with pytest.raises(CkptxError, match="nothing was executed"):
        ckptx.convert("dcp2hf", tmp_path / "in", dst, base="none")
    assert not proof.exists()


def test_a_stray_file_is_ignored_and_said_so(tmp_path: Path, dst: Path) -> None:
    write_hf(tmp_path / "in", llama(), shards=2)
    write_safetensors(tmp_path / "in" / "consolidated.safetensors", {W: value("F32", 7)})
    report = ckptx.convert("hf2dcp", tmp_path / "in", dst)
    assert report.tensors == len(llama())
    assert any(warning.startswith("consolidated.safetensors ignored") for warning in report.notes)
    assert "consolidated.safetensors" not in names_in(dst)


def test_bytes_that_rotted_since_they_were_converted_are_found(tmp_path: Path, dst: Path) -> None:
    """Archive and checksum agree with each other, but not with the digest taken when the DCP was written."""
    write_hf(tmp_path / "in", llama(), shards=2)
    ckptx.convert("hf2dcp", tmp_path / "in", tmp_path / "dcp")
    old, new = llama()[W], value("BF16", 8, seed=99)
    data = (tmp_path / "dcp" / "__0_0.distcp").read_bytes()
    assert data.count(archive(old)) == 1
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(data.replace(archive(old), archive(new)))
    with pytest.raises(CkptxError, match=rf'tensor "{W}": digest is .*, but ckptx\.json records') as refusal:
        ckptx.convert("dcp2hf", tmp_path / "dcp", dst)
    assert refusal.value.exit_code == 3
    assert names_in(dst.parent) == []
    assert zlib.crc32(new[2]) != zlib.crc32(old[2])


def test_a_manifest_of_another_save_is_ignored(tmp_path: Path, dst: Path) -> None:
    """A trainer saved over the directory; what ckptx.json says of it no longer counts."""
    write_hf(tmp_path / "in", llama(), shards=2)
    ckptx.convert("hf2dcp", tmp_path / "in", tmp_path / "dcp")
    other = {name: value(dtype, *shape, seed=50 + i) for i, (name, (dtype, shape, _)) in enumerate(llama().items())}
    write_dcp(tmp_path / "dcp", other, files=2)
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", dst)
    assert any("ckptx.json ignored: it describes another .metadata" in warning for warning in report.notes)
    assert ckptx.verify(tmp_path / "dcp", dst).exit == 0


def test_a_damaged_manifest_is_named_and_ignored(tmp_path: Path, dst: Path) -> None:
    write_dcp(tmp_path / "dcp", llama(), config=LLAMA)
    (tmp_path / "dcp" / "ckptx.json").write_text("{}")
    report = ckptx.convert("dcp2hf", tmp_path / "dcp", dst)
    (said,) = (each for each in report.notes if "ckptx.json" in each)
    assert "ckptx.json: not a valid manifest" in said and said.endswith("; manifest ignored")
    assert ckptx.verify(tmp_path / "dcp", dst).exit == 0
