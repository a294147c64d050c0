"""`.hf_metadata/` beside shards is the base without being asked; it comes from outside, and is held to its form."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.api.convert import convert
from ckptx.api.reshard import reshard
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.hf.hf_metadata import DIRECTORIES, DTYPE_MAPPING, FILE_MAPPING, local_config_directory
from ckptx.formats.registry import open_checkpoint
from tests.formats.cut_writer import rows, write_shard
from tests.support.checkpoint_writers import INDEX, LLAMA, SINGLE, Value, llama, names_in, write_dcp, write_hf

CONFIG: dict[str, Any] = {
    **LLAMA, "hidden_size": 8, "intermediate_size": 24, "vocab_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
MODEL = llama(dtype="F32")
NAMES = sorted(MODEL)
DTYPES_OF_BASE = {name: "F32" if "norm" in name else "BF16" for name in NAMES}


def automodel(root: Path, files: Any = None, dtypes: Any = None, *, config: Any = CONFIG) -> Path:
    """A directory as Automodel leaves it: two ranks, the metadata of the base hidden beside them, a helper script."""
    write_ranks(root, MODEL)
    hidden = root / DIRECTORIES["dcp"]
    (hidden / "code").mkdir(parents=True)
    (hidden / "tokenizer.json").write_text('{"version": "1.0"}')
    (hidden / "code" / "modeling.py").write_text("# nothing\n")
    (root / "consolidate.sh").write_text("#!/bin/bash\n")
    if config is not None:
        (hidden / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, said in ((FILE_MAPPING, files), (DTYPE_MAPPING, dtypes)):
        if said is not None:
            (hidden / name).write_text(said if isinstance(said, str) else json.dumps(said))
    return root


def write_ranks(root: Path, tensors: dict[str, Value]) -> None:
    for rank in range(2):
        blocks = {}
        for name, tensor in tensors.items():
            half = tensor[1][0] // 2
            blocks[name] = rows(tensor, rank * half, half if rank == 0 else tensor[1][0])
        write_shard(root, rank + 1, blocks)


def test_it_is_the_base_of_every_command(tmp_path: Path) -> None:
    src = automodel(tmp_path / "model", dict.fromkeys(NAMES, 1), DTYPES_OF_BASE)
    catalog = open_checkpoint(src)
    assert catalog.config == CONFIG
    assert local_config_directory(catalog) == src / DIRECTORIES["dcp"], (
        "where a model is built from, and its code found"
    )
    convert("dcp2hf", src, tmp_path / "hf")
    assert names_in(tmp_path / "hf") == ["ckptx.json", "code", "config.json", SINGLE, "tokenizer.json"]
    convert("hf2dcp", src, tmp_path / "dcp")
    reshard(src, tmp_path / "cut", tp=2)
    for out in ("dcp", "cut"):
        assert (tmp_path / out / "config.json").is_file()
        assert (tmp_path / out / "code" / "modeling.py").read_bytes() == b"# nothing\n"
        assert not (tmp_path / out / FILE_MAPPING).exists()
        assert not (tmp_path / out / "consolidate.sh").exists()


def test_it_is_found_beside_a_model_with_its_optimizer(tmp_path: Path) -> None:
    automodel(tmp_path / "step" / "model", None, DTYPES_OF_BASE)
    write_dcp(tmp_path / "step" / "optim", {"state.model.norm.weight.exp_avg": MODEL["model.norm.weight"]})
    report = convert("dcp2hf", tmp_path / "step", tmp_path / "hf", dtype="base")
    assert report.dtypes["after"] == {"BF16": 16, "F32": 5}
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == CONFIG


def test_a_base_that_is_given_goes_before_it(tmp_path: Path) -> None:
    src = automodel(tmp_path / "model", dict.fromkeys(NAMES, 1), DTYPES_OF_BASE)
    write_hf(tmp_path / "base", llama(dtype="F16"), config={**CONFIG, "torch_dtype": "float16"})
    report = convert("dcp2hf", src, tmp_path / "hf", base=str(tmp_path / "base"), dtype="base")
    assert report.dtypes["after"] == {"F16": 21}
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    convert("dcp2hf", src, tmp_path / "alone", base="none")
    assert names_in(tmp_path / "alone") == ["ckptx.json", SINGLE]


def test_what_it_keeps_in_float32_is_kept(tmp_path: Path) -> None:
    src = automodel(tmp_path / "model", None, DTYPES_OF_BASE)
    report = convert("dcp2hf", src, tmp_path / "hf", dtype="fp16")
    assert report.dtypes["after"] == {"F16": 16, "F32": 5}


def test_float32_masters_under_its_config_are_said_to_be_float32(tmp_path: Path) -> None:
    src = automodel(tmp_path / "model", None, DTYPES_OF_BASE)
    report = convert("dcp2hf", src, tmp_path / "hf")
    assert report.config_edits == [{"key": "torch_dtype", "before": "bfloat16", "after": "float32"}]
    reshard(src, tmp_path / "cut", tp=2)
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["torch_dtype"] == "float32"


@given(
    st.dictionaries(st.sampled_from([*NAMES, "no.such.tensor", "other.tied.name"]), st.integers(1, 6)),
    st.sampled_from(["auto", "always"]),
)
@settings(max_examples=60, deadline=None)
def test_files_are_those_of_the_original(files: dict[str, int], index: str) -> None:
    """Tensors with one number lie together, in the order of numbers, whatever numbers nothing has."""
    with tempfile.TemporaryDirectory() as directory:
        src = automodel(Path(directory, "model"), files)
        dst = Path(directory, "hf")
        report = convert("dcp2hf", src, dst, index=index)
        last = max(files.values(), default=1)
        expected: dict[int, set[str]] = {}
        for name in NAMES:
            expected.setdefault(files.get(name, last) if not files.keys().isdisjoint(NAMES) else 1, set()).add(name)
        weights = [name for name in names_in(dst) if name.endswith(".safetensors")]
        count = len(expected)
        assert weights == (
            [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )
        found = open_checkpoint(dst).tensors
        held = [{name for name, entry in found.items() if entry.chunks[0].file == file} for file in weights]
        assert held == [expected[number] for number in sorted(expected)]
        assert (dst / INDEX).exists() is (count > 1 or index == "always")
        strangers = files.keys() - set(NAMES) if not files.keys().isdisjoint(NAMES) else set()
        assert any(FILE_MAPPING in line for line in report.notes) is bool(strangers)


@pytest.mark.parametrize("size", ["2KB", "1GB"])
def test_a_size_that_is_asked_for_goes_before_its_files(tmp_path: Path, size: str) -> None:
    src = automodel(tmp_path / "model", dict.fromkeys(NAMES[:3], 1) | dict.fromkeys(NAMES[3:], 2))
    convert("dcp2hf", src, tmp_path / "hf", max_shard_size=size)
    assert (tmp_path / "hf" / SINGLE).exists() is (size == "1GB")


DAMAGE: dict[str, tuple[dict[str, Any], type[CkptxError], str]] = {
    "config no JSON": ({"config": "{"}, InputError, "config.json: not JSON"),
    "config a list": ({"config": "[]"}, InputError, "config.json: expected a JSON object, found a list"),
    "files no JSON": ({"files": "{"}, InputError, f"{FILE_MAPPING}: not JSON"),
    "files a list": ({"files": "[1]"}, InputError, f"{FILE_MAPPING}: expected a JSON object, found a list"),
    "files twice": ({"files": '{"a": 1, "a": 2}'}, InputError, 'key "a" appears twice'),
    "a file's name": ({"files": {"a": "../../x"}}, InputError, r'tensor "a" must be a positive integer, found .*x'),
    "a file 0": ({"files": {"a": 0}}, InputError, "must be a positive integer, found 0;"),
    "a negative file": ({"files": {"a": -1}}, InputError, "must be a positive integer, found -1;"),
    "half a file": ({"files": {"a": 1.5}}, InputError, "must be a positive integer, found 1.5;"),
    "a true file": ({"files": {"a": True}}, InputError, "must be a positive integer, found True;"),
    "an endless file": ({"files": '{"a": 1' + "0" * 5000 + "}"}, InputError, f"{FILE_MAPPING}: "),
    "a deep file": ({"files": '{"a": ' + "[" * 5000 + "]" * 5000 + "}"}, InputError, f"{FILE_MAPPING}: "),
    "dtypes a list": ({"dtypes": "[]"}, InputError, f"{DTYPE_MAPPING}: expected a JSON object, found a list"),
    "a dtype nobody has": ({"dtypes": {"a": "F7"}}, UnsupportedError, "dtype 'F7' of .* is not a dtype of safetensors"),
    "a dtype of torch alone": ({"dtypes": {"a": "C128"}}, UnsupportedError, "is not a dtype of safetensors"),
    "a dtype by number": ({"dtypes": {"a": 16}}, InputError, "dtype 16 of tensor \"a\" is not a dtype of safetensors"),
    "no dtype": ({"dtypes": {"a": None}}, InputError, "dtype None of .* is not a dtype"),
}  # fmt: skip


@pytest.mark.parametrize("fault", sorted(DAMAGE))
def test_damage_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    said, kind, message = DAMAGE[fault]
    src = automodel(tmp_path / "model", **said)
    for command in ("dcp2hf", "hf2dcp"):
        with pytest.raises(kind, match=message) as refusal:
            convert(command, src, tmp_path / "out")
        assert "\n" not in str(refusal.value)
        assert not (tmp_path / "out").exists()


def test_a_file_number_of_any_size_names_no_file(tmp_path: Path) -> None:
    src = automodel(tmp_path / "model", {name: 10**60 + i % 2 for i, name in enumerate(NAMES)})
    convert("dcp2hf", src, tmp_path / "hf")
    assert "model-00001-of-00002.safetensors" in names_in(tmp_path / "hf")


def test_metadata_without_a_config_leaves_the_one_beside_the_tensors(tmp_path: Path) -> None:
    src = automodel(tmp_path / "model", None, DTYPES_OF_BASE, config=None)
    with pytest.raises(InputError, match=r"has no config\.json"):
        convert("dcp2hf", src, tmp_path / "hf")
    (src / "config.json").write_text(json.dumps(CONFIG))
    report = convert("dcp2hf", src, tmp_path / "hf", dtype="base")
    assert report.dtypes["after"] == {"BF16": 16, "F32": 5}


def test_what_was_not_trained_from_it_is_no_base(tmp_path: Path) -> None:
    """A step of a trainer holds its own weights beside the metadata of another checkpoint."""
    src = automodel(tmp_path / "model", None, DTYPES_OF_BASE)
    with pytest.raises(InputError, match=r"has no config\.json; --base requires an HF checkpoint"):
        convert("dcp2hf", src, tmp_path / "hf", base=str(src))


def test_names_of_the_model_are_not_looked_up_among_those_on_disk(tmp_path: Path) -> None:
    src = automodel(tmp_path / "model", dict.fromkeys(NAMES[:3], 1) | dict.fromkeys(NAMES[3:], 2))
    convert("dcp2hf", src, tmp_path / "hf", names="model")
    assert (tmp_path / "hf" / SINGLE).exists()
