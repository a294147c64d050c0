"""Situations of the file system: what SRC and DST may turn out to be."""

from __future__ import annotations

import os
import socket
from typing import Any

from tests.situations.box import Box, Try, situation
from tests.support.checkpoint_writers import INDEX, LLAMA, SINGLE, llama, write_hf, write_index, write_safetensors

AREA = "paths"


def hf2dcp(box: Box, source: Any, target: Any = None, *options: Any) -> tuple[Any, ...]:
    return ("convert", "to-dcp", source, box.dst if target is None else target, *options)


@situation(AREA, "SRC is a loop of two symbolic links", 3)
def _(box: Box) -> Any:
    (box.root / "a").symlink_to("b")
    (box.root / "b").symlink_to("a")
    return hf2dcp(box, "a")


@situation(AREA, "SRC has a name of 5,000 characters", (2, 3))
def _(box: Box) -> Any:
    return hf2dcp(box, "x" * 5000)


@situation(AREA, "SRC is the empty string", (2, 3))
def _(box: Box) -> Any:
    return hf2dcp(box, "")


@situation(AREA, "SRC has a newline, an escape sequence and a right-to-left mark in its name", 0)
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf("a\n\x1b[31mb\u202ec"), None, "-v")


@situation(AREA, "SRC with such a name does not exist", 3)
def _(box: Box) -> Any:
    return hf2dcp(box, "a\n\x1b[31mb\u202ec")


@situation(AREA, "SRC has a name that is not UTF-8", 0)
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf(os.fsdecode(b"mod\xffel")))


@situation(AREA, "SRC is '.' inside the checkpoint", 0)
def _(box: Box) -> Any:
    write_hf(box.root / "hf", llama())
    return Try(hf2dcp(box, "."), shell='cd hf && exec "$@"')


@situation(AREA, "SRC is a directory with mode 000, which only root can read", (0, 3))
def _(box: Box) -> Any:
    source = box.hf()
    source.chmod(0o000)
    return hf2dcp(box, source)


for _file in (SINGLE, "config.json"):

    @situation(AREA, f"{_file} is a socket", 3, "found a socket")
    def _(box: Box, file: str = _file) -> Any:
        source = box.hf()
        (source / file).unlink()
        here = os.getcwd()
        os.chdir(source)  # the path of a socket may be 107 bytes long
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(file)
        finally:
            os.chdir(here)
        return hf2dcp(box, source)

    for _device in ("/dev/zero", "/dev/urandom", "/dev/stdin"):

        @situation(AREA, f"{_file} is a link to {_device}", 3)
        def _(box: Box, file: str = _file, device: str = _device) -> Any:
            source = box.hf()
            (source / file).unlink()
            (source / file).symlink_to(device)
            return hf2dcp(box, source)

    @situation(AREA, f"{_file} is a sparse file of 64 GiB", 3)
    def _(box: Box, file: str = _file) -> Any:
        source = box.hf()
        with (source / file).open("r+b") as stream:
            stream.truncate(64 << 30)
        return hf2dcp(box, source)

    @situation(AREA, f"{_file} is a link to itself", 3)
    def _(box: Box, file: str = _file) -> Any:
        source = box.hf()
        (source / file).unlink()
        (source / file).symlink_to(file)
        return hf2dcp(box, source)


@situation(AREA, "a shard is a link to /etc/passwd, whose contents must not be printed", 3, r"^(?!.*root:).*$")
def _(box: Box) -> Any:
    source = box.hf()
    (source / SINGLE).unlink()
    (source / SINGLE).symlink_to("/etc/passwd")
    return hf2dcp(box, source)


@situation(AREA, "config.json is a link to /etc/passwd, whose contents must not be printed", 3, r"^(?!.*root:).*$")
def _(box: Box) -> Any:
    source = box.hf()
    (source / "config.json").unlink()
    (source / "config.json").symlink_to("/etc/passwd")
    return hf2dcp(box, source)


@situation(AREA, "the same file under two spellings in the index", 3)
def _(box: Box) -> Any:
    source = box.hf()
    tensors = llama()
    (source / SINGLE).rename(source / "a.safetensors")
    names = list(tensors)
    half = len(names) // 2
    write_index(source, dict.fromkeys(names[:half], "a.safetensors") | dict.fromkeys(names[half:], "./a.safetensors"))
    return hf2dcp(box, source)


@situation(AREA, "two shards are hard links of one file", 3)
def _(box: Box) -> Any:
    source = box.hf()
    os.rename(source / SINGLE, source / "a.safetensors")
    os.link(source / "a.safetensors", source / "b.safetensors")
    names = list(llama())
    write_index(source, dict.fromkeys(names[:3], "a.safetensors") | dict.fromkeys(names[3:], "b.safetensors"))
    return hf2dcp(box, source)


@situation(AREA, "shards in a subdirectory, as the index says", 0)
def _(box: Box) -> Any:
    tensors = llama()
    source = box.hf(config=LLAMA)
    (source / SINGLE).unlink()
    write_safetensors(source / "weights" / "a.safetensors", tensors)
    write_index(source, dict.fromkeys(tensors, "weights/a.safetensors"))
    return hf2dcp(box, source)


for _shard in (INDEX, "config.json", ".", "..", "/", "", "weights", "a\0b", "C:\\a.safetensors", "a" * 300):

    @situation(AREA, f"the index lists the file {_shard if len(_shard) < 100 else _shard[:3] + '...'!r}", 3)
    def _(box: Box, shard: str = _shard) -> Any:
        source = box.hf()
        (source / "weights").mkdir()
        (source / SINGLE).unlink()
        write_index(source, dict.fromkeys(llama(), shard))
        return hf2dcp(box, source)


@situation(AREA, "DST is SRC under another name", 5)
def _(box: Box) -> Any:
    source = box.hf()
    (box.root / "other").symlink_to("hf")
    return hf2dcp(box, source, "other", "--overwrite")


@situation(AREA, "DST is inside SRC", 5)
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf(), "hf/sub/dst")


@situation(AREA, "DST contains SRC", 5)
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf("outer/hf"), "outer", "--overwrite")


@situation(AREA, "DST's parent is a file", 5)
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf(), "canary.txt/dst")


for _place in ("/dev/null", "/proc/dst", "/sys/dst", "/", "/proc/self/cwd/hf"):

    @situation(AREA, f"DST is {_place}", 5)
    def _(box: Box, place: str = _place) -> Any:
        return hf2dcp(box, box.hf(), place, "--overwrite")


@situation(AREA, "DST is the empty string", 5, "the path is empty")
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf(), "")


@situation(AREA, "DST is the working directory, with a text file in it", 5)
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf(), ".", "--overwrite")


@situation(AREA, "DST is the parent of the working directory", 5)
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf(), "..", "--overwrite"), shell='mkdir -p out && cd out && exec "$@"')


@situation(AREA, "DST has a name of 255 bytes, too long for a suffix", (0, 5))
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf(), "out/" + "d" * 255)


@situation(AREA, "DST has a name of 256 bytes", 5)
def _(box: Box) -> Any:
    return hf2dcp(box, box.hf(), "out/" + "d" * 256)


@situation(AREA, "DST is a dangling link", 5)
def _(box: Box) -> Any:
    (box.root / "gone").symlink_to("nowhere/at/all")
    return hf2dcp(box, box.hf(), "gone")


@situation(AREA, "DST is a fifo", 5)
def _(box: Box) -> Any:
    os.mkfifo(box.root / "pipe")
    return hf2dcp(box, box.hf(), "pipe", "--overwrite")


@situation(AREA, "DST contains photos next to a checkpoint, and --overwrite", 5, "photo")
def _(box: Box) -> Any:
    (box.hf("old") / "photo.jpg").write_bytes(b"\xff\xd8")
    return hf2dcp(box, box.hf(), "old", "--overwrite")


@situation(AREA, "the staging path is a file of the user", 5)
def _(box: Box) -> Any:
    (box.root / ".mine.ckptx-partial").write_text("my notes\n")
    return hf2dcp(box, box.hf(), "mine")


@situation(AREA, "the staging path is a link to the user's directory", 5)
def _(box: Box) -> Any:
    (box.root / "precious").mkdir()
    (box.root / "precious" / "tree").mkdir()
    (box.root / "precious" / "tree" / "letter").write_text("dear\n")
    (box.root / ".mine.ckptx-partial").symlink_to("precious")
    return hf2dcp(box, box.hf(), "mine")


@situation(
    AREA, "the directory tree in the staging directory is a link to the user's directory", 5, "its 'tree' is not"
)
def _(box: Box) -> Any:
    (box.root / "precious").mkdir()
    (box.root / "precious" / "letter").write_text("dear\n")
    (box.root / ".mine.ckptx-partial").mkdir()
    (box.root / ".mine.ckptx-partial" / "tree").symlink_to("../precious")
    return hf2dcp(box, box.hf(), "mine", "--resume")


@situation(AREA, "a directory next to DST has the name that ckptx gives a replaced DST", 5)
def _(box: Box) -> Any:
    (box.root / ".mine.ckptx-old").mkdir()
    (box.root / ".mine.ckptx-old" / "letter").write_text("dear\n")
    return hf2dcp(box, box.hf(), "mine")


for _report in ("hf/config.json", "hf/model.safetensors", "canary.txt", ".", "out", "nowhere/report.json", "/dev/full"):

    @situation(AREA, f"--report names {_report}", 5)
    def _(box: Box, report: str = _report) -> Any:
        return hf2dcp(box, box.hf(), None, "--report", report)


@situation(AREA, "--html names the weights", (2, 5))
def _(box: Box) -> Any:
    return ("inspect", box.hf(), "--html", "hf/model.safetensors")


@situation(AREA, "--html names a text file", (2, 5))
def _(box: Box) -> Any:
    return ("inspect", box.hf(), "--html", "canary.txt")
