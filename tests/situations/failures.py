"""Situations of failures: damaged sources, outputs that cannot be written, misuse of the Python functions, configs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.situations.box import Box, Try, situation
from tests.support.checkpoint_writers import INDEX, LLAMA, SINGLE, llama, write_hf

_CONFIG = {
    **LLAMA, "vocab_size": 16, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def _shard(path: Path) -> Path:
    return sorted(path.glob("*.distcp"))[0]


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _remove_shard(box: Box) -> Path:
    path = box.hf("bad", shards=2)
    sorted(path.glob("*.safetensors"))[0].unlink()
    return path


def _damage(box: Box, make: Callable[[Path], object], kind: str = "hf") -> Path:
    path = box.hf("bad") if kind == "hf" else box.dcp("bad")
    make(path)
    return path


def _empty(box: Box) -> Path:
    (box.root / "bad").mkdir()
    return box.root / "bad"


def _link(box: Box, target: str) -> Path:
    (box.root / "bad").symlink_to(target)
    return box.root / "bad"


def _replace_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        (path / SINGLE).unlink()
        make(path / SINGLE)

    return replace


_DAMAGES: dict[str, tuple[int | tuple[int, ...], Callable[[Box], Path]]] = {
    "an empty directory": (3, _empty),
    "a dangling link": (3, lambda box: _link(box, "nothing")),
    "a link to itself": (3, lambda box: _link(box, "bad")),
    "a directory in place of the weights": (3, lambda box: _damage(box, _replace_by(Path.mkdir))),
    "a named pipe in place of the weights": ((3, 4), lambda box: _damage(box, _replace_by(os.mkfifo))),
    "an empty weight file": (3, lambda box: _damage(box, lambda path: _truncate(path / SINGLE, 0))),
    "weights truncated after 100 bytes": (3, lambda box: _damage(box, lambda path: _truncate(path / SINGLE, 100))),
    "a shard that is missing": (3, _remove_shard),
    "a DCP without .metadata": ((3, 4), lambda box: _damage(box, lambda path: (path / ".metadata").unlink(), "dcp")),
    "a DCP with .metadata of no bytes": (3, lambda box: _damage(box, lambda p: _truncate(p / ".metadata", 0), "dcp")),
    "a DCP without its data": (3, lambda box: _damage(box, lambda path: _shard(path).unlink(), "dcp")),
    "a DCP whose data is truncated": (3, lambda box: _damage(box, lambda path: _truncate(_shard(path), 50), "dcp")),
}
for _name, (_exits, _make) in _DAMAGES.items():
    for _command in ("inspect", "diff", "verify"):

        @situation("failures", f"{_command} of {_name}", _exits, "bad")
        def _(box: Box, make: Any = _make, command: str = _command) -> Any:
            bad = make(box)
            return (command, bad) if command == "inspect" else (command, box.hf(), bad)


def _place(box: Box, name: str) -> Any:
    """Lay out where to write; see `_PLACES`."""
    box.hf()
    (box.root / "file").write_text("x")
    (box.root / "full").mkdir()
    (box.root / "full" / "notes.txt").write_text("x")
    return {"file": "file", "below a file": "file/dst", "foreign": "full", "source": "hf", "inside": "hf/dst",
            "around": ".", "long": f"out/{'n' * 300}", "device": "/dev/full/dst", "proc": "/proc/dst",
            "nothing": ""}[name]  # fmt: skip


_PLACES = {
    "file": ("a file", 5), "below a file": ("below a file", 5), "foreign": ("a directory with other files", 5),
    "source": ("the source", 5), "inside": ("inside the source", 5), "around": ("the parent of the source", 5),
    "long": ("a name of 300 characters", 5), "device": ("below a device", 5), "proc": ("in /proc", 5),
    "nothing": ("the empty string", (2, 5)),
}  # fmt: skip
for _name, (_words, _codes) in _PLACES.items():
    for _argv in (("convert", "to-dcp", "hf"), ("reshard", "hf")):
        for _more in ((), ("--overwrite",)):

            @situation("failures", f"{_argv[0]}{' --overwrite' if _more else ''}: DST is {_words}", _codes)
            def _(box: Box, name: str = _name, argv: Any = _argv, more: Any = _more) -> Any:
                return (*argv, _place(box, name), *(("--tp", "2") if argv[0] == "reshard" else ()), *more)


@situation("failures", "rank 1 of 2 does not start", 7, "rank 1: did not join")
def _(box: Box) -> Any:
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29471"}
    argv = ("reshard", box.hf(), box.dst, "--tp", "2", "--timeout", "1")
    return Try(argv, env={"WORLD_SIZE": "2", "RANK": "0", **port})


for _value in ("0", "-1", "soon"):

    @situation("failures", f"--timeout {_value}", 2, "--timeout")
    def _(box: Box, value: str = _value) -> Any:
        return ("reshard", box.hf(), box.dst, "--timeout", value)


# Code -> exit code of the exception, and what it says; 0 for code that must succeed.
_CODE: dict[str, tuple[int, str]] = {
    "ckptx.convert('to-dpc', 'hf', 'out/dst')": (2, "to-dcp"),
    "ckptx.convert('to-dcp', 'hf')": (2, "dst"),
    "ckptx.convert()": (2, "direction"),
    "ckptx.convert('to-dcp', 'hf', 'out/dst', wokers=2)": (2, "workers"),
    "ckptx.convert('to-dcp', 'hf', 'out/dst', max_shard_size='5GB')": (2, "max.shard.size"),
    "ckptx.reshard('hf', 'out/dst', tp='two')": (2, "tp"),
    "ckptx.reshard('hf', 'out/dst', tp=0)": (2, "tp.*0"),
    "ckptx.reshard('hf', 'out/dst', tp=1.5)": (2, "tp"),
    "ckptx.reshard('hf', 'out/dst', tp=True)": (2, "tp"),
    "ckptx.reshard('hf', 'out/dst', dtype='bf61')": (2, "dtype.*bf16"),
    "ckptx.reshard('hf', 'out/dst', max_memory='much')": (2, "max.memory.*much"),
    "ckptx.reshard('hf', 'out/dst', pp=2, pp_split='a,b')": (2, "split"),
    "ckptx.reshard('hf', 'out/dst', overwrite='yes')": (2, "overwrite"),
    "ckptx.reshard(None, 'out/dst')": (2, "src"),
    "ckptx.reshard(5, 'out/dst')": (2, "src"),
    "ckptx.reshard('hf', b'out/dst')": (2, "dst"),
    "ckptx.reshard('hf', 'out/dst', 2)": (2, ""),
    "ckptx.reshard('hf', 'out/dst', on_progress=5)": (2, "on_progress"),
    "ckptx.reshard('hf', 'out/dst', log='x')": (2, "log"),
    "ckptx.reshard('hf', 'out/dst', report_file='none/such/report.json')": (5, "none/such"),
    "ckptx.inspect()": (2, "path"),
    "ckptx.inspect('hf', match=5)": (2, "match"),
    "ckptx.inspect('hf', tp=2)": (2, "tp"),
    "ckptx.inspect('none-such')": (3, "none-such"),
    "ckptx.diff('hf')": (2, r"\bb\b"),
    "ckptx.verify('hf', 'hf', tp=2)": (2, "tp.*requires.*run"),
    "ckptx.verify('hf', 'hf', run='yes')": (2, "run"),
    "ckptx.forecast()": (2, "model.*recipe"),
    "ckptx.forecast('hf', search=True)": (2, "search requires.*gpus"),
    "ckptx.forecast('hf', gpu='h1000')": (2, "h100"),
    "ckptx.robustness()": (2, "recipe"),
    "ckptx.open_checkpoint('none-such')": (3, "none-such"),
    "ckptx.open_checkpoint(5)": (2, ""),
    "assert ckptx.inspect('hf').ok": (0, ""),
    "assert ckptx.diff('hf', 'hf').exit == 0": (0, ""),
    "assert ckptx.diff('hf', 'dcp').ok": (0, ""),
    "assert len(ckptx.open_checkpoint('hf').tensors) == ckptx.inspect('hf').tensors": (0, ""),
}
for _code, (_exit, _said) in _CODE.items():

    @situation("Python API", _code, _exit, _said)
    def _(box: Box, code: str = _code) -> Any:
        box.hf()
        box.dcp()
        return ("-c", code)


_SIZES = {
    "vocab_size": 17, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_key_value_heads": 1,
}  # fmt: skip
_ALLOWING = "convert --allow-config-mismatch"
for _key, _value in _SIZES.items():
    for _command, _codes in (("convert", 3), ("reshard", 3), ("inspect", 0), ("verify", 0), (_ALLOWING, 0)):

        @situation("failures", f"{_command}: config.json has {_key} {_value}", _codes, "config")
        def _(box: Box, key: str = _key, value: int = _value, command: str = _command) -> Any:
            path = write_hf(box.root / "hf", llama(), config={**_CONFIG, key: value})
            return {
                "convert": ("convert", "to-dcp", path, box.dst), "reshard": ("reshard", path, box.dst, "--tp", "2"),
                "inspect": ("inspect", path), "verify": ("verify", path, path),
                _ALLOWING: ("convert", "to-dcp", path, box.dst, "--allow-config-mismatch"),
            }[command]  # fmt: skip


@situation("failures", "an index names a shard in another directory", (3, 4), "")
def _(box: Box) -> Any:
    source = box.hf("bad", shards=2)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"] = {name: f"../{file}" for name, file in index["weight_map"].items()}
    (source / INDEX).write_text(json.dumps(index))
    return ("inspect", source)
