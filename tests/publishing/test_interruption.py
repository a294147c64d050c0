"""Conversions killed at any moment: no loader sees half an output, and the next run finishes it."""

from __future__ import annotations

import filecmp
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import xxhash

import ckptx
from ckptx.errors import CkptxError
from tests.support.checkpoint_writers import LLAMA, framed, names_in
from tests.support.slow import slow_but

HIDDEN, LAYERS = 2048, 10
KILLS = 10  # in each direction


class Setting(NamedTuple):
    """A source, what an undisturbed run makes of it, and how long that takes."""

    direction: str
    source: Path
    expected: Path
    seconds: float
    digest: str


def write_large(root: Path) -> None:
    """Two shards of some 100 MiB each, of random bytes."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(LLAMA))
    noise, weight_map = random.Random(0).randbytes(8 << 20), {}
    for shard in range(2):
        file, rows, at = f"model-{shard + 1:05d}-of-00002.safetensors", {}, 0
        shapes = {"lm_head.weight": (64, HIDDEN), "model.norm.weight": (HIDDEN,)} if shard else {}
        shapes |= {} if shard else {"model.embed_tokens.weight": (64, HIDDEN)}
        for layer in range(shard, LAYERS, 2):
            shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
            shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (HIDDEN // 2, HIDDEN)
        for name, shape in shapes.items():
            nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            rows[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
            weight_map[name] = file
            at += nbytes
        with (root / file).open("wb") as out:
            out.write(framed({"__metadata__": {"format": "pt"}, **rows}))
            for start in range(0, at, len(noise)):
                turn = (start >> 23) * 4099
                out.write((noise[turn:] + noise[:turn])[: at - start])
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def digest_of(root: Path) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(root.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def command(setting: Setting, dst: Path, *options: str) -> list[str]:
    convert = ["convert", setting.direction, str(setting.source), str(dst), "--workers", "2"]
    return [sys.executable, "-m", "ckptx", *convert, *options]


@pytest.fixture(scope="module")
def settings() -> Iterator[dict[str, Setting]]:
    """Both directions, in memory where there is such a place: disks would make the moments of a run too uneven."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        write_large(root / "hf")
        ckptx.convert("hf2dcp", root / "hf", root / "dcp")
        found = {}
        for direction, source in (("hf2dcp", "hf"), ("dcp2hf", "dcp")):
            setting = Setting(direction, root / source, root / f"expected {direction}", 0, digest_of(root / source))
            started = time.monotonic()
            subprocess.run(command(setting, setting.expected), check=True, capture_output=True)
            found[direction] = setting._replace(seconds=time.monotonic() - started)
        assert equal(found["hf2dcp"].expected, root / "dcp")
        yield found
    finally:
        shutil.rmtree(root)


@pytest.fixture
def dst(settings: dict[str, Setting]) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(dir=settings["hf2dcp"].source.parent))
    yield place / "out"
    shutil.rmtree(place)


def equal(a: Path, b: Path) -> bool:
    if names_in(a) != names_in(b):
        return False
    return not any(filecmp.cmpfiles(a, b, names_in(a), shallow=False)[1:])


def check_what_is_left(setting: Setting, dst: Path) -> None:
    """The target is absent or complete; nothing beside it can be taken for a checkpoint; the source is untouched."""
    left = names_in(dst.parent)
    assert set(left) <= {"out", ".out.ckptx-partial"}
    if "out" in left:
        assert equal(dst, setting.expected)
    partial = dst.parent / ".out.ckptx-partial"
    for directory in [partial, *(path for path in partial.rglob("*") if path.is_dir())] if partial.exists() else []:
        with pytest.raises(CkptxError):
            ckptx.inspect(directory)
    if "out" not in left:
        with pytest.raises(CkptxError, match="no checkpoint found"):
            ckptx.inspect(dst.parent)
    assert digest_of(setting.source) == setting.digest


def finish(setting: Setting, dst: Path) -> None:
    """Resumes; the result is that of an undisturbed run, and nothing else remains."""
    done = subprocess.run(command(setting, dst, "--resume"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert names_in(dst.parent) == ["out"]
    assert equal(dst, setting.expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kill", slow_but(range(KILLS), (2, 7)))
@pytest.mark.parametrize("direction", ["hf2dcp", "dcp2hf"])
def test_killed_at_a_random_moment(settings: dict[str, Setting], dst: Path, direction: str, kill: int) -> None:
    setting = settings[direction]
    moment = (kill + random.Random(kill).random()) / KILLS  # one in each tenth of the run
    process = subprocess.Popen(command(setting, dst), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(setting.seconds * (0.35 + 0.65 * moment))
    process.kill()
    process.wait()
    check_what_is_left(setting, dst)
    finish(setting, dst)


def when_it_writes(process: subprocess.Popen[str], dst: Path) -> None:
    """Waits until bytes of tensors have been written."""
    tree = dst.parent / ".out.ckptx-partial" / "tree"
    while process.poll() is None:
        if tree.is_dir() and sum(path.stat().st_size for path in tree.iterdir()) > 4 << 20:
            return
        time.sleep(0.001)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("direction", ["hf2dcp", "dcp2hf"])
def test_asked_to_stop(
    settings: dict[str, Setting], dst: Path, direction: str, number: signal.Signals, code: int
) -> None:
    setting = settings[direction]
    for _ in range(5):
        process = subprocess.Popen(command(setting, dst), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        when_it_writes(process, dst)
        process.send_signal(number)
        out, err = process.communicate()
        if process.returncode != 0:
            break
        shutil.rmtree(dst)  # it was faster than the signal
    assert process.returncode == code
    assert out == ""
    partial = dst.parent / ".out.ckptx-partial"
    assert err == (
        f"error: interrupted; no output was created; run again with --resume to continue, or remove {partial}\n"
    )
    assert names_in(dst.parent) == [".out.ckptx-partial"]
    check_what_is_left(setting, dst)
    finish(setting, dst)


def test_killed_then_run_without_resume_starts_afresh(settings: dict[str, Setting], dst: Path) -> None:
    setting = settings["hf2dcp"]
    process = subprocess.Popen(command(setting, dst), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    when_it_writes(process, dst)
    process.kill()
    process.wait()
    done = subprocess.run(command(setting, dst, "--overwrite"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert names_in(dst.parent) == ["out"]
    assert equal(dst, setting.expected)


def test_the_checks_would_notice(settings: dict[str, Setting], dst: Path) -> None:
    """Injected defects: a published half, and a staging directory under a name that loaders look into."""
    setting = settings["hf2dcp"]
    shutil.copytree(setting.expected, dst)
    (dst / ".metadata").unlink()
    with pytest.raises(AssertionError):
        check_what_is_left(setting, dst)
    shutil.rmtree(dst)
    shutil.copytree(setting.expected, dst.parent / "out.partial")
    with pytest.raises(AssertionError):
        check_what_is_left(setting, dst)
