"""Situations in configs, options and the environment of the process."""

from __future__ import annotations

import json
import os
import resource
import signal
from typing import Any

from tests.situations.box import Box, Try, situation
from tests.situations.paths import hf2dcp
from tests.support.checkpoint_writers import LLAMA, SINGLE, llama, value, write_hf

_CONFIGS: dict[str, tuple[tuple[int, ...], str]] = {
    "is empty": ((3,), ""),
    "is null": ((3,), "null"),
    "is a list": ((3,), "[]"),
    "is nested 100,000 deep": ((3,), "[" * 100_000),
    "is nested 100,000 deep below a key": ((3,), '{"a":' * 100_000 + "1" + "}" * 100_000),
    "ends in a comma": ((3,), '{"a": 1,}'),
    "has a key twice": ((3,), '{"a": 1, "a": 2}'),
    "has a byte order mark": ((0, 3), "\ufeff" + json.dumps(LLAMA)),
    "has model_type ../../../etc": ((0, 3), json.dumps(LLAMA | {"model_type": "../../../etc", "architectures": None})),
    "has an architecture called ../../x": ((0, 3), json.dumps(LLAMA | {"architectures": ["../../x"]})),
    "has an architecture of escape sequences": ((0, 3), json.dumps(LLAMA | {"architectures": ["\x1b[31m\u202e"]})),
    "has architectures [1]": ((0, 3), json.dumps(LLAMA | {"architectures": [1]})),
    "has architectures that are a text": ((0, 3), json.dumps(LLAMA | {"architectures": "LlamaForCausalLM"})),
    "has an architecture of 100,000 characters": ((0, 3), json.dumps(LLAMA | {"architectures": ["L" * 100_000]})),
    "has a model_type that is a dict": ((0, 3), json.dumps(LLAMA | {"model_type": {}})),
    "has 10^12 layers": ((0, 3), json.dumps(LLAMA | {"num_hidden_layers": 10**12})),
    "has -1 layers": ((0, 3), json.dumps(LLAMA | {"num_hidden_layers": -1})),
    "has 'two' layers": ((0, 3), json.dumps(LLAMA | {"num_hidden_layers": "two"})),
    "has NaN layers": ((0, 3), '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": NaN}'),
    "has a hidden size of 10^400": ((0, 3), json.dumps(LLAMA | {"hidden_size": 10**400})),
    "has no heads": ((0, 3), json.dumps(LLAMA | {"num_attention_heads": 0})),
    "ties by the word false": ((3,), json.dumps(LLAMA | {"tie_word_embeddings": "false"})),
    "ties by a list": ((3,), json.dumps(LLAMA | {"tie_word_embeddings": []})),
    "names quantization by a number": ((0, 3, 4), json.dumps(LLAMA | {"quantization_config": 7})),
    "has a text_config that is a list": ((0, 3), json.dumps(LLAMA | {"text_config": []})),
    "has a dtype of klingon": ((0, 3), json.dumps(LLAMA | {"torch_dtype": "klingon"})),
}
for _name, (_exits, _text) in _CONFIGS.items():

    @situation("config", f"config.json {_name}", _exits)
    def _(box: Box, text: str = _text) -> Any:
        (box.hf() / "config.json").write_text(text)
        return hf2dcp(box, box.root / "hf")

    @situation("config", f"reshard, and config.json {_name}", _exits)
    def _(box: Box, text: str = _text) -> Any:
        (box.hf() / "config.json").write_text(text)
        return ("reshard", box.root / "hf", box.dst, "--tp", "2", "--to", "dcp")


@situation("config", "auto_map names code of the checkpoint, which must not run", (0, 3, 7))
def _(box: Box) -> Any:
    source = write_hf(box.root / "hf", llama())
    config = {"model_type": "mine", "architectures": ["Mine"], "auto_map": {
        "AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Mine"}}  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    (source / "code.py").write_text(f"open({str(box.root / 'owned')!r}, 'w')\n")
    return hf2dcp(box, source)


@situation("config", "a module in the working directory is called like one of ours", 0)
def _(box: Box) -> Any:
    for name in ("xxhash", "safetensors", "numpy", "click", "torch", "transformers"):
        (box.root / "hf").mkdir(exist_ok=True)
        (box.root / "hf" / f"{name}.py").write_text("raise SystemExit(99)\n")
    return hf2dcp(box, box.hf())


_OPTIONS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "--max-shard-size 0": ((2,), ("convert", "to-hf", "dcp", "DST", "--max-shard-size", "0")),
    "--max-shard-size '5 bananas'": ((2,), ("convert", "to-hf", "dcp", "DST", "--max-shard-size", "5 bananas")),
    "--max-shard-size 1e400GB": ((2,), ("convert", "to-hf", "dcp", "DST", "--max-shard-size", "1e400GB")),
    "--max-shard-size of 400 digits": ((2,),
        ("convert", "to-hf", "dcp", "DST", "--max-shard-size", "9" * 400 + ".5GB")),
    "--max-shard-size 1: a file per tensor": ((0,), ("convert", "to-hf", "dcp", "DST", "--max-shard-size", "1")),
    "--workers 0": ((2,), ("convert", "to-dcp", "hf", "DST", "--workers", "0")),
    "--workers 1000000000": ((2,), ("convert", "to-dcp", "hf", "DST", "--workers", "1000000000")),
    "--files 1000000000": ((0, 2), ("convert", "to-dcp", "hf", "DST", "--files", "1000000000")),
    "--max-memory 1": ((2,), ("convert", "to-dcp", "hf", "DST", "--max-memory", "1")),
    "--max-memory 10^30 GB": ((0, 2), ("convert", "to-dcp", "hf", "DST", "--max-memory", "1" + "0" * 30 + "GB")),
    "--tp 0": ((2,), ("reshard", "hf", "DST", "--tp", "0")),
    "--tp -4": ((2,), ("reshard", "hf", "DST", "--tp", "-4")),
    "--tp 3.5": ((2,), ("reshard", "hf", "DST", "--tp", "3.5")),
    "--tp 1000000000": ((2,), ("reshard", "hf", "DST", "--tp", "1000000000")),
    "--dp-shard 1000000000": ((2,), ("reshard", "hf", "DST", "--dp-shard", "1000000000")),
    "--pp 1000000000": ((2,), ("reshard", "hf", "DST", "--pp", "1000000000")),
    "a mesh of 2^90 ranks": ((2,),
        ("reshard", "hf", "DST", "--tp", str(2**30), "--pp", str(2**30), "--dp-shard", str(2**30))),
    "--tp 7, which divides nothing": ((0,), ("reshard", "hf", "DST", "--tp", "7", "--to", "dcp")),
    "--pp 3 of two layers": ((0, 2), ("reshard", "hf", "DST", "--pp", "3")),
    "--pp-split a,b": ((2,), ("reshard", "hf", "DST", "--pp", "2", "--pp-split", "a,b")),
    "--pp-split 1,,1": ((2,), ("reshard", "hf", "DST", "--pp", "2", "--pp-split", "1,,1")),
    "--pp-split 3,-1": ((2,), ("reshard", "hf", "DST", "--pp", "2", "--pp-split", "3,-1")),
    "--pp-split of 10^12 layers": ((2,), ("reshard", "hf", "DST", "--pp", "2", "--pp-split", "1,1000000000000")),
    "--tp-plan that is missing": ((2, 3), ("reshard", "hf", "DST", "--tp", "2", "--tp-plan", "none.json")),
    "--tp-plan that is a directory": ((2, 3), ("reshard", "hf", "DST", "--tp", "2", "--tp-plan", "hf")),
    "--tp-plan that is a device": ((2, 3), ("reshard", "hf", "DST", "--tp", "2", "--tp-plan", "/dev/zero")),
    "--names klingon": ((2,), ("convert", "to-hf", "dcp", "DST", "--names", "klingon")),
    "--dtype int8": ((2,), ("convert", "to-dcp", "hf", "DST", "--dtype", "int8")),
    "--source-prefix of half a name": ((0, 2, 3), ("convert", "to-hf", "dcp", "DST", "--source-prefix", "model.lay")),
    "--prefix that climbs": ((0, 2, 3), ("convert", "to-dcp", "hf", "DST", "--prefix", "../../")),
    "--base that does not exist": ((3,), ("convert", "to-hf", "dcp", "DST", "--base", "none-such")),
    "--base that is DST": ((3, 5), ("convert", "to-hf", "dcp", "DST", "--base", "DST")),
    "an option twice": ((0, 2), ("convert", "to-dcp", "hf", "DST", "--dtype", "bf16", "--dtype", "fp32")),
    "an option nobody knows": ((2,), ("convert", "to-dcp", "hf", "DST", "--turbo")),
    "a third path": ((2,), ("convert", "to-dcp", "hf", "DST", "more")),
    "no path": ((2,), ("convert", "to-dcp")),
    "a direction nobody knows": ((2,), ("convert", "hf2gguf", "hf", "DST")),
    "no command": ((0, 2), ()),
    "convert to-dcp of a DCP": ((0,), ("convert", "to-dcp", "dcp", "DST")),
    "convert to-hf of HF": ((0,), ("convert", "to-hf", "hf", "DST")),
    "--resume with nothing to resume": ((0,), ("convert", "to-dcp", "hf", "DST", "--resume")),
    "--resume and --overwrite with nothing there": ((0,),
        ("convert", "to-dcp", "hf", "DST", "--resume", "--overwrite")),
    "--match '['": ((0, 2), ("inspect", "hf", "--match", "[")),
    "--match of 50 stars": ((0, 2), ("inspect", "hf", "--tensors", "--match", "*a" * 50)),
    "--revision that climbs, with a local path": ((0, 2),
        ("convert", "to-dcp", "hf", "DST", "--revision", "../../../etc")),
    "a Hub id without a network": ((3, 7), ("convert", "to-dcp", "org/name", "DST")),
    "a Hub id with ..": ((2, 3), ("convert", "to-dcp", "../../org/name", "DST")),
    "a Hub id of three parts": ((2, 3), ("convert", "to-dcp", "a/b/c", "DST")),
    "a path on another machine": ((2, 3, 4), ("convert", "to-dcp", "host:/model", "DST")),
    "a URL": ((2, 3, 4), ("convert", "to-dcp", "https://example.org/m", "DST")),
    "diff of a checkpoint and nothing": ((3,), ("diff", "hf", "none-such")),
    "verify of two models": ((1, 3), ("verify", "hf", "other")),
    "verify of a file and its directory": ((0,), ("verify", "hf/model.safetensors", "hf")),
}  # fmt: skip
for _name, (_exits, _argv) in _OPTIONS.items():

    @situation("options", _name, _exits)
    def _(box: Box, argv: tuple[str, ...] = _argv) -> Any:
        box.hf()
        box.dcp()
        other = llama() | {"model.norm.weight": value("BF16", 8, seed=99)}
        write_hf(box.root / "other", other)
        return [box.dst if word == "DST" else word for word in argv]


_PLANS: dict[str, tuple[tuple[int, ...], str]] = {
    "is a list": ((2, 3), "[]"),
    "has a style nobody knows": ((2, 3, 4), '{"model.layers.*.mlp.up_proj": "diagonal"}'),
    "has a style that is a list": ((2, 3), '{"model.layers.*.mlp.up_proj": ["colwise"]}'),
    "has a pattern that is no pattern": ((2, 3), '{"(((((a+)+)+)+)+)+$": "colwise"}'),
    "has a pattern of a thousand stars": ((2, 3), json.dumps({"*." * 1000 + "x": "colwise"})),
    "has a key twice": ((2, 3), '{"a": "colwise", "a": "rowwise"}'),
    "is nested 100,000 deep": ((2, 3), '{"a":' * 100_000),
    "cuts a norm of one dim": ((0, 2, 3, 4), '{"model.norm": "rowwise"}'),
}
for _name, (_exits, _plan) in _PLANS.items():

    @situation("options", f"a --tp-plan that {_name}", _exits)
    def _(box: Box, plan: str = _plan) -> Any:
        (box.root / "plan.json").write_text(plan)
        return ("reshard", box.hf(), box.dst, "--tp", "2", "--to", "dcp", "--tp-plan", "plan.json")


def _limit(kind: int, amount: int) -> Any:
    return lambda: resource.setrlimit(kind, (amount, amount))


@situation("environment", "files may not grow beyond 1,000 bytes", (5, 6))
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), before=_limit(resource.RLIMIT_FSIZE, 1000))


@situation("environment", "twelve files may be open, the checkpoint has forty", (0, 7))
def _(box: Box) -> Any:
    tensors = {f"w{i}": value("F32", 4, seed=i) for i in range(40)}
    write_hf(box.root / "many", tensors, shards=40, config=None)
    return Try(hf2dcp(box, "many"), before=_limit(resource.RLIMIT_NOFILE, 12))


@situation("environment", "200 MB of address space", (0, 7))
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf(), None, "--workers", "2", "--max-memory", "16MB"),
               before=_limit(resource.RLIMIT_AS, 200 << 20))  # fmt: skip


@situation("environment", "half a second of processor time", (0, 143, -24, -9))
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), before=_limit(resource.RLIMIT_CPU, 10))


@situation("environment", "stdout is closed", (0, 5))
def _(box: Box) -> Any:
    return Try(("inspect", box.hf()), shell='exec "$@" >&-')


@situation("environment", "stderr is closed", 0)
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), shell='exec "$@" 2>&-')


@situation("environment", "all three streams are closed", (0, 5))
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), shell='exec "$@" <&- >&- 2>&-')


@situation("environment", "stdout is full", 6)
def _(box: Box) -> Any:
    return Try(("inspect", box.hf()), shell='exec "$@" >/dev/full')


@situation("environment", "the reader of stdout leaves after a byte", (0, 5, 141))
def _(box: Box) -> Any:
    return Try(("inspect", box.hf(), "--tensors"), shell='set -o pipefail; "$@" | head -c 1')


@situation("environment", "the working directory was removed", (0, 3))
def _(box: Box) -> Any:
    source = box.hf()
    return Try(hf2dcp(box, source), shell='mkdir gone && cd gone && rmdir ../gone && exec "$@"')


for _locale in ({"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
                {"PYTHONIOENCODING": "ascii"}):  # fmt: skip

    @situation("environment", f"names beyond ASCII under {' '.join(f'{k}={v}' for k, v in _locale.items())}", 0)
    def _(box: Box, locale: dict[str, str] = _locale) -> Any:
        write_hf(box.root / "hf", {"gewicht.größe.重み": value("F32", 2)}, config=None)
        return Try(("inspect", "hf", "--tensors"), env=locale)


@situation("environment", "assertions are compiled away, and a shard is spoiled", 3)
def _(box: Box) -> Any:
    with (box.hf() / SINGLE).open("r+b") as file:
        file.truncate(200)
    return Try(hf2dcp(box, box.root / "hf"), env={"PYTHONOPTIMIZE": "2"})


@situation("environment", "assertions are disabled (PYTHONOPTIMIZE)", 0)
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), env={"PYTHONOPTIMIZE": "2"})


@situation("environment", "no HOME, no PATH, no TMPDIR", 0)
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), env={"HOME": None, "PATH": None, "TMPDIR": None})


@situation("environment", "WORLD_SIZE and RANK are not numbers", (0, 2, 7))
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), env={"WORLD_SIZE": "many", "RANK": "first", "LOCAL_WORLD_SIZE": "0"})


@situation("environment", "RANK is beyond WORLD_SIZE", (2, 7))
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), env={"WORLD_SIZE": "2", "RANK": "5"})


@situation("environment", "two processes and no rendezvous address", 7)
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), env={"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": None, "MASTER_PORT": None})


@situation("environment", "COLUMNS is not a number", 0)
def _(box: Box) -> Any:
    return Try(("convert", "to-dcp", "--help"), env={"COLUMNS": "wide"})


@situation("environment", "a umask that forbids everything", 0)
def _(box: Box) -> Any:
    return Try(hf2dcp(box, box.hf()), before=lambda: os.umask(0o777))


@situation("environment", "SIGTERM is blocked by the parent", 0)
def _(box: Box) -> Any:
    block = {signal.SIGTERM, signal.SIGHUP}
    return Try(hf2dcp(box, box.hf()), before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, block))


@situation("environment", "two runs write the same DST at once: one exits with 0, the other with 5", 0)
def _(box: Box) -> Any:
    both = '"$@" >/dev/null 2>&1 & other=$!; "$@"; one=$?; wait $other; exit $((one + $? - 5))'
    return Try(hf2dcp(box, box.hf()), shell=both)
