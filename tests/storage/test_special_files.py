"""What stands where a file should: pipes, devices, sockets, directories, endless and enormous files.

Every name that a command opens is tried with every kind of file that is none; each ends at once and says which.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptx.conversion.steps.base_checkpoint import _open_base
from ckptx.errors import CkptxError
from ckptx.formats.registry import open_checkpoint
from ckptx.model_view.sharder import read_plan
from ckptx.options.conversion import ReshardOptions
from ckptx.storage.files import read_small
from tests.support.checkpoint_writers import llama, write_dcp, write_hf


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Ends a test that waits for a pipe: nothing else would."""

    def late(*_: object) -> None:
        raise TimeoutError("waited for a file that never ends")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sock(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def enormous(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS = {
    "a pipe": pipe,
    "a socket": sock,
    "a directory": Path.mkdir,
    "zeros without end": link_to("/dev/zero"),
    "nothing": link_to("/dev/null"),
    "random bytes without end": link_to("/dev/urandom"),
    "itself": lambda path: path.symlink_to(path.name),
    "1 TiB": enormous,
}
ENDLESS = [kind for kind in KINDS if kind != "1 TiB"]


def hf(root: Path) -> None:
    write_hf(root, llama(), config={"architectures": ["LlamaForCausalLM"], "model_type": "llama"})


def dcp(root: Path) -> None:
    hf(root)
    (root / "model.safetensors").unlink()
    write_dcp(root, llama())


def indexed(root: Path) -> None:
    hf(root)
    (root / "model.safetensors").unlink()


# What is there, the file that is replaced, and who opens it.
PLACES: dict[str, tuple[Callable[[Path], None], str]] = {
    "config": (hf, "config.json"),
    "config of a DCP": (dcp, "config.json"),
    "weights": (hf, "model.safetensors"),
    "index": (indexed, "model.safetensors.index.json"),
    "index of .bin": (indexed, "pytorch_model.bin.index.json"),
    "index beside one file": (hf, "model.safetensors.index.json"),
    ".bin": (indexed, "pytorch_model.bin"),
    ".metadata": (dcp, ".metadata"),
    ".distcp": (dcp, "__0_0.distcp"),
    "shard": (indexed, "shard-00001-model-00001-of-00001.safetensors"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_refused_at_once(place: str, kind: str, tmp_path: Path) -> None:
    write, name = PLACES[place]
    root = tmp_path / "checkpoint"
    write(root)
    (root / name).unlink(missing_ok=True)
    if place == ".distcp" and kind == "1 TiB":
        pytest.skip("a longer payload file is no fault: only the bytes that .metadata names are read")
    KINDS[kind](root / name)
    with pytest.raises(CkptxError) as caught:
        open_checkpoint(root)
    assert caught.value.exit_code == 3, caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_and_a_plan_are_inputs_too(kind: str, tmp_path: Path) -> None:
    hf(tmp_path / "base")
    (tmp_path / "base" / "config.json").unlink()
    KINDS[kind](tmp_path / "base" / "config.json")
    with pytest.raises(CkptxError) as caught:
        _open_base(ReshardOptions("", "", base=str(tmp_path / "base")))
    assert caught.value.exit_code == 3
    KINDS[kind](tmp_path / "plan.json")
    with pytest.raises(CkptxError) as caught:
        read_plan(str(tmp_path / "plan.json"))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["a pipe", "zeros without end", "1 TiB"])
def test_a_list_of_modules_is_passed_over_only_where_it_is_none(kind: str, tmp_path: Path) -> None:
    hf(tmp_path / "base")
    KINDS[kind](tmp_path / "base" / "modules.json")
    if kind == "1 TiB":
        with pytest.raises(CkptxError, match="the limit is"):
            open_checkpoint(tmp_path / "base")
    else:
        assert open_checkpoint(tmp_path / "base").tensors


def test_the_limit_is_exact(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    assert read_small(tmp_path / "a", 10) == bytes(10)
    with pytest.raises(CkptxError, match="a: has 10 bytes, the limit is 9"):
        read_small(tmp_path / "a", 9)


def test_a_file_without_a_size_is_read_to_its_end() -> None:
    assert b"VmHWM" in read_small(Path("/proc/self/status"), 1 << 16)
    with pytest.raises(CkptxError, match="the limit is 100"):
        read_small(Path("/proc/self/status"), 100)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param('{"a":' * 100 + "1" + "}" * 100, "nested deeper than 64", id="depth that recursion survives"),
        pytest.param('{"a":' * 10**6, "nested deeper than 64", id="depth that it does not"),
        pytest.param('{"a": %s}' % ("9" * 5000), "a number of more than", id="digits that Python refuses"),
        pytest.param(f'{{"a": [{10**1000}]}}', "a number of more than", id="digits that it does not"),
        pytest.param('{"a": "\\ud800"}', "lone surrogate", id="half a pair"),
        pytest.param('{"\\udfff": 1}', "lone surrogate", id="half a pair in a key"),
        pytest.param('{"a": {"b": 1, "b": 2}}', 'key "b" appears twice', id="a key twice"),
    ],
)
def test_json_that_parsers_choke_on(text: str, said: str, tmp_path: Path) -> None:
    hf(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(text)
    with pytest.raises(CkptxError, match=said) as caught:
        open_checkpoint(tmp_path / "a")
    assert caught.value.exit_code == 3


def test_json_of_real_configs_passes(tmp_path: Path) -> None:
    hf(tmp_path / "a")
    config = {"time_step_limit": [0.0, float("inf")], "model_max_length": 10**30, "name": "\U0001f600 \\ud800"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path / "a").config == config
