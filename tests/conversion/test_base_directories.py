"""The base of a conversion: `--base` with and without weights, on the Hub, and the directory that AutoModel writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from safetensors.torch import load_file

import ckptx
from ckptx.errors import InputError, OutputError, UnsupportedError, UsageError
from tests.conversion.steps import CONFIG, TIED
from tests.support.checkpoint_writers import INDEX, SINGLE, Value, llama, names_in, write_dcp, write_hf, write_index

HEAD, NORM = "lm_head.weight", "model.norm.weight"
NAMES = list(llama())


def recorded(root: Path, *, config: dict[str, Any] | None = CONFIG, **mappings: dict[str, Any]) -> Path:
    """Write a DCP in float32 with a directory of HF files in it, as AutoModel does."""
    write_dcp(root, llama(dtype="F32"))
    directory = root / ".hf_metadata"
    directory.mkdir()
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    for name, mapping in mappings.items():
        (directory / f"fqn_to_{name}_mapping.json").write_text(json.dumps(mapping))
    return root


# The directory that AutoModel writes


@pytest.mark.parametrize("has_config", [True, False])
def test_the_directory_in_the_checkpoint_gives_config_dtypes_and_files(tmp_path: Path, has_config: bool) -> None:
    dtypes = {name: "F32" if name == NORM else "BF16" for name in NAMES}
    source = recorded(
        tmp_path / "dcp",
        config=CONFIG if has_config else None,
        dtype=dtypes,
        file_index={name: 1 + NAMES.index(name) % 2 for name in NAMES},
    )
    if not has_config:
        (source / "config.json").write_text(json.dumps(CONFIG))
    report = ckptx.convert("to-hf", source, tmp_path / "out", dtype="base")
    note = "using config, tokenizer and other files from .hf_metadata in the source"
    assert (note in report.notes) == has_config
    weight_map = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    files = [f"model-{number}-of-00002.safetensors" for number in ("00001", "00002")]
    assert weight_map == {name: files[NAMES.index(name) % 2] for name in NAMES}
    stored = {name: str(each.dtype) for file in files for name, each in load_file(tmp_path / "out" / file).items()}
    assert stored == {name: f"torch.{'float32' if name == NORM else 'bfloat16'}" for name in NAMES}
    assert report.base_dtypes == {"matching": len(NAMES), "not_in_base": [], "quantized_in_base": []}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert (tmp_path / "out" / "tokenizer.json").exists() == has_config


@pytest.mark.parametrize(
    ("options", "are_files_kept"),
    [({}, True), ({"names": "hf"}, True), ({"names": "model"}, False), ({"max_shard_size": "1GB"}, False)],
    ids=str,
)
def test_names_without_a_tensor_are_noted_if_the_files_of_the_base_are_kept(
    tmp_path: Path, options: dict[str, Any], are_files_kept: bool
) -> None:
    numbers = {**{name: 1 + NAMES.index(name) % 3 for name in NAMES}, "a.tied.name": 2, "another": 1}
    source = recorded(tmp_path / "dcp", file_index=numbers)
    report = ckptx.convert("to-hf", source, tmp_path / "out", **options)
    note = (
        "fqn_to_file_index_mapping.json: 2 names without a stored tensor (such as tied weights) skipped: "
        '"a.tied.name", ...'
    )
    assert (note in report.notes) == are_files_kept
    assert len([*(tmp_path / "out").glob("*.safetensors")]) == (3 if are_files_kept else 1)


def test_files_of_other_tensors_are_not_kept(tmp_path: Path) -> None:
    source = recorded(tmp_path / "dcp", file_index={"a.tied.name": 2, "another": 1})
    report = ckptx.convert("to-hf", source, tmp_path / "out")
    assert names_in(tmp_path / "out") == ["ckptx.json", "config.json", SINGLE, "tokenizer.json"]
    assert not any("without a stored tensor" in note for note in report.notes)


@pytest.mark.parametrize("index", ["auto", "always"])
@pytest.mark.parametrize("size", ["1GB", "2KB"])
def test_an_index_is_written_for_several_files_or_always(tmp_path: Path, size: str, index: str) -> None:
    source = write_dcp(tmp_path / "dcp", llama(), config=CONFIG)
    ckptx.convert("to-hf", source, tmp_path / "out", max_shard_size=size, index=index)
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert (files == {SINGLE}) == (size == "1GB")
    assert (tmp_path / "out" / INDEX).exists() == (size != "1GB" or index == "always")
    if (tmp_path / "out" / INDEX).exists():
        weight_map = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
        assert {*weight_map} == {*NAMES} and {*weight_map.values()} == files
        for name, file in weight_map.items():
            assert name in load_file(tmp_path / "out" / file)


# `--base`


def test_a_base_without_weights_gives_config_and_tokenizer(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    (base / "tokenizer.json").write_text("{}")
    source = write_dcp(tmp_path / "dcp", llama(), config=None)
    for to in ("to-hf", "to-dcp"):
        report = ckptx.convert(to, source, tmp_path / to, base=base)
        assert report.architecture is not None and report.architecture["class"] == "LlamaForCausalLM"
        assert json.loads((tmp_path / to / "config.json").read_text()) == CONFIG
        assert (tmp_path / to / "tokenizer.json").read_text() == "{}"
    assert load_file(tmp_path / "to-hf" / SINGLE).keys() == {*NAMES}


def test_a_base_without_weights_has_no_dtypes(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    source = write_dcp(tmp_path / "dcp", llama(), config=None)
    with pytest.raises(UsageError, match=r"^--dtype base: the dtypes of the base are unknown"):
        ckptx.convert("to-hf", source, tmp_path / "out", base=base, dtype="base")


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_base_without_a_config_is_refused(tmp_path: Path, has_weights: bool) -> None:
    source = write_dcp(tmp_path / "dcp", llama(), config=CONFIG)
    base = write_hf(tmp_path / "base", llama(), config=None)
    if not has_weights:
        (base / SINGLE).unlink()
        (base / "tokenizer.json").write_text("{}")
    match = "has no config.json; --base requires an HF checkpoint" if has_weights else str(base)
    with pytest.raises(InputError, match=match):
        ckptx.convert("to-hf", source, tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()


def test_a_base_whose_weight_files_are_missing_gives_its_config(tmp_path: Path) -> None:
    source = write_dcp(tmp_path / "dcp", llama(), config=None)
    base = write_hf(tmp_path / "base", {}, config=CONFIG)
    (base / SINGLE).unlink()
    write_index(base, {NORM: "model-00001-of-00002.safetensors"})
    report = ckptx.convert("to-hf", source, tmp_path / "out", base=base)
    assert report.architecture is not None and report.architecture["class"] == "LlamaForCausalLM"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG


def test_a_training_checkpoint_is_no_base(tmp_path: Path) -> None:
    source = write_dcp(tmp_path / "dcp", llama(), config=None)
    base = write_dcp(tmp_path / "base", llama(), config=CONFIG)
    with pytest.raises(UnsupportedError) as caught:
        ckptx.convert("to-hf", source, tmp_path / "out", base=base)
    assert str(caught.value) == f"{base}: is of format dcp; --base requires an HF checkpoint"


@pytest.mark.parametrize("is_inside", [True, False])
def test_an_output_that_overlaps_the_base_is_refused(tmp_path: Path, is_inside: bool) -> None:
    source = write_dcp(tmp_path / "dcp", llama(), config=None)
    base = write_hf(tmp_path / "bases" / "base", llama(), config=CONFIG)
    with pytest.raises(OutputError):
        ckptx.convert("to-hf", source, base / "out" if is_inside else base.parent, base=base, overwrite=True)
    assert names_in(base) == ["config.json", SINGLE]


@pytest.mark.parametrize("token", ["secret", None])
def test_a_base_on_the_hub_is_downloaded_with_the_options_for_the_hub(
    tmp_path: Path, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub is replaced: no test uses the network."""
    base = write_hf(tmp_path / "snapshot", llama(), config=CONFIG)
    calls = []

    def snapshot(name: str, **options: Any) -> str:
        calls.append((name, options["revision"], options["token"], options["cache_dir"]))
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    source = write_dcp(tmp_path / "dcp", llama(), config=None)
    options = {"base": "org/base", "revision": "v1", "token": token, "cache_dir": tmp_path / "cache"}
    ckptx.convert("to-hf", source, tmp_path / "out", **options)
    ckptx.convert("to-hf", "org/model", tmp_path / "out2", **options)
    rest = ("v1", token, tmp_path / "cache")
    assert [*map(str, calls)] == [*map(str, [("org/base", *rest), ("org/model", *rest), ("org/base", *rest)])]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG


# No config


@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "no config"])
@pytest.mark.parametrize("to", ["to-hf", "to-dcp"])
def test_base_none_writes_tensors_and_says_what_is_lost(tmp_path: Path, to: str, config: dict[str, Any] | None) -> None:
    source = write_dcp(tmp_path / "dcp", llama(), config=config)
    report = ckptx.convert(to, source, tmp_path / "out", base="none")
    assert not (tmp_path / "out" / "config.json").exists()
    expected = (
        "--base none: no config used; tied weights and name prefixes are not detected"
        if config is None
        else f"--base none: {source}/config.json is read but not written; loaders need a config"
    )
    assert [note for note in report.notes if "--base none" in note] == [expected]


@pytest.mark.parametrize("to", ["to-hf", "to-dcp"])
def test_a_training_checkpoint_without_a_config_is_refused(tmp_path: Path, to: str) -> None:
    source = write_dcp(tmp_path / "dcp", llama(), config=None)
    with pytest.raises(InputError) as caught:
        ckptx.convert(to, source, tmp_path / "out")
    assert str(caught.value) == (
        f"{source}: has no config.json, which names the architecture and its tied weights; pass --base PATH with an HF "
        "checkpoint whose config.json describes the model, or --base none to write tensors without a config"
    )


def test_megatron_requires_a_config(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", llama(), config=None)
    with pytest.raises(InputError) as caught:
        ckptx.convert("to-megatron", source, tmp_path / "out")
    assert str(caught.value) == (
        f"{source}: has no config.json, which gives the class, the heads and the vocabulary; pass --base PATH with an "
        "HF checkpoint whose config.json describes the model"
    )


# A padded vocabulary


def padded(rows: int) -> dict[str, Value]:
    tensors = llama(vocab=rows)
    return {name: tensors[name] for name in NAMES}


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_a_padded_vocabulary_is_refused_or_written_into_the_config(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = padded(24)
    if config is TIED:
        del tensors[HEAD]
    source = write_dcp(tmp_path / "dcp", tensors, config=config)
    with pytest.raises(InputError, match="pass --allow-config-mismatch to write vocab_size 24 into the config of the"):
        ckptx.convert("to-hf", source, tmp_path / "out")
    report = ckptx.convert("to-hf", source, tmp_path / "out", allow_config_mismatch=True)
    assert report.config_edits == [{"key": "vocab_size", "before": 16, "after": 24}]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "vocab_size": 24}
    (note,) = [note for note in report.notes if "does not match its config" in note]
    assert "may reject the output" not in note
