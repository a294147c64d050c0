"""Restored files are read back: damage between writing and the check is found, and a false record is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open

import ckptx
from ckptx.conversion.outputs import sharded as to_sharded
from ckptx.conversion.steps import reordered_tensors
from ckptx.errors import CkptxError, InputError, UnsupportedError, UsageError
from ckptx.storage.interface import local_path
from tests.conversion.steps import CONFIG, TIED
from tests.conversion.test_renamed_tensors import CONFIG as ROPE_CONFIG
from tests.conversion.test_renamed_tensors import both_spellings
from tests.conversion.test_steps import MIXTRAL, experts
from tests.conversion.test_written import rewrite
from tests.support.checkpoint_writers import SINGLE, llama, names_in, value, write_dcp, write_hf

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "torchtitan": (both_spellings()[0], ROPE_CONFIG, "torchtitan", "model.layers.1.self_attn.q_proj.weight"),
    "model": (experts(), MIXTRAL, "model", "model.layers.1.block_sparse_moe.experts.0.w1.weight"),
}


def position(file: Path, name: str) -> int:
    """Return the position of the first byte of a tensor in a safetensors file."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    begin: int = json.loads(data[8:end])[name]["data_offsets"][0]
    return end + begin


def damage(monkeypatch: pytest.MonkeyPatch, module: ModuleType, check: str, name: str) -> None:
    """Flip a bit of a tensor in the staged file before a check of a module."""
    unchanged = getattr(module, check)

    def damaged(tree: Any, *others: Any) -> None:
        file = local_path(tree.location) / SINGLE
        at = position(file, name)
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
        unchanged(tree, *others)

    monkeypatch.setattr(module, check, damaged)


@pytest.mark.parametrize("is_damaged", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_reordered_and_combined_tensors_are_read_back_from_the_written_files(
    tmp_path: Path, case: str, is_damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, config, names, name = CASES[case]
    hf = write_hf(tmp_path / "hf", tensors, config=config)
    ckptx.convert("to-dcp", hf, tmp_path / "dcp", names=names)
    (tmp_path / "made").mkdir()
    if not is_damaged:
        ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "made" / "out")
        assert (tmp_path / "made" / "out" / SINGLE).read_bytes() == (hf / SINGLE).read_bytes()
        return
    damage(monkeypatch, reordered_tensors, "check_reordered", name)
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "made" / "out")
    reason = caught.value if isinstance(caught.value, InputError) else caught.value.__context__
    assert "the bytes changed since they were converted" in str(reason)
    assert names_in(tmp_path / "made") == []


@pytest.mark.parametrize("kind", ["another dtype", "another order", "one tensor less"])
def test_a_recorded_header_that_contradicts_the_tensors_is_named(tmp_path: Path, kind: str) -> None:
    hf = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    text = (hf / SINGLE).read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    ckptx.convert("to-dcp", hf, tmp_path / "dcp")
    manifest = json.loads((tmp_path / "dcp" / "ckptx.json").read_text())
    if kind == "another dtype":
        header[GATE]["dtype"] = "F16"
    elif kind == "another order":
        up = GATE.replace("gate", "up")
        header[GATE], header[up] = header[up], header[GATE]
    else:
        del header["lm_head.weight"]
    manifest["origin"]["files"][0] = {"name": SINGLE, "header": json.dumps(header)}
    (tmp_path / "dcp" / "ckptx.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError) as caught:
        ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path / 'dcp' / 'ckptx.json'}: origin.files[0].header: ")
    assert not (tmp_path / "out").exists()


OFFSETS: dict[str, Any] = {"not integers": [0, 0.5], "no list": "0,0", "absent": None}


@pytest.mark.parametrize("kind", OFFSETS)
def test_offsets_of_a_shard_that_cannot_be_read_back_name_the_tensor(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    unchanged = to_sharded.check_sharded

    def apply(rows: dict[str, Any]) -> None:
        info = json.loads(rows["__metadata__"]["DCP_SHARDING_INFO"])
        info[EMBED]["saved_offsets"] = OFFSETS[kind]
        if OFFSETS[kind] is None:
            del info[EMBED]["saved_offsets"]
        rows["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)

    def damaged(tree: Any, catalog: Any) -> None:
        rewrite(local_path(tree.location) / catalog.tensors[EMBED].chunks[1].file, apply)
        unchanged(tree, catalog)

    monkeypatch.setattr(to_sharded, "check_sharded", damaged)
    with pytest.raises(CkptxError) as caught:
        ckptx.reshard(hf, tmp_path / "out", tp=2, to="safetensors")
    reason = caught.value if isinstance(caught.value, InputError) else caught.value.__context__
    assert f'"{EMBED}"' in str(reason)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [2, 3])
def test_the_files_of_an_output_in_hf_format_hold_the_tensors_of_their_index(tmp_path: Path, number: int) -> None:
    hf = write_hf(tmp_path / "hf", llama(), shards=number, config=CONFIG)
    ckptx.convert("to-dcp", hf, tmp_path / "dcp", names="model")
    ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == number
    for name in files:
        with safe_open(tmp_path / "out" / name, "np") as file, safe_open(hf / name, "np") as original:
            assert [*file.keys()] == [*original.keys()]


# State of parameters under other names


@pytest.mark.parametrize("command", ["to-dcp", "reshard"])
def test_state_of_parameters_that_are_combined_is_refused_or_dropped(tmp_path: Path, command: str) -> None:
    tensors = experts()
    state = {f"optimizer.state.{name}.exp_avg": value("F32", *each[1]) for name, each in tensors.items()}
    source = write_dcp(tmp_path / "dcp", {**tensors, **state}, config=MIXTRAL)

    def run(**options: Any) -> Any:
        if command == "to-dcp":
            return ckptx.convert("to-dcp", source, tmp_path / "out", names="model", **options)
        return ckptx.reshard(source, tmp_path / "out", to="dcp", tp=2, names="model", **options)

    with pytest.raises(UnsupportedError) as caught:
        run()
    assert str(caught.value) == (
        'optimizer state "optimizer.state.model.layers.0.block_sparse_moe.experts.0.w1.weight.exp_avg" belongs to a '
        "parameter that these names combine, split or reorder; leave out --names, or pass --optimizer drop"
    )
    report = run(optimizer="drop")
    assert report.dropped_optimizer == {"tensors": len(state), "bytes": 2 * sum(len(x[2]) for x in tensors.values())}


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_pattern_that_matches_no_tensor_is_refused(tmp_path: Path, others: int) -> None:
    source = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    patterns = ["no.such.module", *(f"other{number}" for number in range(others))]
    (tmp_path / "plan.json").write_text(json.dumps({"lm_head": "replicate", **dict.fromkeys(patterns, "colwise")}))
    with pytest.raises(UsageError) as caught:
        ckptx.reshard(source, tmp_path / "out", tp=2, tp_plan=tmp_path / "plan.json")
    more = f", nor do {others} more" if others else ""
    assert str(caught.value) == (
        f'--tp-plan: "no.such.module" matches no tensor{more}; patterns are names of the model\'s parameters or '
        "modules, with * for an index"
    )


@pytest.mark.parametrize("change", ["nothing", "weights", "tied head", "state", None])
def test_a_source_that_changes_during_the_run_is_refused(tmp_path: Path, change: str | None) -> None:
    """Its modification time is set back; a file with the same contents is no reason to fail."""
    tensors = llama()
    head = value("BF16", *tensors[EMBED][1], seed=0)
    assert head == tensors[EMBED]
    state = {f"optimizer.state.{GATE}.exp_avg": value("F32", *tensors[GATE][1], seed=5)}
    source = write_dcp(tmp_path / "dcp", {**tensors, HEAD: head, **state}, config=TIED)
    (tmp_path / "made").mkdir()
    file = source / "__0_0.distcp"
    data = file.read_bytes()
    contents = {"weights": tensors[GATE][2], "tied head": head[2], "state": next(iter(state.values()))[2]}

    def alter(done: int, total: int) -> None:
        if change is None:
            return
        status = file.stat()
        changed = bytearray(data)
        if change in contents:
            changed[data.rindex(contents[change])] ^= 1
        file.write_bytes(changed)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run() -> Any:
        return ckptx.reshard(source, tmp_path / "made" / "out", to="dcp", tp=2, on_progress=alter)

    if change not in contents:
        assert run().exit == 0
        return
    with pytest.raises(CkptxError):
        run()
    assert names_in(tmp_path / "made") == []
