"""The injected defects: each is injected, a few of each kind are found as the table says, and all of them at length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import defects as benchmark
from benchmarks.injected import models
from benchmarks.injected.defect import Defect
from benchmarks.injected.more_defects import RARE_DEFECTS
from benchmarks.injected.reference_defects import COMMON_DEFECTS
from tests.support.pool import GlooPool

Row = dict[str, Any]

BOTH = {"forward", "gradients"}
CONFIG = {"config"} | BOTH
# What is found at which levels, and None for what is the same after rounding.
SOME: list[tuple[str, str, set[str] | None]] = [
    ("llama | w: q_proj x(1+1e-3)", "float32", BOTH),
    ("llama | w: one element of v_proj x1.01", "bfloat16", BOTH),
    ("llama | w: down_proj x(1+1e-4)", "bfloat16", None),
    ("llama | c: rope theta x1.001", "bfloat16", CONFIG),
    ("llama | c: attention_dropout 0.1", "float32", set()),
    ("mistral4096 | c: sliding window 4096->64", "float32", {"config"}),
    ("llama b.02 | sum over ranks forgotten in row-parallel module 6", "float32", BOTH),
    ("llama b.02 | norm gradient doubled 3", "float32", {"gradients"}),
    ("qwen3 | norms of queries and keys trained on part of their gradient", "bfloat16", {"gradients"}),
    ("phi3 | w: [up, gate] in place of [gate, up]", "float32", BOTH),
    ("llama | FSDP2 sums gradients, dp_shard 2", "float32", {"gradients"}),
    ("llama | nothing", "float32", set()),
]
EVERY = {each.key: each for each in (*COMMON_DEFECTS, *RARE_DEFECTS, *benchmark.CLEAN)}


def pair_of(work: Path, key: str, dtype: str) -> benchmark.Pair:
    """Return the pair of models for a defect; the defects in `SOME` share the models that they are injected in."""
    pairs = benchmark.pairs_of(work, [EVERY[key] for key, _, _ in SOME], [dtype])
    return next(pair for pair in pairs if pair.defect.key == key)


def verify_on_rank(rank: int, world_size: int, work: str, key: str, dtype: str) -> Row:
    """One rank of one run."""
    return benchmark.verify_pair(pair_of(Path(work), key, dtype))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("injected")
    benchmark.write(pair_of(directory, key, dtype) for key, dtype, _ in SOME)
    return directory


def test_no_two_rows_are_one() -> None:
    assert len(COMMON_DEFECTS) == 142
    assert len(EVERY) == len(COMMON_DEFECTS) + len(RARE_DEFECTS) + len(benchmark.CLEAN)
    assert {each.kind for each in COMMON_DEFECTS} == {"w", "c", "w+c", "runtime"}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[models.Tensors, models.Config]]:
    """Every model that something is injected in on disk."""
    work = tmp_path_factory.mktemp("clean")
    names = {each.model for each in EVERY.values() if each.checkpoint_injection is not None}
    for name in names:
        models.write(name, torch.float32, work / name)
    return {name: models.read(work / name) for name in names}


@pytest.mark.parametrize(
    "defect", [each for each in EVERY.values() if each.checkpoint_injection], ids=lambda each: each.key
)
def test_a_defect_of_a_checkpoint_changes_it(
    clean: dict[str, tuple[models.Tensors, models.Config]], defect: Defect
) -> None:
    before, config = clean[defect.model]
    tensors, other = dict(before), json.loads(json.dumps(config))
    assert defect.checkpoint_injection is not None
    defect.checkpoint_injection(tensors, other)
    lost, new = before.keys() - tensors.keys(), tensors.keys() - before.keys()
    is_changed = any(not torch.equal(before[name], tensors[name]) for name in before.keys() & tensors.keys())
    assert (bool(lost or new) or is_changed, other != config) == ("w" in defect.kind, "c" in defect.kind)
    assert all(before[name].shape == tensors[name].shape for name in before.keys() & tensors.keys())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("key", "dtype", "levels"), SOME)
def test_a_defect_is_found_at_its_levels(
    pool: GlooPool, work: Path, key: str, dtype: str, levels: set[str] | None
) -> None:
    row, other = pool.run(verify_on_rank, 2, str(work), key, dtype)
    assert row == other
    assert (set(row["levels"]), row["identical"]) == (levels or set(), levels is None)
    assert benchmark.is_found(row) == bool(levels)
    assert row["exit"] == int(bool(levels))
    if not levels:
        assert row["logits"] < 0.5 and row["gradient"] < 0.5, "far from the limits that defects exceed"


# ----------------------------------------------------------------------------------------------------- the whole tables


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    """What the command writes."""
    directory = tmp_path_factory.mktemp("defects") / "results"
    command = [sys.executable, benchmark.__file__, "--results", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[Row]] = json.loads((directory / "defects.json").read_text())
    return found


def missed(rows: list[Row], dtype: str) -> list[str]:
    return [
        f"{row['model']} | {row['defect']}"
        for row in rows
        if row["dtype"] == dtype and not benchmark.is_found(row) and not row["identical"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", benchmark.DTYPES)
def test_all_known_defects_but_three_are_found(tables: dict[str, list[Row]], dtype: str) -> None:
    assert len(missed(tables["common"], dtype)) <= 3, missed(tables["common"], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", benchmark.DTYPES)
def test_of_what_is_missed_the_reason_is_known(tables: dict[str, list[Row]], dtype: str) -> None:
    rows = tables["common"] + tables["rare"]
    refused = {f"{row['model']} | {row['defect']}" for row in rows if row["error"] is not None}
    assert [key for key in missed(rows, dtype) if not EVERY[key].missed_reason and key not in refused] == []


@pytest.mark.slow
def test_what_is_found_by_far_has_no_reason_to_be_missed(tables: dict[str, list[Row]]) -> None:
    """A defect may have a reason and be found, if its effect is about as large as the tolerance."""
    rows = tables["common"] + tables["rare"]
    somewhere = {key for dtype in benchmark.DTYPES for key in missed(rows, dtype)}
    explained = {key for key, each in EVERY.items() if each.missed_reason}
    largest = {
        key: max(max(row["logits"], row["gradient"]) for row in rows if f"{row['model']} | {row['defect']}" == key)
        for key in explained - somewhere
    }
    assert somewhere <= explained
    assert {key: ratio for key, ratio in largest.items() if ratio > 2} == {}


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_injected(tables: dict[str, list[Row]]) -> None:
    assert [row for row in tables["clean"] if row["exit"]] == []
