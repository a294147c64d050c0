"""`ckptx reshard` on the command line: reports, plans of the user, refusals with their exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from ckptx.cli.main import cli
from tests.support.checkpoint_writers import LLAMA, Value, llama, names_in, value, write_dcp, write_hf
from tests.support.runner import CliRunner

CONFIG = {
    **LLAMA, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 8,
    "intermediate_size": 24, "vocab_size": 16,
}  # fmt: skip


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "in" / "hf", llama(), shards=2, config=CONFIG)


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "cut"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["reshard", *map(str, arguments)], standalone_mode=False)


def report_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.return_value == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def refused(dst: Path, code: int, said: str, *arguments: object) -> None:
    """The exit code, one line that says it, and nothing left."""
    result = run(*arguments)
    assert (result.return_value, result.stderr.count("\n")) == (code, 1), result.stderr
    assert said in result.stderr
    assert names_in(dst.parent) == []


# Reports


def test_a_report_says_layout_rules_and_ranks(hf: Path, dst: Path) -> None:
    report = report_of(hf, dst, "--to", "dcp", "--tp", 2, "--pp", 2, "--dp-shard", 2)
    assert report["layout"] == {
        "tp": 2, "pp": 2, "dp_shard": 2, "stages": [[["model.layers", 0, 1]], [["model.layers", 1, 2]]],
    }  # fmt: skip
    rules = {row["pattern"]: row | {"rule": row["rule"].partition(" (")[0]} for row in report["rules"]}
    assert rules["model.layers.*.self_attn.o_proj.weight"] == {
        "pattern": "model.layers.*.self_attn.o_proj.weight", "tensors": 2, "dim": 1, "groups": None,
        "rule": "model plan", "reason": "rowwise shards dim 1", "aligned": True,
    }  # fmt: skip
    assert (rules["model.norm.weight"]["dim"], rules["model.norm.weight"]["rule"]) == (None, "default")
    assert sum(row["tensors"] for row in report["rules"]) == report["tensors"] == len(llama())
    assert [(row["rank"], row["stage"], row["dp"], row["tp"]) for row in report["ranks"]] == [
        (rank, rank // 4, rank // 2 % 2, rank % 2) for rank in range(8)
    ]
    assert {file for row in report["ranks"] for file in row["files"]} == {f"__{rank}_0.distcp" for rank in range(8)}
    for row in report["ranks"]:
        assert row["bytes"] == sum((dst / file).stat().st_size for file in row["files"])
    assert report["chunks"] == sum(len(blocks) for blocks in blocks_in_manifest(dst))


def blocks_in_manifest(root: Path) -> list[list[int]]:
    """By tensor, the files of its blocks, as the manifest lists them."""
    manifest = json.loads((root / "ckptx.json").read_text())
    cuts = manifest["cuts"]
    return [cuts[row["cut"]]["files"] if "cut" in row else [row["file"]] for row in manifest["tensors"].values()]


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_dry_run_says_the_same_and_writes_nothing(hf: Path, dst: Path, to: str) -> None:
    arguments = (hf, dst, "--to", to, "--tp", 2, "--pp", 2)
    planned = report_of(*arguments, "--dry-run")
    assert names_in(dst.parent) == []
    done = report_of(*arguments)
    for key in ("layout", "rules", "ranks", "chunks", "tensors", "bytes_written", "aliases"):
        assert planned[key] == done[key], key
    assert {row["name"]: row["bytes"] for row in planned["files"]} == {
        path.name: path.stat().st_size for path in dst.iterdir()
    }


def test_what_a_person_reads(hf: Path, dst: Path) -> None:
    result = run(hf, dst, "--tp", 2, "--pp", 2)
    assert result.return_value == 0
    assert result.stdout.startswith("wrote 21 tensors")
    assert "LlamaForCausalLM" in result.stdout


def test_the_family_of_the_source_decides_unless_told(hf: Path, dst: Path) -> None:
    report_of(hf, dst)
    assert names_in(dst) == ["ckptx.json", "config.json", "shard-00001-model-00001-of-00001.safetensors"]
    report_of(hf, dst.with_name("dcp"), "--to", "dcp")
    report_of(dst.with_name("dcp"), dst.with_name("again"), "--tp", 2)
    assert names_in(dst.with_name("again")) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "ckptx.json",
        "config.json",
    ]


def test_heads_that_do_not_divide_are_a_note(hf: Path, dst: Path) -> None:
    result = run(hf, dst, "--tp", 3)
    assert result.return_value == 0
    assert "note: not aligned: --tp 3 splits heads, key/value groups or fused parts" in result.stderr
    assert 'of 8 tensors ("model.layers.0.self_attn.q_proj.weight", ...)' in result.stderr


# Plans of the user


def plan(tmp_path: Path, rules: object) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(rules))
    return path


def test_a_rule_of_the_user_goes_first(tmp_path: Path, hf: Path, dst: Path) -> None:
    rules = {"model.layers.*.mlp.up_proj": "rowwise", "model.layers.1.mlp.down_proj": "replicate", "lm_head": "colwise"}
    report = report_of(hf, dst, "--tp", 2, "--tp-plan", plan(tmp_path, rules))
    found = {row["pattern"]: [] for row in report["rules"]}
    for row in report["rules"]:
        found[row["pattern"]].append((row["rule"].partition(" (")[0], row["dim"], row["tensors"]))
    assert found["model.layers.*.mlp.up_proj.weight"] == [("user plan", 1, 2)]
    assert found["model.layers.*.mlp.down_proj.weight"] == [("model plan", 1, 1), ("user plan", None, 1)]
    assert found["lm_head.weight"] == [("user plan", 0, 1)]
    assert found["model.layers.*.mlp.gate_proj.weight"] == [("model plan", 0, 2)]
    manifest = json.loads((dst / "ckptx.json").read_text())
    cut = manifest["cuts"][manifest["tensors"]["model.layers.0.mlp.up_proj.weight"]["cut"]]
    assert (cut["offsets"], cut["sizes"]) == ([[0, 0], [0, 4]], [[24, 4], [24, 4]])


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"model.layers.*.mlp.up": "colwise"}, '"model.layers.*.mlp.up" matches no tensor'),
        ({"model.layers.7.mlp.up_proj": "colwise"}, '"model.layers.7.mlp.up_proj" matches no tensor'),
        ({"model.layers.*.mlp.up_proj": "columnwise"}, "unknown style 'columnwise'"),
        ({"model.layers.*.mlp.up_*": "colwise"}, "invalid pattern 'model.layers.*.mlp.up_*'"),
        (["colwise"], 'expected a JSON object such as {"model.layers.*.self_attn.q_proj": "colwise"}, found list'),
    ],
)
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_plan_that_cannot_be_followed_is_usage(
    tmp_path: Path, hf: Path, dst: Path, to: str, rules: object, said: str
) -> None:
    refused(dst, 2, said, hf, dst, "--to", to, "--tp", 2, "--tp-plan", plan(tmp_path, rules))


def test_a_plan_that_is_not_there_or_no_json_is_usage(tmp_path: Path, hf: Path, dst: Path) -> None:
    refused(dst, 2, "cannot be read", hf, dst, "--tp", 2, "--tp-plan", tmp_path / "gone")
    (tmp_path / "text").write_text("q_proj: colwise")
    refused(dst, 2, "not JSON", hf, dst, "--tp", 2, "--tp-plan", tmp_path / "text")


# Refusals


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--pp", "3"], 2, "2 layers for 3 stages, but each stage requires a layer"),
        (
            ["--pp", "2", "--pp-split", "1,2"],
            2,
            "expected 2 stages with 2 layers, none below 0, found 2 stages with 3 layers",
        ),
        (["--pp", "2", "--pp-split", "balanced"], 2, "must be one of even, vllm, torchtitan, hf"),
        (["--tp", "0"], 2, "--tp"),
        (["--to", "gguf"], 2, "--to"),
        (["--to", "safetensors", "--tied", "alias"], 2, "--tied alias"),
        (["--to", "safetensors", "--files", "2"], 2, "--files"),
    ],
)
def test_what_cannot_be_asked_for(hf: Path, dst: Path, options: list[str], code: int, said: str) -> None:
    refused(dst, code, said, hf, dst, *options)


@pytest.mark.slow  # transformers is asked for the class
def test_stages_of_a_class_that_nobody_knows(tmp_path: Path, dst: Path) -> None:
    config = {**CONFIG, "architectures": ["SomebodysForCausalLM"], "model_type": "somebodys"}
    unknown = write_hf(tmp_path / "in" / "unknown", llama(), config=config)
    refused(dst, 4, "cannot find the layer list", unknown, dst, "--pp", 2)
    report = report_of(unknown, dst, "--tp", 2)
    assert {row["rule"] for row in report["rules"]} == {"default"}


def test_states_by_index_are_unsupported(hf: Path, tmp_path: Path, dst: Path) -> None:
    tensors: dict[str, Value] = {f"model.{name}": tensor for name, tensor in llama().items()}
    tensors |= {"optimizer.state.0.exp_avg": value("F32", 16, 8)}
    saved = write_dcp(tmp_path / "in" / "saved", tensors)
    arguments = (saved, dst, "--base", hf, "--tp", 2)
    refused(dst, 4, 'optimizer state "optimizer.state.0.exp_avg" is keyed by the index', *arguments)
    assert run(*arguments, "--optimizer", "drop").return_value == 0


# Sharded safetensors that are not what they were


def shard(rank: int, number: int = 1, count: int = 1) -> str:
    return f"shard-{rank + 1:05d}-model-{number:05d}-of-{count:05d}.safetensors"


def lose_a_middle_shard(root: Path) -> None:
    (root / shard(1)).unlink()


def lose_the_last_stage(root: Path) -> None:
    for rank in (4, 5, 6, 7):
        (root / shard(rank)).unlink()


def duplicate_a_shard(root: Path) -> None:
    shutil.copy(root / shard(1), root / shard(8))


def change_a_replica(root: Path) -> None:
    """A byte of a norm in the file of the second rank."""
    path = root / shard(1)
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    row = json.loads(data[8 : 8 + size])["model.layers.0.input_layernorm.weight"]
    data[8 + size + row["data_offsets"][0]] ^= 1
    path.write_bytes(data)


def shift_an_offset(root: Path) -> None:
    """The second rank says that its rows begin one earlier."""
    path = root / shard(1)
    data = path.read_bytes()
    wanted = b'model.embed_tokens.weight\\": {\\"saved_offsets\\": [4, 0]'
    assert data.count(wanted) == 1
    path.write_bytes(data.replace(wanted, wanted.replace(b"[4, 0]", b"[3, 0]")))


def truncate_a_shard(root: Path) -> None:
    path = root / shard(2)
    path.write_bytes(path.read_bytes()[:-1])


_EMBEDDING = 'tensor "model.embed_tokens.weight" of shape [16, 8]'
FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (lose_a_middle_shard, f"{_EMBEDDING}: no shard covers [4:8, 0:8]; missing {shard(1)}"),
    (
        lose_the_last_stage,
        'does not match its config: "model.layers.1": expected one of 2 layers by config.json, found nothing',
    ),
    (duplicate_a_shard, f"duplicated shard: {shard(1)} and {shard(8)} both contain"),
    (
        change_a_replica,
        f'tensor "model.layers.0.input_layernorm.weight": {shard(1)} and {shard(0)} have different bytes',
    ),
    (shift_an_offset, f"{_EMBEDDING}: {shard(0)} and {shard(1)} both cover"),
    (truncate_a_shard, shard(2)),
]


@pytest.mark.parametrize(("damage", "said"), FAULTS, ids=[damage.__name__ for damage, _ in FAULTS])
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_damaged_shards_are_refused_by_name(
    tmp_path: Path, dst: Path, damage: Callable[[Path], None], said: str, to: str
) -> None:
    """Files of torch or transformers, which have no manifest."""
    tied = write_hf(tmp_path / "in" / "tied", llama(head=False), config={**CONFIG, "tie_word_embeddings": True})
    source = tmp_path / "in" / "shards"
    report_of(tied, source, "--tp", 4, "--pp", 2)
    (source / "ckptx.json").unlink()
    assert run(source, tmp_path / "intact", "--to", to).return_value == 0
    damage(source)
    refused(dst, 3, said, source, dst, "--to", to)


def test_shards_without_the_last_stage_can_be_taken_as_they_are(hf: Path, tmp_path: Path, dst: Path) -> None:
    source = tmp_path / "in" / "shards"
    report_of(hf, source, "--tp", 4, "--pp", 2)
    (source / "ckptx.json").unlink()
    lose_the_last_stage(source)
    looked = CliRunner().invoke(cli, ["inspect", str(source)], standalone_mode=False)
    assert (
        not looked.return_value
        and 'does not match its config: "model.layers.1": expected one of 2 layers by config.json, found nothing'
        in looked.stderr
    )
    report = report_of(source, dst, "--allow-config-mismatch")
    assert {row["name"].split(".")[2] for row in report["config_check"]["mismatches"] if "layers" in row["name"]} == {
        "1"
    }


@pytest.mark.parametrize(("damage", "said"), FAULTS, ids=[damage.__name__ for damage, _ in FAULTS])
def test_damaged_shards_with_a_manifest_are_refused(
    hf: Path, tmp_path: Path, dst: Path, damage: Callable[[Path], None], said: str
) -> None:
    source = tmp_path / "in" / "shards"
    report_of(hf, source, "--tp", 4, "--pp", 2)
    damage(source)
    result = run(source, dst)
    assert result.return_value == 3
    assert names_in(dst.parent) == []


def test_the_bytes_of_every_rank(hf: Path, dst: Path) -> None:
    """Against numpy, as files are read without any of our code."""
    report_of(hf, dst, "--tp", 2, "--pp", 2)
    tensors = llama()
    for rank in range(4):
        data = (dst / shard(rank)).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        for name, row in header.items():
            _, shape, whole = tensors[name]
            spans = tuple(slice(a, a + n) for a, n in zip(offsets[name]["saved_offsets"], row["shape"], strict=True))
            expected = np.frombuffer(whole, "u2").reshape(shape)[spans].tobytes()
            begin, end = row["data_offsets"]
            assert data[8 + size + begin : 8 + size + end] == expected, (rank, name)
