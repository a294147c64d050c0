"""DeepSpeed checkpoints: positions of the elements of each parameter, and what is malformed or of another save."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.catalog.region import find_coverage_fault, flat_range_regions
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.registry import open_checkpoint
from tests.support.catalog_tensors import read_checkpoint, read_safetensors
from tests.support.forged_deepspeed import Checkpoint, bf16, numbers
from tests.support.forged_fsdp import FunctionCall, Name
from tests.support.memory_storage import MemoryPath

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "deepspeed"
MODEL = "mp_rank_00_model_states.pt"
SHAPES = ((5, 3), (7,), (), (2, 3, 4), (0, 4), (1,), (3, 3))
SYSTEM = FunctionCall(Name("posix", "mkdir"), ("was-executed",))


def optim(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_of(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def usual(stage: int = 2, **fields: Any) -> Checkpoint:
    groups = [numbers(*SHAPES), numbers((4,), (2, 2), seed=1, prefix="v")]
    frozen = numbers((3, 3), (2,), seed=2, prefix="frozen")
    buffers = numbers((3,), seed=3, prefix="buffer")
    return replace(Checkpoint(groups, 2, stage, frozen, buffers, {"tied": "w0"}), **fields)


def expected_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the checkpoint holds: dtype, shape and bytes by name."""
    found: dict[str, Any] = {}
    for name, values in {**checkpoint.frozen, **checkpoint.buffers}.items():
        found[name] = "BF16", values.shape, bf16(values)
    for name, values in checkpoint.parameters().items():
        stored = "F32", values.shape, values.tobytes()
        found[name] = stored if checkpoint.stage == 3 else ("BF16", values.shape, bf16(values))
        if not checkpoint.stage:
            continue
        state = f"optimizer.state.{name}"
        found[f"{state}.exp_avg"] = "F32", values.shape, (values * np.float32(2)).tobytes()
        found[f"{state}.exp_avg_sq"] = "F32", values.shape, (values * values).tobytes()
        found[f"{state}.step"] = "F32", (), np.float32(3).tobytes()
        if checkpoint.stage < 3:
            found[f"{state}.master_param"] = stored
    return found | {name: found[stored] for name, stored in checkpoint.shared.items()}


def test_names_that_begin_with_a_number_are_no_index(tmp_path: Path) -> None:
    """The parameters of a Sequential, `0.weight`, keep their optimizer state in a DCP."""
    checkpoint = Checkpoint([{"0.weight": np.ones((2, 3), np.float32), "0.bias": np.ones(2, np.float32)}], 2, 2)
    ckptx.convert("to-dcp", checkpoint.write(tmp_path / "source"), tmp_path / "dcp", base="none")
    assert read_checkpoint(tmp_path / "dcp") == expected_tensors(checkpoint)


# --------------------------------------------------------------------------------------------- positions of elements


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
@pytest.mark.parametrize(("stage", "padding"), [(0, 0), (1, 0), (2, 3), (3, 0)])
def test_every_tensor_is_read(stage: int, padding: int, ranks: int, tmp_path: Path) -> None:
    checkpoint = usual(stage, ranks=ranks, padding=padding)
    assert read_checkpoint(checkpoint.write(tmp_path)) == expected_tensors(checkpoint)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=200, deadline=None)
def test_a_flat_range_is_few_regions_in_order(sizes: list[int], data: st.DataObject) -> None:
    shape, count = tuple(sizes), prod(sizes)
    points = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    values = np.arange(count).reshape(shape)
    everything = []
    for begin, end in zip([0, *points], [*points, count], strict=True):
        regions = flat_range_regions(shape, begin, end)
        assert len(regions) <= max(2 * len(shape) - 1, 1)
        slices = [
            values[tuple(slice(at, at + size) for at, size in zip(*region, strict=True))].ravel() for region in regions
        ]
        assert np.concatenate([np.zeros(0), *slices]).tolist() == list(range(begin, end))
        everything += regions
    assert find_coverage_fault(shape, everything) is None


def test_checksums_of_all_flat_tensors_are_checked(tmp_path: Path) -> None:
    """Each flat tensor has a checksum, which one of its parameters has read."""
    for stage in (2, 3):
        checkpoint = usual(stage, ranks=3)
        root = checkpoint.write(tmp_path / f"{stage}")
        catalog = open_checkpoint(root)
        records = {
            (chunk.file, chunk.record) for entry in catalog.tensors.values() for chunk in entry.chunks if chunk.record
        }
        for rank in range(3):
            of_rank = [record for file, record in records if file == optim(rank) and record is not None]
            # The masters, two moments and the step of each group; the step of rank 0 alone is read. The last rank of
            # the second group in stages 1 and 2 has padding only.
            held = [group for group in checkpoint.groups if _holds(list(group.values()), rank, stage)]
            assert len(of_rank) == 3 * len(held) + (2 if rank == 0 else 0)


def _holds(values: list[Any], rank: int, stage: int) -> bool:
    if stage == 3:
        return any(rank * -(-each.size // 3) < each.size for each in values)
    count = sum(each.size for each in values)
    return rank * (-(-count // 6) * 2) < count


def test_a_damaged_byte_is_found(tmp_path: Path) -> None:
    root = usual(3).write(tmp_path / "src")
    data = bytearray((root / optim(1)).read_bytes())
    catalog = open_checkpoint(root)
    chunk = next(each for each in catalog.tensors["w3"].chunks if each.file == optim(1))
    data[chunk.offset] ^= 1
    (root / optim(1)).write_bytes(data)
    with pytest.raises(InputError, match="CRC-32"):
        ckptx.convert("to-hf", root, tmp_path / "out", base="none")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------- where it is


def test_it_is_found_by_latest_by_its_directory_and_by_a_file(tmp_path: Path) -> None:
    for step in (5, 10):
        usual(2, step={0: step, 1: step}).write(tmp_path / f"global_step{step}")
    (tmp_path / "latest").write_text("global_step10")
    catalog = open_checkpoint(tmp_path)
    assert catalog.format == "deepspeed" and sorted(catalog.files)[0] == f"global_step10/{optim(0)}"
    assert open_checkpoint(tmp_path / "global_step5").tensors.keys() == catalog.tensors.keys()
    assert set(open_checkpoint(tmp_path / "global_step5" / optim(0)).files) == {MODEL, optim(0), optim(1)}
    (tmp_path / "latest").write_text("global_step20")
    with pytest.raises(
        InputError, match='names the directory "global_step20", which does not exist; pass one of global_'
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(InputError, match="contains 2 checkpoints"):
        open_checkpoint(tmp_path)


def test_the_file_of_the_weights_is_read_alone(tmp_path: Path) -> None:
    root = usual().write(tmp_path)
    catalog = open_checkpoint(root / MODEL)
    assert set(catalog.files) == {MODEL} and not any(name.startswith("optimizer.") for name in catalog.tensors)
    assert any("optimizer state not read" in note for note in catalog.notes)


def test_merged_weights_come_first(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    usual().write(tmp_path / "global_step3")
    (tmp_path / "latest").write_text("global_step3")
    save_file({"w0": np.zeros((5, 3), np.float32)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).format == "huggingface"


def test_files_in_any_storage(tmp_path: Path) -> None:
    usual(3).write(tmp_path)
    place = MemoryPath("/step")
    for file in tmp_path.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    assert open_checkpoint(place).tensors == open_checkpoint(tmp_path).tensors


# ------------------------------------------------------------------------------------------------------------ outputs


@pytest.mark.parametrize("stage", [2, 3])
def test_a_dcp_keeps_the_optimizer_and_hf_files_drop_it(stage: int, tmp_path: Path) -> None:
    checkpoint = usual(stage)
    expected = expected_tensors(checkpoint)
    root = checkpoint.write(tmp_path / "src")
    ckptx.convert("to-dcp", root, tmp_path / "dcp", base="none")
    assert read_checkpoint(tmp_path / "dcp") == expected
    assert ckptx.verify(root, tmp_path / "dcp").exit == 0
    report = ckptx.convert("to-hf", root, tmp_path / "hf", base="none")
    model = {name: each for name, each in expected.items() if not name.startswith("optimizer.")}
    assert read_safetensors(tmp_path / "hf") == model
    assert (
        report.ledger["source"]
        == len(expected)
        == report.ledger["written"] + report.ledger["dropped"] + report.ledger["tied"]
    )
    assert any("optimizer settings are not read" in note for note in report.notes)


def test_other_values_are_noted(tmp_path: Path) -> None:
    values = {"lr_scheduler": {"last_epoch": 3}, "my_state": [1], "data_sampler": None}
    notes = open_checkpoint(usual(model_keys=values).write(tmp_path)).notes
    assert f"{MODEL}: not converted: lr_scheduler, my_state" in notes


def test_files_for_deepspeed_are_not_copied(tmp_path: Path) -> None:
    root = tmp_path / "src"
    usual().write(root / "global_step3")
    for name, text in {"latest": "global_step3", "zero_to_fp32.py": "", "tokenizer.json": "{}"}.items():
        (root / name).write_text(text)
    assert [sidecar.name for sidecar in open_checkpoint(root).sidecars] == ["tokenizer.json"]


# ---------------------------------------------------------------------------------------------------------- malformed


def writes(**fields: Any) -> Callable[[Path], None]:
    return lambda root: usual(**fields).write(root) and None


def then(change: Callable[[Path], Any], stage: int = 2, **fields: Any) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        usual(stage, **fields).write(root)
        change(root)

    return make


def other_rank(rank: int, stage: int = 2, **fields: Any) -> Callable[[Path], None]:
    """The file of one rank is of another save."""
    return then(lambda root: usual(stage, **fields).write_optimizer(root / optim(rank), rank), stage)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


OTHER = [numbers(*SHAPES, seed=9), numbers((4,), (2, 2), seed=1, prefix="v")]
REVERSED = [dict(reversed(numbers(*SHAPES).items())), OTHER[1]]
RENAMED = {f"x{index}": shape for index, shape in enumerate(SHAPES)}
LARGER = [numbers((50, 3), *SHAPES[1:]), numbers((4,), (2, 2), prefix="v")]

MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a rank between others without a file": (
        then(lambda root: (root / optim(0)).unlink()), r"1 of 2 \*_optim_states.pt files are missing, of ranks 0"
    ),
    "the last rank without a file": (then(lambda root: (root / optim(1)).unlink()), "optimizer states of 1 of 2 ranks"),
    "the optimizer states of rank 1 are those of rank 0": (
        then(lambda root: shutil.copy(root / optim(0), root / optim(1)), 3), "same elements as .* of rank 0"
    ),
    "the same in stage 2": (then(lambda root: shutil.copy(root / optim(0), root / optim(1))), "does not round to the"),
    "the model states of rank 1 are those of rank 0, with frozen parameters": (
        then(lambda root: shutil.copy(root / model_of(0), root / model_of(1)), 3), "same elements as .* of rank 0"
    ),
    "stage 3 without optimizer states": (
        then(lambda root: [(root / optim(rank)).unlink() for rank in (0, 1)], 3), "which have the parameters of stage 3"
    ),
    "no model states": (then(lambda root: (root / MODEL).unlink()), f"{MODEL} is missing"),
    "no model states of rank 0": (then(lambda root: (root / model_of(0)).unlink(), 3), f"{model_of(0)} is missing"),
    "no model states of rank 1, with frozen parameters": (
        then(lambda root: (root / model_of(1)).unlink(), 3), f"{model_of(1)} is missing"
    ),
    "files of two stages": (
        then(lambda root: usual(3).write(root)), f"has {MODEL} of stages 0 to 2 and {model_of(0)} of stage 3"
    ),
    "files of two dtypes": (
        then(lambda root: shutil.copy(root / optim(0), root / optim(0).removeprefix("bf16_"))), "are of different saves"
    ),
    "optimizer states of stage 3": (
        then(lambda root: [usual(3).write_optimizer(root / optim(rank), rank) for rank in (0, 1)]),
        "of stage 3, but",
    ),
    "a truncated file": (then(lambda root: truncate(root / optim(1))), r"optim_states.pt: "),
    "an empty file": (then(lambda root: (root / MODEL).write_bytes(b"")), "not a torch archive"),
    "another step on one rank": (writes(step={1: 4}), "its optimizer step differs from that in"),
    "other values on one rank": (other_rank(0, groups=OTHER), "does not round to the weight"),
    "parameters in another order": (
        then(lambda root: usual(groups=REVERSED).write_model(root / MODEL)),
        "does not round to the weight",
    ),
    "longer flat tensors": (
        then(lambda root: [usual(groups=LARGER).write_optimizer(root / optim(rank), rank) for rank in (0, 1)]),
        "the fp32 masters have",
    ),
    "a longer flat tensor of one rank": (other_rank(1, groups=LARGER), "the shapes of the parameters require"),
    "longer flat tensors in stage 3": (
        then(lambda root: [usual(3, groups=LARGER).write_optimizer(root / optim(rank), rank) for rank in (0, 1)], 3),
        "the shapes of the parameters require",
    ),
    "a group less": (
        other_rank(1, groups=OTHER[:1]), "has 1 group of masters"
    ),
    "no state on one rank": (other_rank(1, rank_keys={"base_optimizer_state": {}}), "exp_avg of group 0 is missing"),
    "paddings of fewer parameters": (
        writes(rank_keys={"param_alignment_paddings": [[0], [0, 0]]}), "are of 1 parameters, but param_shapes has 7"
    ),
    "a negative padding": (
        writes(rank_keys={"param_alignment_paddings": [[-1] * 7, [0, 0]]}), "a value that is not a number of elements"
    ),
    "a negative shape": (writes(model_keys={"param_shapes": [{"w0": (-1, 3)}]}), '"w0" has no valid shape'),
    "a shape of numbers beyond any": (
        writes(stage=3, model_keys={"param_shapes": [{"w0": (1 << 40, 1 << 40)}]}), '"w0" has a shape of more than'
    ),
    "shapes that are no list": (writes(model_keys={"param_shapes": 3}), "param_shapes is not a list"),
    "a parameter that module lacks": (
        writes(model_keys={"param_shapes": [RENAMED, {"v0": (4,), "v1": (2, 2)}]}), 'tensor "x0" is missing in module'
    ),
    "a parameter of another shape": (
        writes(model_keys={"param_shapes": [{"w0": (3, 5)}]}, groups=[numbers((5, 3))]), "has shape"
    ),
    "an empty tensor without a parameter": (
        writes(stage=3, shared={}, model_keys={"frozen_param_shapes": {}}), "is empty in module, and neither"
    ),
    "a partition count that is no number": (writes(rank_keys={"partition_count": ["2"]}), "partition_count is not"),
    "another stage": (writes(rank_keys={"zero_stage": 3}), "zero_stage is not 1 or 2"),
    "masters that are no tensors": (
        writes(rank_keys={"single_partition_of_fp32_groups": [1, 2]}), "fp32 masters: not a tensor"
    ),
}  # fmt: skip

UNSUPPORTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "tensor parallelism without rules": (
        then(lambda root: shutil.copy(root / MODEL, root / "mp_rank_01_model_states.pt"), 0),
        "tensor parallelism of 2 ranks without universal_checkpoint_info",
    ),
    "pipeline stages": (
        then(lambda root: (root / "layer_00-model_00-model_states.pt").write_bytes(b"")), "of pipeline stages"
    ),
    "a module in files of layers": (writes(model_keys={"module": None}), "has no module, so its layers"),
    "experts": (
        then(lambda root: (root / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(b"")),
        "of a mixture of experts",
    ),
    "experts of AutoEP in stage 3": (
        writes(stage=3, model_keys={"ds_autoep_layers": {"l": {"checkpoint_format": "zero3_partitioned"}}}), "AutoEP"
    ),
    "a group over fewer ranks": (writes(rank_keys={"partition_count": [2, 1]}), "partitioned over 1 of 2 ranks"),
    "MiCS": (writes(stage=3, rank_keys={"partition_count": 1}), "partitioned over 1 of 2 ranks"),
    "masters on NVMe": (writes(stage=3, rank_keys={"fp32_flat_groups": []}), "as with offload to NVMe"),
    "groups of an old DeepSpeed": (
        writes(stage=3, model_keys={"param_shapes": [{"w0": (5, 3)}]}), "as in an old DeepSpeed; run the zero_to_fp32"
    ),
    "another optimizer state": (
        writes(rank_keys={"single_partition_of_fp32_groups": ...}), "has neither single_partition_of_fp32_groups nor"
    ),
    "a file of torch before 1.6": (
        then(lambda root: (root / optim(0)).write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")), "before 1.6"
    ),
    "no dict": (writes(model_keys={"module": [1]}), "expected a dict of a DeepSpeed checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*MALFORMED, *UNSUPPORTED])
def test_what_is_not_read_is_refused(case: str, tmp_path: Path) -> None:
    make, message = MALFORMED.get(case) or UNSUPPORTED[case]
    root = tmp_path / "global_step3"
    make(root)
    with pytest.raises(CkptxError, match=message) as refused:
        ckptx.convert("to-dcp", root, tmp_path / "out", base="none")
    text = str(refused.value)
    assert type(refused.value) is (InputError if case in MALFORMED else UnsupportedError)
    assert "\n" not in text and text.startswith(str(root)) and "; " in text and len(text) < 600 + len(str(root))
    assert not (tmp_path / "out").exists()


def test_no_pickle_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer states have a list of classes; what a training script adds to the model states is inert."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"refers to posix.mkdir, which is not allowed .*nothing was executed"):
        open_checkpoint(usual(rank_keys={"x": SYSTEM}).write(tmp_path / "rank"))
    checkpoint = usual(model_keys={"x": SYSTEM, "y": FunctionCall(Name("a", "B"), (SYSTEM,))})
    assert read_checkpoint(checkpoint.write(tmp_path / "model")) == expected_tensors(checkpoint)
    assert not (tmp_path / "was-executed").exists()


# ---------------------------------------------------------------------------------------- what DeepSpeed itself wrote


@pytest.mark.parametrize("case", ["stage2", "stage3"])
def test_values_are_those_of_the_engine(case: str) -> None:
    """Three ranks, with uneven parts, frozen, tied and several groups."""
    found = read_checkpoint(FIXTURES / case)
    expected = read_safetensors(FIXTURES, f"{case}.safetensors")
    steps = {name for name in found if name.endswith(".step")}
    assert {name: each for name, each in found.items() if name not in steps} == expected
    assert {np.frombuffer(found[name][2], np.float32).item() for name in steps} == {3}


def test_stock_torch_loads_the_optimizer_state(tmp_path: Path) -> None:
    """A DCP has no settings of the optimizer, so that a load of its whole state must be partial."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load

    name = "layers.0.weight"
    for case in ("stage2", "stage3"):
        found = read_checkpoint(FIXTURES / case)
        ckptx.convert("to-dcp", FIXTURES / case, tmp_path / case, base="none")
        moments = {key: torch.full((6, 6), float("nan")) for key in ("exp_avg", "exp_avg_sq")}
        state = {
            "state": {name: {"step": torch.tensor(0.0), **moments}},
            "param_groups": [{"lr": 0.5, "params": [name]}],
        }
        load(
            {"optimizer": state},
            storage_reader=FileSystemReader(tmp_path / case),
            planner=DefaultLoadPlanner(allow_partial_load=True),
            no_dist=True,
        )
        assert state["state"][name]["step"].item() == 3
        for key, tensor in moments.items():
            assert tensor.numpy().tobytes() == found[f"optimizer.state.{name}.{key}"][2]


def test_inspect_lists_a_few_names_of_a_shared_step() -> None:
    from ckptx.report.text import inspect_text

    text = inspect_text(ckptx.inspect(FIXTURES / "stage3"))
    assert "format        DeepSpeed ZeRO, 6 files" in text
    assert any(line.strip().startswith("alias") and line.endswith("more") for line in text.splitlines())
