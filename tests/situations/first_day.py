"""Common mistakes: bare commands, misspellings, options of other commands, values, `--gpu` and reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.situations.box import Box, Try, situation

AREA = "common mistakes"


def lay(box: Box, argv: tuple[str, ...]) -> list[Any]:
    """Write `hf` and `dcp`; DST in the arguments is the output."""
    box.hf()
    box.dcp()
    return [box.dst if word == "DST" else word for word in argv]


def add(rows: dict[str, tuple[int | tuple[int, ...], str, tuple[str, ...]]]) -> None:
    """Add a situation for each row: name -> exit codes, pattern of the output, arguments."""
    for name, (exits, said, argv) in rows.items():

        @situation(AREA, name, exits, said)
        def _(box: Box, argv: tuple[str, ...] = argv) -> Any:
            return lay(box, argv)


add({
    "inspect without a path": (2, "PATH", ("inspect",)),
    "diff without a path": (2, r"\bA\b", ("diff",)),
    "diff of one path": (2, r"\bB\b", ("diff", "hf")),
    "verify without a path": (2, "REFERENCE", ("verify",)),
    "verify of one path": (2, "CHECKPOINT", ("verify", "hf")),
    "reshard without a path": (2, "SRC", ("reshard",)),
    "reshard of one path": (2, "DST", ("reshard", "hf")),
    "convert to-hf of one path": (2, "DST", ("convert", "to-hf", "dcp")),
    "convert without a direction": ((0, 2), "to-dcp", ("convert",)),
    "forecast without a model": (2, "requires a model.*--recipe", ("forecast",)),
    "robustness without a recipe": (2, "RECIPE", ("robustness",)),
    "env with a path": (2, "", ("env", "hf")),
    "env": (0, "ckptx", ("env",)),
    "help": (0, "Usage: .*COMMAND", ("help",)),
    "-h": (0, "Usage: .*COMMAND", ("-h",)),
    "--version": (0, r"\d+\.\d+", ("--version",)),
    "inspect -h": (0, "Usage: .*inspect", ("inspect", "-h")),
    "an option with underscores": (0, "wrote", ("reshard", "hf", "DST", "--dp_shard", "2")),
    "--quiet after the command": (0, "", ("inspect", "hf", "--quiet")),
    "--quiet before the command": (0, "", ("--quiet", "inspect", "hf")),
})  # fmt: skip

for _typed, _meant in {
    "inspct": "inspect", "dif": "diff", "verfy": "verify", "rehsard": "reshard", "forcast": "forecast",
    "robustnes": "robustness", "evn": "env", "convret": "convert",
}.items():  # fmt: skip
    add({f"the command {_typed}": (2, f"did you mean {_meant}", (_typed, "hf"))})
for _typed, _meant in {"to-dpc": "to-dcp", "dcp2fh": "dcp2hf", "hf2dpc": "hf2dcp", "tohf": "to-hf"}.items():
    add({f"the direction {_typed}": (2, f"did you mean (convert )?{_meant}", ("convert", _typed, "hf", "DST"))})

for _typed, _meant, _argv in (
    ("--tensor", "--tensors", ("inspect", "hf")),
    ("--matc", "--match", ("inspect", "hf")),
    ("--rank", "--ranks", ("inspect", "hf")),
    ("--tpp", "--tp", ("reshard", "hf", "DST")),
    ("--dp-shards", "--dp-shard", ("reshard", "hf", "DST")),
    ("--overwite", "--overwrite", ("reshard", "hf", "DST")),
    ("--dryrun", "--dry-run", ("reshard", "hf", "DST")),
    ("--max-memry", "--max-memory", ("convert", "to-dcp", "hf", "DST")),
    ("--dtyp", "--dtype", ("convert", "to-dcp", "hf", "DST")),
    ("--resum", "--resume", ("convert", "to-hf", "dcp", "DST")),
    ("--runn", "--run", ("verify", "hf", "hf")),
    ("--backwards", "--backward", ("verify", "hf", "hf")),
    ("--optimiser", "--optimizer", ("forecast", "hf")),
    ("--gpu-mem", "--gpu-memory", ("forecast", "hf")),
    ("--phase", "--phases", ("robustness", "llama_tiny")),
    ("--injct", "--inject", ("robustness", "llama_tiny")),
    ("--jsonn", "--json", ("env",)),
):
    add({f"{_argv[0]} {_typed}": (2, f"did you mean .*{_meant}", (*_argv, _typed))})

for _option, _owner, _argv in (
    ("--tensors", "inspect", ("diff", "hf", "hf")),
    ("--tp", "reshard|verify|forecast", ("inspect", "hf")),
    ("--overwrite", "convert|reshard", ("verify", "hf", "hf")),
    ("--gpus", "forecast", ("verify", "hf", "hf")),
    ("--phases", "robustness", ("forecast", "hf")),
    ("--workers", "convert|reshard|verify", ("env",)),
    ("--batch", "forecast", ("robustness", "llama_tiny")),
    ("--ranks", "inspect", ("reshard", "hf", "DST")),
):
    add({f"{_argv[0]} {_option}, which another command has": (
        2, rf"does not take {_option} \(.*({_owner})", (*_argv, _option, "2"))})  # fmt: skip

for _argv, _meant in (
    (("convert", "to-dcp", "hf", "DST", "--dtype", "bf61"), "bf16"),
    (("convert", "to-dcp", "hf", "DST", "--tied", "coppy"), "copy"),
    (("convert", "to-dcp", "dcp", "DST", "--optimizer", "keeep"), "keep"),
    (("convert", "to-hf", "dcp", "DST", "--index", "allways"), "always"),
    (("reshard", "hf", "DST", "--to", "safetensor"), "safetensors"),
    (("reshard", "hf", "DST", "--names", "torchtitn"), "torchtitan"),
    (("verify", "hf", "hf", "--run", "--device", "gpu"), "cuda"),
    (("verify", "hf", "hf", "--run", "--backend", "ncll"), "nccl"),
    (("verify", "hf", "hf", "--run", "--pp", "2", "--schedule", "1fb1"), "1f1b"),
    (("forecast", "hf", "--optimizer", "adamww"), "adamw"),
    (("forecast", "hf", "--loss", "fulll"), "full"),
    (("forecast", "hf", "--activation-checkpointing", "selectve"), "selective"),
    (("forecast", "hf", "--activation-checkpointing", "full", "--ac-scope", "text"), "language"),
    (("forecast", "hf", "--param-dtype", "float61"), "bf16"),
):
    add({f"{_argv[0]} {' '.join(_argv[-2:])}": (2, f"{_argv[-2]}.*{_meant}", _argv)})

for _argv, _meant in (
    (("forecast", "hf", "--gpu", "h1000"), "h100"),
    (("forecast", "hf", "--gpu", "a100"), "a100-80gb"),
    (("forecast", "hf", "--gpu", "mi300"), "mi300x"),
    (("forecast", "hf", "--gpu", ""), "h100"),
    (("forecast", "hf", "--gpu", "80GB"), "h100"),
    (("robustness", "llama_tiny", "--gpu", "tpu"), "h100"),
    (("verify", "hf", "hf", "--run", "--gpu", "4090"), "rtx4090"),
):
    add({f"{_argv[0]} with --gpu {_argv[-1] or 'nothing'}": (2, f"--gpu.*{_meant}", _argv)})
add({
    "--gpu and --gpu-memory": (2, "--gpu.*--gpu-memory|--gpu-memory.*--gpu", (
        "forecast", "hf", "--gpu", "h100", "--gpu-memory", "80GB")),
    "verify --gpu without --run": (2, "--gpu requires --run", ("verify", "hf", "hf", "--gpu", "h100")),
    "GPU memory of no unit that exists": (2, "--gpu-memory", ("forecast", "hf", "--gpu-memory", "80 bananas")),
    "GPU memory of 0": (2, "--gpu-memory", ("forecast", "hf", "--gpu-memory", "0")),
    "negative GPU memory": (2, "--gpu-memory", ("forecast", "hf", "--gpu-memory=-1GB")),
})  # fmt: skip

add({
    "--search alone": (2, "--search requires --gpus", ("forecast", "hf", "--search")),
    "--search without memory": (2, "--search requires --gpu-memory or --gpu", (
        "forecast", "hf", "--search", "--gpus", "8")),
    "--gpus without --search": (2, "--gpus requires --search", ("forecast", "hf", "--gpus", "8")),
    "--set without --recipe": (2, "--set requires --recipe", ("forecast", "hf", "--set", "layout.tp=2")),
    "a model and a recipe": (2, "--recipe", ("forecast", "hf", "--recipe", "llama_tiny")),
    "--ac-scope without a mode": (2, "--ac-scope requires --activation-checkpointing", (
        "forecast", "hf", "--ac-scope", "language")),
    "--schedule without --pp": (2, "--schedule requires --pp 2 or more", ("forecast", "hf", "--schedule", "gpipe")),
    "--pp-split without --pp": (2, "--pp-split requires --pp 2 or more", ("forecast", "hf", "--pp-split", "hf")),
    "--tp-plan without --tp": (2, "--tp-plan requires --tp 2 or more", ("forecast", "hf", "--tp-plan", "plan.json")),
    "reshard --tp-plan without --tp": (2, "--tp-plan requires --tp 2 or more", (
        "reshard", "hf", "DST", "--tp-plan", "plan.json")),
    "reshard --allow-overflow without --dtype": (2, "--allow-overflow requires --dtype", (
        "reshard", "hf", "DST", "--allow-overflow")),
})  # fmt: skip
for _option, _value in (
    ("--schedule", "gpipe"),
    ("--pp-split", "hf"),
    ("--tp-plan", "plan.json"),
    ("--ac-scope", "all"),
):
    add({f"--search with {_option}": (2, f"--search.*{_option}", (
        "forecast", "hf", "--search", "--gpus", "8", "--gpu", "h100", _option, _value))})  # fmt: skip


@situation(AREA, "--search with --html", 2, "--html.*--search", may_change=("page.html",))
def _(box: Box) -> Any:
    """The page shows the error."""
    return lay(box, ("forecast", "hf", "--search", "--gpus", "8", "--gpu", "h100", "--html", "page.html"))


for _option, _value in (
    ("--batch", "0"), ("--seq", "0"), ("--seq", "-1"), ("--seq", "4k"), ("--images", "-1"), ("--microbatches", "0"),
    ("--dp-replicate", "0"), ("--tp", "two"),
):  # fmt: skip
    add({f"forecast {_option} {_value}": (2, f"{_option}.*{re.escape(_value)}", ("forecast", "hf", _option, _value))})

for _words in (
    ("--tp", "2"), ("--compile",), ("--compute-dtype", "fp32"), ("--reference-memory", "1GB"),
    ("--microbatches", "2"), ("--no-backward",),
):  # fmt: skip
    add({f"verify {' '.join(_words)} without --run": (
        2, f"{_words[0].replace('no-', '(no-)?')}.* requires --run", ("verify", "hf", "hf", *_words))})  # fmt: skip
for _words in (("--dtype", "bf16"), ("--workers", "2"), ("--max-memory", "1GB")):
    add(
        {
            f"verify --run with {_words[0]}": (
                2,
                f"--run does not take {_words[0]}",
                ("verify", "hf", "hf", "--run", *_words),
            )
        }
    )

for _glob in ("*embed*", "model.layers.[01].*", "?", "**", "MODEL*", "model.norm.weight", "*.weight*"):
    add({f"inspect --match '{_glob}'": (0, "LlamaForCausalLM", ("inspect", "hf", "--match", _glob))})
add({"inspect --match without a value": (2, "--match", ("inspect", "hf", "--match"))})

for _option, _argv in (
    ("--report", ("convert", "to-dcp", "hf", "DST")), ("--report", ("reshard", "hf", "DST", "--tp", "2")),
    ("--report", ("verify", "hf", "hf")), ("--html", ("inspect", "hf")),
):  # fmt: skip
    for _path, _name in (
        ("none/such/r", "in a missing directory"),
        ("hf", "that is a directory"),
        ("/dev/full", "on a full device"),
    ):
        add({f"{_argv[0]} {_option} {_name}": (5, "", (*_argv, _option, _path))})


for _argv, _exits in (
    (("convert", "to-dcp", "none-such", "DST"), 3), (("convert", "to-dcp", "s3://bucket/model", "DST"), 4),
    (("reshard", "hf", "hf"), 5), (("verify", "hf", "none-such"), 3),
):  # fmt: skip

    @situation(AREA, f"--report of {' '.join(_argv)}, which fails", _exits, may_change=("report.json",))
    def _(box: Box, argv: tuple[str, ...] = _argv) -> Any:
        return [*lay(box, argv), "--report", "report.json"]


for _text, _said in (
    ("wokers = 2", "ckptx.toml: wokers.*--workers"), ("[reshrd]\ntp = 2", "ckptx.toml: reshrd.*reshard"),
    ("workers = 0", "ckptx.toml: workers"), ("[reshard]\ndtype = 'bf61'", "ckptx.toml: reshard.dtype"),
    ("workers = ", "ckptx.toml.*TOML"),
):  # fmt: skip

    @situation(AREA, f"ckptx.toml has {_text.splitlines()[-1]!r}", 2, _said)
    def _(box: Box, text: str = _text) -> Any:
        Path(box.root, "ckptx.toml").write_text(text)
        return lay(box, ("reshard", "hf", "DST", "--tp", "2"))


for _variable, _value in (("CKPTX_TP", "two"), ("CKPTX_DTYPE", "bf61"), ("CKPTX_OVERWRITE", "perhaps")):

    @situation(AREA, f"{_variable} is {_value}", 2, _variable)
    def _(box: Box, variable: str = _variable, value: str = _value) -> Any:
        return Try(tuple(lay(box, ("reshard", "hf", "DST"))), env={variable: value})
