"""Situations of sources: URLs in place of paths, manifests that are none, parts that ranks wrote apart."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from tests.situations.box import Box, Try, situation
from tests.support.checkpoint_writers import LLAMA, llama, manifest, value, write_dcp, write_hf, write_safetensors

AREA = "sources"
URL = r"is a URL.*(copy to or from a local directory|write the)"
RANKS = r"nothing records how (its|their) tensors are sharded"
IGNORED = r"ckptx\.json.*; manifest ignored"


def part(rank: int, ranks: int = 2) -> dict[str, Any]:
    """Rows of every matrix of a tiny Llama, as tensor parallel ranks have them."""
    return {
        name: value(each[0], each[1][0] // ranks, each[1][1], seed=50 * rank + at) if len(each[1]) == 2 else each
        for at, (name, each) in enumerate(llama().items())
    }


for _url in (
    "s3://bucket/out",
    "GS://bucket/out",
    "hf://org/name",
    "file:///data/out",
    "abfss://c@a/out",
    "msc://p/out",
):

    @situation(AREA, f"DST is {_url}", 4, URL)
    def _(box: Box, url: str = _url) -> Any:
        return ("convert", "to-dcp", box.hf(), url)


@situation(AREA, "DST is s3://bucket/out, and a directory s3: is there with something to overwrite", 4, URL)
def _(box: Box) -> Any:
    write_dcp(box.root / "s3:" / "bucket" / "out", llama(), config=LLAMA)
    return ("convert", "to-dcp", box.hf(), "s3://bucket/out", "--overwrite")


@situation(AREA, "DST is s3://bucket/out in a dry run", 4, URL)
def _(box: Box) -> Any:
    return ("reshard", box.hf(), "s3://bucket/out", "--tp", "2", "--dry-run")


@situation(AREA, "DST is a URL of an unknown scheme, to resume", 4, URL)
def _(box: Box) -> Any:
    return ("reshard", box.hf(), "x-y+z.1://bucket/out", "--resume")


for _option, _words in {
    "--report": ("convert", "to-dcp", "hf", "out/dst"),
    "--tp-plan": ("reshard", "hf", "out/dst", "--tp", "2"),
    "--cache-dir": ("inspect", "hf"),
    "--html": ("inspect", "hf"),
    "--base": ("convert", "to-hf", "dcp", "out/dst"),
}.items():

    @situation(AREA, f"{_option} is a URL", 4, URL)
    def _(box: Box, option: str = _option, words: tuple[str, ...] = _words) -> Any:
        box.hf(), box.dcp()
        return (*words, option, "s3://bucket/x")


@situation(AREA, "the report on a refusal goes to a URL, in JSON", 4, r'"exit": 4')
def _(box: Box) -> Any:
    return ("convert", "to-dcp", "gone", box.dst, "--report", "https://host/report.json", "--json")


@situation(AREA, "the second checkpoint of diff is a URL", 4, URL)
def _(box: Box) -> Any:
    return ("diff", box.hf(), "az://container/model")


@situation(AREA, "both checkpoints of verify are URLs", 4, URL)
def _(box: Box) -> Any:
    return ("verify", "s3://a/b", "s3://a/b")


@situation(AREA, "SRC is a URL with an escape sequence in it", 4, URL)
def _(box: Box) -> Any:
    return ("inspect", "s3://bucket/\x1b[2J\u202emodel")


@situation(AREA, "SRC is a URL of 5,000 characters", 4)
def _(box: Box) -> Any:
    return ("inspect", "s3://" + "x" * 5000)


@situation(AREA, "SRC is a Hub id, and HF_HOME is a URL", 4, URL)
def _(box: Box) -> Any:
    return Try(("inspect", "org/name"), {"HF_HOME": "s3://bucket/cache"})


@situation(AREA, "SRC lies in a local directory that is called s3:", 0)
def _(box: Box) -> Any:
    return ("convert", "to-dcp", f"./{box.hf('s3:/bucket/model').relative_to(box.root)}", box.dst)


def _of_ckptx(box: Box) -> Path:
    """A DCP with a manifest that is right."""
    tensors = llama()
    source = box.dcp()
    files = {path.name: path.stat().st_size for path in source.glob("*.distcp")}
    rows = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    (source / "ckptx.json").write_text(json.dumps(manifest("dcp", files, rows)))
    return source


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may be 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


for _what, _make in {
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/urandom": lambda path: path.symlink_to("/dev/urandom"),
    "a link to /dev/stdin": lambda path: path.symlink_to("/dev/stdin"),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a fifo": lambda path: os.mkfifo(path),
    "a socket": _socket,
    "a directory": lambda path: path.mkdir(),
    "a sparse file of 10 GiB": _sparse,
    "a link to /etc/passwd": lambda path: path.symlink_to("/etc/passwd"),
    "empty": lambda path: path.touch(),
    "a megabyte of brackets": lambda path: path.write_text("[" * (1 << 20)),
    "of a newer version": lambda path: path.write_text('{"ckptx": 99}'),
    "text with an escape sequence": lambda path: path.write_text('{"ckptx": "\x1b[2J"}'),
}.items():

    @situation(AREA, f"the manifest of a DCP is {_what}", 0, rf"{IGNORED}(?!.*ckptx\.json)(?!.*root:)")
    def _(box: Box, make: Any = _make) -> Any:
        source = box.dcp()
        make(source / "ckptx.json")
        return ("convert", "to-hf", source, "out/dst")


@situation(AREA, "the manifest next to HF safetensors is a fifo", 0, IGNORED)
def _(box: Box) -> Any:
    os.mkfifo(box.hf() / "ckptx.json")
    return ("convert", "to-dcp", "hf", box.dst)


@situation(
    AREA,
    "the manifest says that a file is smaller than its tensors",
    0,
    r"contradicts itself.*; manifest ignored",
)
def _(box: Box) -> Any:
    source = _of_ckptx(box)
    found = json.loads((source / "ckptx.json").read_text())
    next(iter(found["files"].values()))["bytes"] = 1
    (source / "ckptx.json").write_text(json.dumps(found))
    return ("convert", "to-hf", source, box.dst)


@situation(AREA, "the manifest has fewer stages than its layout", 0, r"contradicts itself \(layout\.stages is 1 stages")
def _(box: Box) -> Any:
    source = _of_ckptx(box)
    found = json.loads((source / "ckptx.json").read_text())
    found["layout"] |= {"pp": 2, "stages": [[["model.layers", 0, 2]]]}
    (source / "ckptx.json").write_text(json.dumps(found))
    return ("convert", "to-hf", source, box.dst)


for _pattern in (
    "model_{}.safetensors", "model_rank{}.safetensors", "tp_rank_{:02d}.safetensors", "consolidated.{:02d}.safetensors",
    "shard_{}.safetensors", "rank_{}/model.safetensors", "tp{}_pp0/model.safetensors", "model_{}/model.safetensors",
    "step10-rank{}/model.safetensors", "gpu{}/model.safetensors",
):  # fmt: skip

    @situation(AREA, f"two ranks wrote {_pattern.format(0)} and its sibling; the parent is SRC", 4, RANKS)
    def _(box: Box, pattern: str = _pattern) -> Any:
        for rank in range(2):
            write_safetensors(box.root / "in" / pattern.format(rank), part(rank))
        return ("convert", "to-dcp", "in", box.dst)

    @situation(AREA, f"two ranks wrote {_pattern.format(0)} and its sibling; one is SRC", 4, RANKS)
    def _(box: Box, pattern: str = _pattern) -> Any:
        for rank in range(2):
            write_safetensors(box.root / "in" / pattern.format(rank), part(rank))
        return ("reshard", f"in/{pattern.format(1)}", box.dst, "--base", "none", "--allow-config-mismatch")


@situation(AREA, "one rank is SRC by '.', in its own directory", 4, RANKS)
def _(box: Box) -> Any:
    for rank in range(2):
        write_safetensors(box.root / f"rank_{rank}" / "model.safetensors", part(rank))
    return Try(("reshard", ".", box.dst, "--base", "none"), shell='cd rank_0 && exec "$@"')


@situation(AREA, "one rank is SRC through a link with an innocent name", 4, RANKS)
def _(box: Box) -> Any:
    for rank in range(2):
        write_safetensors(box.root / f"rank_{rank}" / "model.safetensors", part(rank))
    (box.root / "model").symlink_to("rank_0")
    return ("reshard", "model", box.dst, "--base", "none")


@situation(AREA, "the file of one rank is SRC through a link with an innocent name", 4, RANKS)
def _(box: Box) -> Any:
    for rank in range(2):
        write_safetensors(box.root / "in" / f"model_{rank}.safetensors", part(rank))
    (box.root / "hf").mkdir()
    (box.root / "hf" / "model.safetensors").symlink_to("../in/model_0.safetensors")
    return ("convert", "to-dcp", "hf", box.dst)


@situation(AREA, "one rank of eight is left, and its name says so", 4, r"7 parts of 8 are missing")
def _(box: Box) -> Any:
    write_safetensors(box.root / "in" / "model_world_size_8_rank_0.safetensors", part(0, 8))
    return ("convert", "to-dcp", "in", box.dst)


@situation(AREA, "a file of two whose index and sibling are gone", 4, r"is one of 2 files of a checkpoint")
def _(box: Box) -> Any:
    tensors = llama()
    write_safetensors(box.root / "in" / "model-00001-of-00002.safetensors", dict(list(tensors.items())[:9]))
    return ("convert", "to-dcp", "in", box.dst)


@situation(AREA, "two files of two without their index", 4, r"the index that lists their tensors is missing")
def _(box: Box) -> Any:
    for number in (1, 2):
        write_safetensors(box.root / "in" / f"model-{number:05d}-of-00002.safetensors", part(number))
    return ("convert", "to-dcp", "in", box.dst)


for _names in (("step_0", "step_1"), ("v0", "v1"), ("model-7b", "model-13b"), ("rank8", "rank16"), ("tp2", "tp4")):

    @situation(AREA, f"{_names[0]} next to {_names[1]} is a separate checkpoint", 0)
    def _(box: Box, names: tuple[str, str] = _names) -> Any:
        for name in names:
            write_hf(box.root / "in" / name, llama(), config=LLAMA)
        return ("convert", "to-dcp", f"in/{names[0]}", box.dst)
