"""Numbers that add up: tensors, parameters, written, aliases, copies and dropped, over commands, forms and ties.

The forms of a checkpoint are made from one another in chains; what is expected is counted by hand from the tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.report.documents.conversion import ConversionReport
from tests.support.checkpoint_writers import LLAMA, Value, llama, tree_bytes, value, write_dcp, write_hf

CONFIG = LLAMA | {
    "hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "vocab_size": 16,
}  # fmt: skip
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIES = ("tied", "both", "untied", "equal-undeclared", "different")


class Source(NamedTuple):
    """A model on disk: its tensors, its config, and how many parameters it has."""

    tensors: dict[str, Value]
    config: dict[str, Any]
    parameters: int


def source(ties: str) -> Source:
    """A Llama whose head is tied, there twice, or a tensor of its own, whatever the config says."""
    tensors = llama()
    declared = ties in ("tied", "both", "different")
    if ties == "tied":
        del tensors[HEAD]
    elif ties in ("both", "equal-undeclared"):
        tensors[HEAD] = tensors[EMBEDDING]
    distinct = dict(tensors)
    if ties == "both":
        del distinct[HEAD]
    parameters = sum(prod(shape) for _, shape, _ in distinct.values())
    return Source(tensors, CONFIG | {"tie_word_embeddings": declared}, parameters)


STEPS: dict[str, Any] = {
    "dcp": lambda src, dst, **more: ckptx.convert("hf2dcp", src, dst, **more),
    "dcp files 3": lambda src, dst, **more: ckptx.convert("hf2dcp", src, dst, files=3, **more),
    "dcp tp2 pp2": lambda src, dst, **more: ckptx.reshard(src, dst, tp=2, pp=2, to="dcp", **more),
    "dcp dp2 pp2": lambda src, dst, **more: ckptx.reshard(src, dst, dp_shard=2, pp=2, to="dcp", **more),
    "sharded tp2": lambda src, dst, **more: ckptx.reshard(src, dst, tp=2, to="safetensors", **more),
    "sharded pp2": lambda src, dst, **more: ckptx.reshard(src, dst, pp=2, to="safetensors", **more),
    "hf": lambda src, dst, **more: ckptx.convert("dcp2hf", src, dst, **more),
}
FROM = {"hf": [name for name in STEPS if name != "hf"]} | {
    name: [each for each in STEPS if not each.startswith("dcp") or "tp2" in each or "dp2" in each]
    for name in STEPS
    if name != "hf"
}


def chains() -> st.SearchStrategy[list[str]]:
    """Conversions one after the other, from an HF checkpoint."""

    def go_on(chain: list[str]) -> st.SearchStrategy[list[str]]:
        return st.sampled_from(FROM[chain[-1]]).map(lambda step: [*chain, step])

    first = st.just(["hf"]).flatmap(go_on)
    return st.one_of(first, first.flatmap(go_on), first.flatmap(go_on).flatmap(go_on))


def agree(src: Path, dst: Path, report: ConversionReport, parameters: int) -> None:
    """The equations of docs/report.md, for one conversion."""
    before, after = ckptx.inspect(src), ckptx.inspect(dst)
    ledger = report.ledger
    target = ledger["target"]
    assert ledger["source"] == before.tensors
    assert ledger["source"] == ledger["written"] + ledger["tied"] + ledger["decoded"] + ledger["dropped"]
    assert ledger["dropped"] == len(report.dropped)
    assert report.tensors == target["tensors"] == after.tensors
    assert target["tensors"] == target["stored"] + target["copies"] + target["aliases"]
    assert target["aliases"] == len(report.aliases)
    assert report.aliases == after.aliases
    assert sum(report.dtypes["after"].values()) == report.tensors == sum(after.dtypes["before"].values())
    verified, compared = ckptx.verify(src, dst), ckptx.diff(src, dst)
    assert verified.ok and compared.ok
    assert verified.tensors == compared.tensors == before.tensors
    counts = [each.parameters for each in (before, report, after, verified, compared)]
    assert counts == [parameters] * 5
    assert report.bytes_written == sum(map(len, tree_bytes(dst).values()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ties", TIES)
@given(chain=chains(), data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_numbers_add_up_over_every_form(
    tmp_path_factory: pytest.TempPathFactory, ties: str, chain: list[str], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("chain")
    made = source(ties)
    shards = data.draw(st.sampled_from([1, 3]))
    src = write_hf(root / "0", made.tensors, shards=shards, config=made.config)
    for at, step in enumerate(chain[1:], start=1):
        dst = root / str(at)
        planned = STEPS[step](src, dst, dry_run=True)
        report = STEPS[step](src, dst)
        agree(src, dst, report, made.parameters)
        assert planned.bytes_written == report.bytes_written == sum(row["bytes"] for row in planned.files)
        assert {row["name"] for row in planned.files} == tree_bytes(dst).keys()
        for name in ("tensors", "aliases", "dtypes"):
            assert getattr(planned, name) == getattr(report, name)
        assert planned.ledger == report.ledger
        src = dst


@pytest.mark.parametrize("optimizer", [None, "drop"])
@pytest.mark.parametrize("step", ["dcp tp2 pp2", "dcp dp2 pp2", "sharded tp2", "hf"])
@pytest.mark.parametrize("ties", ["tied", "untied"])
def test_training_state_is_no_parameter(tmp_path: Path, ties: str, step: str, optimizer: str | None) -> None:
    made = source(ties)
    moments = {f"optimizer.state.{name}.exp_avg": each for name, each in made.tensors.items()}
    counter = {"train_state.step": value("I64", 1)}
    src = write_dcp(tmp_path / "src", made.tensors | moments | counter, config=made.config)
    options = {} if optimizer is None else {"optimizer": optimizer}
    report = STEPS[step](src, tmp_path / "dst", **options)
    before, after = ckptx.inspect(src), ckptx.inspect(tmp_path / "dst")
    ledger = report.ledger
    kept = step.startswith("dcp") and optimizer is None
    assert before.tensors == ledger["source"] == len(made.tensors) + len(moments) + 1
    assert ledger["dropped"] == len(report.dropped) == (0 if kept else len(moments) + 1)
    assert ledger["source"] == ledger["written"] + ledger["tied"] + ledger["decoded"] + ledger["dropped"]
    assert report.tensors == after.tensors == ledger["target"]["tensors"]
    verified = ckptx.verify(src, tmp_path / "dst")
    for each in (before, report, after, verified):
        assert each.parameters == made.parameters


def test_names_declared_tied_are_believed_where_their_bytes_cannot_be_read(tmp_path: Path) -> None:
    made = source("both")
    src = write_dcp(tmp_path / "src", made.tensors, config=made.config, payloads={HEAD: b"not an archive"})
    assert ckptx.inspect(src).parameters == made.parameters


@pytest.mark.parametrize("row", range(4))
def test_rows_that_differ_make_two_tensors(tmp_path: Path, row: int) -> None:
    """The first rows, some in the middle and the last are looked at: for a small tensor, all."""
    tensors = llama(vocab=4)
    _, shape, data = tensors[EMBEDDING]
    other = bytearray(data)
    other[row * len(data) // 4] ^= 1
    tensors[HEAD] = ("BF16", shape, bytes(other))
    config = CONFIG | {"tie_word_embeddings": True, "vocab_size": 4}
    report = ckptx.inspect(write_hf(tmp_path / "hf", tensors, config=config))
    assert report.tied_groups == []
    assert report.parameters == sum(prod(each[1]) for each in tensors.values())


# -------------------------------------------------------------------------------------------- memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is of Linux")
def test_peak_memory_is_that_of_this_program(tmp_path: Path) -> None:
    """What the process took before it became ckptx is not counted."""
    hf = write_hf(tmp_path / "hf", llama())
    program = (
        "import os, sys; taken = bytearray(b'x') * (300 << 20); "
        "os.execv(sys.executable, [sys.executable, '-m', 'ckptx', 'inspect', sys.argv[1], '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(hf)], capture_output=True, text=True, env=os.environ)
    assert 5 << 20 < json.loads(done.stdout)["peak_rss"] < 200 << 20


def test_peak_memory_grows_with_what_is_taken() -> None:
    program = (
        "from ckptx.report.report import peak_memory; before = peak_memory(); taken = bytearray(b'x') * (100 << 20); "
        "print(peak_memory() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) > 90 << 20
