"""DeepSpeed checkpoints of several tensor parallel ranks: the shards of every rule, and what does not fit together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptx
from ckptx.catalog.region import find_coverage_fault
from ckptx.errors import CkptxError, InputError, UnsupportedError
from ckptx.formats.registry import open_checkpoint
from tests.formats.test_deepspeed import expected_tensors
from tests.support.catalog_tensors import read_checkpoint, read_safetensors
from tests.support.forged_deepspeed import Checkpoint, Rule, TensorParallelCheckpoint, Values, numbers
from tests.support.forged_fsdp import FunctionCall, Name

SYSTEM = FunctionCall(Name("posix", "mkdir"), ("was-executed",))
MODEL_1, OPTIM = "mp_rank_01_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_0{}_optim_states.pt"
UNEVEN = {2: (3, 2), 4: (2, 1, 2, 0)}


def values_of(seed: int, **shapes: tuple[int, ...]) -> Values:
    return dict(zip(shapes, numbers(*shapes.values(), seed=seed).values(), strict=True))


def usual(stage: int = 2, size: int = 2, ranks: int = 2, **fields: Any) -> TensorParallelCheckpoint:
    """Return a checkpoint with a tensor of each rule; the uneven ones shift the others in the flat tensors."""
    first = values_of(
        0, embed=(12, 3), uneven=(5, 3), norm=(7,), q=(8, 3), o=(3, 8), gate_up=(16, 3), qkv=(18, 3), columns=(2, 12),
        scalar=(), empty=(0, 4),
    )  # fmt: skip
    second = values_of(1, bias=(8,), dense_bias=(6,), table=(3, 5))
    frozen, buffers = values_of(2, frozen_q=(4, 3), frozen_norm=(2,)), values_of(3, inverse=(3,))
    keys = ({2: (5, 3), 4: (2, 2, 2, 2)}, {2: (3, 2), 4: (1, 1, 2, 1)}, {2: (0, 5), 4: (5, 0, 0, 0)})
    rules = {
        "embed": Rule("column", rows=10),
        "uneven": Rule("column", (UNEVEN[size],)),
        "norm": Rule("replicated"),
        "q": Rule("column"),
        "o": Rule("row"),
        "gate_up": Rule("two parts"),
        "qkv": Rule("parts", tuple(each[size] for each in keys), 0, ((8, 5, 5), -1)),
        "columns": Rule("parts", (((2, 2), (1, 1), (3, 3)) if size == 2 else ((1,) * 4, (1,) * 4, (1,) * 4)), 1),
        "scalar": Rule("replicated"),
        "empty": Rule("column"),
        "bias": Rule("column"),
        "dense_bias": Rule("averaged"),
        "table": Rule("replicated"),
        "frozen_q": Rule("column"),
        "frozen_norm": Rule("replicated"),
    }
    rules["columns"].spec = (-1, tuple(map(sum, rules["columns"].widths)))
    whole = Checkpoint([first, second], ranks, stage, frozen, buffers, {"tied": "q"})
    return replace(TensorParallelCheckpoint(whole, size, rules), **fields)


def expected(checkpoint: TensorParallelCheckpoint) -> dict[str, Any]:
    """Return what the checkpoint holds: dtype, shape and bytes of the whole tensors by name."""
    whole = checkpoint.whole
    return expected_tensors(replace(whole, groups=[checkpoint.unpadded(group) for group in whole.groups]))


def model_of(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in tensors.items() if not name.startswith("optimizer.")}


# ------------------------------------------------------------------------------------------------------------ tensors


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("stage", "padding"), [(0, 0), (1, 0), (2, 3), (3, 0)])
def test_every_tensor_is_joined(stage: int, padding: int, ranks: int, size: int, tmp_path: Path) -> None:
    checkpoint = usual(stage, size, ranks)
    checkpoint.whole.padding = padding
    root = checkpoint.write(tmp_path)
    assert read_checkpoint(root) == expected(checkpoint)
    for entry in open_checkpoint(root).tensors.values():
        assert find_coverage_fault(entry.shape, [chunk.region for chunk in entry.chunks]) is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_outputs_have_whole_tensors(stage: int, size: int, ranks: int, tmp_path: Path) -> None:
    checkpoint = usual(stage, size, ranks)
    root, values = checkpoint.write(tmp_path / "src"), expected(checkpoint)
    ckptx.convert("to-dcp", root, tmp_path / "dcp", base="none")
    assert read_checkpoint(tmp_path / "dcp") == values
    assert ckptx.verify(root, tmp_path / "dcp").exit == 0
    ckptx.convert("to-hf", root, tmp_path / "hf", base="none")
    assert read_safetensors(tmp_path / "hf") == model_of(values)
    if stage in (1, 2):
        ckptx.convert("to-hf", root, tmp_path / "masters", base="none", weights="masters")
        found = read_safetensors(tmp_path / "masters")
        for name in checkpoint.whole.parameters():
            assert found[name] == values[f"optimizer.state.{name}.master_param"]
        assert found["frozen_q"] == values["frozen_q"] and found["tied"] == found["q"]


def test_the_catalog_has_positions_in_the_files_of_all_ranks(tmp_path: Path) -> None:
    """Nothing is copied: a row-parallel weight is two regions, and a replicated one has a replica."""
    catalog = open_checkpoint(usual(ranks=1).write(tmp_path))
    weight = catalog.tensors["o"]
    assert [(chunk.region.offsets, chunk.region.sizes, chunk.file) for chunk in weight.chunks] == [
        ((0, 0), (3, 4), "mp_rank_00_model_states.pt"), ((0, 4), (3, 4), "mp_rank_01_model_states.pt"),
    ]  # fmt: skip
    norm = catalog.tensors["norm"]
    assert [chunk.file for chunk in (*norm.chunks, *norm.replicas)] == [
        "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt",
    ]  # fmt: skip
    assert len(catalog.files) == 4 and catalog.files.keys() == catalog.identities.keys()
    assert 'vocabulary padding not read: up to 2 rows of "embed"' in catalog.notes
    assert not any("universal_checkpoint_info" in note for note in catalog.notes)
    part = catalog.tensors["columns"].chunks
    assert part[0] == next(iter(part)) and part[-1] == tuple(part)[-1] and len(part) == len(tuple(part)) == 6


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_universal_checkpoints_have_whole_tensors(size: int, stage: int, tmp_path: Path) -> None:
    checkpoint = usual(stage, size)
    root = checkpoint.write_universal(tmp_path / "src")
    values = {name: each for name, each in expected(checkpoint).items() if stage < 3 or not name.endswith(".step")}
    assert read_checkpoint(root) == values
    ckptx.convert("to-dcp", root, tmp_path / "dcp", base="none")
    assert read_checkpoint(tmp_path / "dcp") == values


@pytest.mark.parametrize("index", [(0, 0), (0, 4), (2, 3), (2, 7)])
def test_universal_masters_are_compared_with_each_shard(index: tuple[int, int], tmp_path: Path) -> None:
    """Samples are the first and the last elements of the shard of each rank."""
    checkpoint = usual()
    root = checkpoint.write_universal(tmp_path)
    values = checkpoint.whole.groups[0]["o"].copy()
    values[index] += 1
    checkpoint.whole.write_parameter(root / "zero/o/fp32.pt", values)
    with pytest.raises(InputError, match='master of "o" does not round to the weight in'):
        open_checkpoint(root)


def test_the_weights_of_all_ranks_are_read_alone(tmp_path: Path) -> None:
    checkpoint = usual(2, 4)
    root = checkpoint.write(tmp_path)
    (tmp_path / "latest").write_text("not a step")
    for rank in (0, 3):
        catalog = open_checkpoint(root / f"mp_rank_{rank:02d}_model_states.pt")
        assert sorted(catalog.files) == [f"mp_rank_{each:02d}_model_states.pt" for each in range(4)]
        assert catalog.tensors.keys() == model_of(expected(checkpoint)).keys()
        assert any("optimizer state not read" in note for note in catalog.notes)


def test_the_step_that_latest_names_is_read(tmp_path: Path) -> None:
    checkpoint = usual(2)
    checkpoint.write(tmp_path / "global_step3")
    (tmp_path / "latest").write_text("global_step3")
    assert read_checkpoint(tmp_path) == expected(checkpoint)


def test_a_tied_name_has_the_rule_of_its_parameter(tmp_path: Path) -> None:
    """Stage 0 does not record ties, but both names have the same bytes in the file of each rank."""
    checkpoint = usual(0)
    checkpoint.whole.shared = {"tied": "o"}
    checkpoint.whole.model_keys = {"shared_params": None}
    root = checkpoint.write(tmp_path / "src")
    assert read_checkpoint(root) == expected(checkpoint)
    report = ckptx.convert("to-hf", root, tmp_path / "out", base="none")
    assert report.exit == 0


@pytest.mark.parametrize("empty_rank", [0, 1])
def test_the_optimizer_does_not_know_shards_without_elements(empty_rank: int, tmp_path: Path) -> None:
    """With fewer heads than ranks, some ranks have an empty weight and no state of it."""
    checkpoint = usual()
    rule = checkpoint.rules["o"] = Rule("row", ((0, 8) if empty_rank == 0 else (8, 0),))
    first, second = checkpoint.shard(empty_rank).groups
    empty = rule.shards(first.pop("o"), 2)[empty_rank]
    frozen = {**checkpoint.local(checkpoint.whole.frozen, empty_rank), "o": empty}
    checkpoint.by_rank = {empty_rank: {"groups": [first, second], "frozen": frozen}}
    root = checkpoint.write(tmp_path / "src")
    assert read_checkpoint(root) == expected(checkpoint)
    ckptx.convert("to-dcp", root, tmp_path / "dcp", base="none")
    assert read_checkpoint(tmp_path / "dcp") == expected(checkpoint)


# -------------------------------------------------------------------------------------------------------------- rules


def parts(values: np.ndarray[Any, Any], size: int, spec: list[Any], dim: int, **info: Any) -> TensorParallelCheckpoint:
    """Return a checkpoint with one parameter of parts, each of which is sharded equally."""
    pattern = {"patterns": ["^w0$"], "shape": spec, "partition_dim": dim}
    return TensorParallelCheckpoint(
        Checkpoint([{"w0": values}], 2, 2), size, {"w0": Rule("parts", dim=dim)},
        {"parameter_with_sub_params": [pattern], "sub_param_shard_widths": {}, **info},
    )  # fmt: skip


@pytest.mark.parametrize("spec", [[3, -1], [(8, 8, 8), -1], [(8, 8, 8), 5]])
def test_older_rules_have_equal_parts(spec: list[Any], tmp_path: Path) -> None:
    checkpoint = parts(numbers((24, 5))["w0"], 2, spec, 0, universal_checkpoint_version=0.2)
    assert read_checkpoint(checkpoint.write(tmp_path)) == expected(checkpoint)


@pytest.mark.parametrize(("spec", "dim"), [([2, (4, 8), 3, 5], 1), ([2, (4, 8), 15], 1), ([(4, 8), 6, 5], 0)])
def test_a_rule_can_have_more_dims_than_its_parameter(spec: list[Any], dim: int, tmp_path: Path) -> None:
    """AutoTP reshapes a weight for its rule, shards it there, and stores a matrix."""
    logical = tuple(sum(each) if isinstance(each, tuple) else each for each in spec)
    values = np.arange(np.prod(logical), dtype=np.float32).reshape(logical)
    widths = ((1, 3), (6, 2))
    rule = Rule("parts", widths, dim, tuple(spec))
    matrix = values.reshape(-1, values.shape[-1])
    checkpoint = TensorParallelCheckpoint(Checkpoint([{"w0": matrix}], 2, 2), 2, {"w0": rule})
    for rank, shard in enumerate(rule.shards(values, 2)):
        checkpoint.by_rank[rank] = {"groups": [{"w0": shard.reshape(-1, shard.shape[-1])}]}
    assert read_checkpoint(checkpoint.write(tmp_path)) == expected(checkpoint)


def view(whole: tuple[int, ...], local: tuple[int, ...], dim: int, begin: int, local_begin: int, size: int) -> Any:
    """Return a piece of an affine map: `torch.as_strided` arguments in the whole tensor and in the shard."""

    def strides(shape: tuple[int, ...]) -> list[int]:
        return [int(np.prod(shape[at + 1 :])) for at in range(len(shape))]

    shape = [*whole[:dim], size, *whole[dim + 1 :]]
    source, dest = strides(whole), strides(local)
    return {
        "shape": shape, "source": [begin * source[dim], source], "dest": [local_begin * dest[dim], dest],
        "locations": [0],
    }  # fmt: skip


def mapped(dim: int, **piece: Any) -> TensorParallelCheckpoint:
    """Return a checkpoint whose map shards the first 4 of 7 rows or columns, and gives each rank the other 3."""
    values = numbers((7, 7))["w0"]
    widths, local_shapes = (3, 1), [(6, 7), (4, 7)] if dim == 0 else [(7, 6), (7, 4)]
    first, shared = np.split(values, [4], dim)
    shards = [np.concatenate([each, shared], dim) for each in np.split(first, [3], dim)]
    ranks = {}
    for rank, (width, local) in enumerate(zip(widths, local_shapes, strict=True)):
        pieces = [view((7, 7), local, dim, 3 * rank, 0, width), view((7, 7), local, dim, 4, width, 3)]
        ranks[rank] = {"shard_shape": list(local), "pieces": [{**each, **piece} for each in pieces]}
    affine = {"version": 1, "params": {"^w0$": {"logical_shape": [7, 7], "ranks": ranks}}}
    return TensorParallelCheckpoint(
        Checkpoint([{"w0": values}], 3, 2), 2, {"w0": Rule("column")}, {"affine_map": affine},
        {rank: {"groups": [{"w0": shard}]} for rank, shard in enumerate(shards)},
    )  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1])
def test_an_affine_map_takes_precedence(dim: int, tmp_path: Path) -> None:
    """Its pieces can be on several ranks; those are compared."""
    checkpoint = mapped(dim)
    root = checkpoint.write(tmp_path / "src")
    assert read_checkpoint(root) == expected(checkpoint)
    assert sum(chunk.region.numel for chunk in open_checkpoint(root).tensors["w0"].replicas) == 21
    ckptx.convert("to-dcp", root, tmp_path / "dcp", base="none")
    checkpoint.by_rank[1]["groups"][0]["w0"][-1, -1] = 3
    shutil.rmtree(root)
    with pytest.raises(InputError, match=r'tensor "(optimizer.state.)?w0.*have different bytes'):
        ckptx.convert("to-dcp", checkpoint.write(root), tmp_path / "out", base="none")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("ranks", [1, 4])
def test_replicas_are_compared_although_flat_tensors_split_them_elsewhere(
    ranks: int, size: int, tmp_path: Path
) -> None:
    checkpoint = usual(2, size, ranks)
    for rank in range(size):
        checkpoint.by_rank = {rank: {"groups": checkpoint.shard(rank).groups}}
        tensor = checkpoint.by_rank[rank]["groups"][1]["table"] = checkpoint.whole.groups[1]["table"].copy()
        tensor[-1, -1] += 1
        root = checkpoint.write(tmp_path / f"{rank}")
        with pytest.raises(InputError, match=r'tensor "(optimizer.state.)?table.*have different bytes'):
            ckptx.convert("to-dcp", root, tmp_path / "out", base="none")
        assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------- malformed


def writes(stage: int = 2, **fields: Any) -> Callable[[Path], Any]:
    return lambda root: usual(stage, **fields).write(root)


def informs(**info: Any) -> Callable[[Path], Any]:
    return writes(info=info)


def then(change: Callable[[Path], Any], stage: int = 2, size: int = 2) -> Callable[[Path], Any]:
    def make(root: Path) -> None:
        usual(stage, size).write(root)
        change(root)

    return make


def on_rank_1(stage: int = 2, **fields: Any) -> Callable[[Path], Any]:
    return writes(stage, by_rank={1: fields})


def changed(name: str, group: int, *shape: int, stage: int = 2) -> Callable[[Path], Any]:
    """Another value of one tensor on rank 1, or another shape."""

    def make(root: Path) -> None:
        checkpoint = usual(stage)
        groups = checkpoint.shard(1).groups
        groups[group][name] = np.ones(shape or groups[group][name].shape, np.float32)
        checkpoint.by_rank = {1: {"groups": groups}}
        checkpoint.write(root)

    return make


def remove(*patterns: str) -> Callable[[Path], Any]:
    return lambda root: [path.unlink() for pattern in patterns for path in root.glob(pattern)]


def without(key: str) -> dict[str, Any]:
    return {key: ...}


def keys(**changed_keys: Any) -> dict[str, Any]:
    return {"model_keys": {**usual().shard(1).model_keys, **changed_keys}}


def map_of(**changes: Any) -> Callable[[Path], Any]:
    def make(root: Path) -> None:
        checkpoint = mapped(0)
        checkpoint.info["affine_map"]["params"]["^w0$"].update(changes)
        checkpoint.write(root)

    return make


RENAMED = [usual().shard(1).groups[0], {f"{name}x": each for name, each in usual().shard(1).groups[1].items()}]
NO_ROWS = {"original_vocab_size": None}

MALFORMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank between others without files": (
        then(remove("*mp_rank_02*"), size=4), r"files of 3 of 4 tensor parallel ranks; copy those with mp_rank_02"
    ),
    "the last rank without files": (then(remove("*mp_rank_01*")), "files of 1 of 2 tensor parallel ranks"),
    "the last of several ranks without files": (
        then(remove("*mp_rank_03*"), size=4), "files of 3 of 4 tensor parallel ranks; copy those with mp_rank_03"
    ),
    "the first rank without files": (then(remove("*mp_rank_00*")), "copy those with mp_rank_00 in their names"),
    "a rank without model states": (then(remove("mp_rank_01_*")), "mp_rank_01_model_states.pt is missing"),
    "a rank without optimizer states": (
        then(remove("bf16*mp_rank_01_*")), "0 of optimizer states of tensor parallel rank 1"
    ),
    "a data rank of one rank without optimizer states": (
        then(remove("bf16_zero_pp_rank_1_mp_rank_01_*")), "1 of optimizer states of tensor parallel rank 1"
    ),
    "ranks of two stages": (
        then(lambda root: [remove("*mp_rank_01*")(root), usual(3).shard(1).write(root)]), "of tensor parallel rank 1"
    ),
    "files was saved with fewer ranks": (
        on_rank_1(**keys(mp_world_size=1)), "was saved with 1 tensor parallel rank, but there are files of 2"
    ),
    "a rank of another step": (on_rank_1(**keys(global_steps=4)), "saved after 4 steps, but .* after 3"),
    "a rank with another step of the optimizer": (on_rank_1(step={0: 5, 1: 5}), "the optimizer step in .* differs"),
    "a rank with other names": (on_rank_1(groups=RENAMED), 'tensor ".*" is missing in the files of tensor parallel'),
    "weights of another dtype on one rank": (
        on_rank_1(0, storage="HalfStorage"), r'tensor ".*" is F16 in .*mp_rank_01.*, but BF16 in .*mp_rank_00'
    ),
    "a replicated tensor that differs": (changed("norm", 0), 'tensor ".*norm.*have different bytes'),
    "a replicated tensor that differs in stage 3": (changed("norm", 0, stage=3), 'tensor ".*norm.*different bytes'),
    "a buffer that differs": (
        on_rank_1(buffers=values_of(9, inverse=(3,))), 'tensor "inverse": .*have different bytes'
    ),
    "a buffer of another shape": (on_rank_1(buffers=values_of(9, inverse=(4,))), 'tensor "inverse": the shapes .*3.*4'),
    "a replicated tensor of another shape": (changed("norm", 0, 6), "7.*6.* are not equal, as required for a tensor"),
    "a column of another width": (changed("q", 0, 4, 2), "cannot be concatenated along dim 0"),
    "a row of another height": (changed("o", 0, 2, 4), "cannot be concatenated along dim 1"),
    "another number of dims": (changed("q", 0, 12), "cannot be concatenated along dim 0"),
    "a row-parallel vector": (
        informs(parameter_with_row_parallelism_patterns=["^bias$", "^o$"]), 'tensor "bias": .*have no dim 1'
    ),
    "a sharded scalar": (informs(tp_replicated_parameter_patterns=["^norm$"]), "have no dim 0, along which"),
    "two parts of odd size": (changed("gate_up", 0, 7, 3), "have no even dim 0, as required for two parts"),
    "parts of other sizes": (changed("qkv", 0, 9, 3), "do not have parts of"),
    "more parts than elements": (
        lambda root: parts(numbers((24, 5))["w0"], 2, [1 << 40, -1], 0, universal_checkpoint_version=0.2).write(root),
        "do not have 1099511627776 equal parts along dim 0",
    ),
    "parts without widths": (informs(sub_param_shard_widths={}), "sub_param_shard_widths lacks"),
    "widths of other ranks": (
        informs(sub_param_shard_widths={"^qkv$": [[8], [5], [5]]}), 'parts of "qkv" are not those of 2 ranks'
    ),
    "widths that are no numbers": (informs(sub_param_shard_widths={"^qkv$": [["8", 0]]}), "a size that is not"),
    "parts without a shape": (informs(parameter_with_sub_params=[{"patterns": []}]), "has no valid shape and partit"),
    "a vocabulary without its size": (informs(**NO_ROWS), "but original_vocab_size is not a number"),
    "a pattern that is no string": (informs(tp_replicated_parameter_patterns=[3]), "a pattern that is not a string"),
    "patterns that are no list": (informs(tp_replicated_parameter_patterns=3), "tp_replicated.* is not a list"),
    "two patterns for one tensor": (
        informs(tp_replicated_parameter_patterns=["^norm$", "nor.", "scal", "table", "frozen_norm"]),
        '2 patterns of tp_replicated_parameter_patterns match "norm"',
    ),
    "a damaged archive": (then(lambda root: truncate(root / MODEL_1)), f"{MODEL_1}: "),
    "masters of another rank": (
        then(lambda root: shutil.copy(root / OPTIM.format(0), root / OPTIM.format(1))), "the fp32 masters have"
    ),
    "a map of fewer ranks": (map_of(ranks={}), "not of 2 tensor parallel ranks"),
    "a map that leaves a gap": (map_of(logical_shape=[9, 7]), "do not tile the whole tensor along dim 0"),
    "a map without numbers": (map_of(logical_shape=["7", 7]), "has no valid shape"),
    "a universal tensor of another shape": (
        lambda root: [
            usual().write_universal(root),
            usual().whole.write_parameter(root / "zero/q/fp32.pt", np.ones((4, 3), np.float32)),
        ],
        r"has shape \[4, 3\], but the model states have \[8, 3\]",
    ),
    "universal masters of another save": (
        lambda root: [
            usual().write_universal(root),
            usual().whole.write_parameter(root / "zero/o/fp32.pt", np.ones((3, 8), np.float32)),
        ],
        'master of "o" does not round to the weight in',
    ),
}  # fmt: skip


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


UNSUPPORTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no rules": (
        lambda root: usual(
            by_rank={rank: keys(universal_checkpoint_info=None) for rank in (0, 1)}
        ).write(root),
        "tensor parallelism of 2 ranks without universal_checkpoint_info",
    ),
    "rules without patterns": (
        lambda root: usual(
            by_rank={rank: keys(universal_checkpoint_info={"universal_checkpoint_version": 0.4}) for rank in (0, 1)}
        ).write(root),
        "without universal_checkpoint_info",
    ),
    "an averaged tensor that differs": (
        changed("dense_bias", 1), 'tensor "dense_bias": parameter_to_average_patterns lists it, and its copies in'
    ),
    "an averaged tensor that differs in stage 3": (changed("dense_bias", 1, stage=3), "averages are not computed"),
    "a tensor that DeepSpeed cannot describe": (
        informs(autotp_unsupported_parameter_patterns={"^q$": "reason"}), 'tensor "q": autotp_unsupported'
    ),
    "a pattern with a repeated group": (
        informs(tp_replicated_parameter_patterns=["(n+)+$"]), "a pattern in tp_replicated_parameter_patterns .* group"
    ),
    "a map of a newer DeepSpeed": (informs(affine_map={"version": 2}), "affine_map of version 2"),
    "a scaled map": (lambda root: mapped(0, scale=0.5).write(root), "the values of a rank are multiplied by 0.5"),
    "a map of another shape": (map_of(logical_shape=[7, 8]), "are not ranges along one dim"),
    "a map along two dims": (lambda root: mapped(0, source=[0, [1, 7]]).write(root), "are not ranges along one dim"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*MALFORMED, *UNSUPPORTED])
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = MALFORMED.get(case) or UNSUPPORTED[case]
    root = tmp_path / "global_step3"
    make(root)
    with pytest.raises(CkptxError, match=message) as refused:
        ckptx.convert("to-dcp", root, tmp_path / "out", base="none")
    text = str(refused.value)
    assert type(refused.value) is (InputError if case in MALFORMED else UnsupportedError)
    assert refused.value.exit_code == (3 if case in MALFORMED else 4)
    assert "\n" not in text and text.startswith(str(root)) and "; " in text and len(text) < 600 + 2 * len(str(root))
    assert not (tmp_path / "out").exists()


def test_a_damaged_byte_of_any_rank_is_found(tmp_path: Path) -> None:
    root = usual(2).write(tmp_path / "src")
    for name, key in (("o", "o"), ("norm", "optimizer.state.norm.exp_avg"), ("q", "optimizer.state.q.master_param")):
        entry = open_checkpoint(root).tensors[key]
        chunk = next(each for each in (*entry.chunks, *entry.replicas) if "mp_rank_01" in each.file)
        data = bytearray((root / chunk.file).read_bytes())
        data[chunk.offset] ^= 1
        (root / chunk.file).write_bytes(data)
        with pytest.raises(InputError, match=f"CRC-32|have different bytes|does not round.*|{name}"):
            ckptx.convert("to-dcp", root, tmp_path / "out", base="none")
        assert not (tmp_path / "out").exists()
        data[chunk.offset] ^= 1
        (root / chunk.file).write_bytes(data)
    ckptx.convert("to-dcp", root, tmp_path / "out", base="none")


def test_no_pickle_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = usual(info={"tp_replicated_parameter_patterns": SYSTEM})
    with pytest.raises(CkptxError):
        open_checkpoint(checkpoint.write(tmp_path / "src"))
    assert not (tmp_path / "was-executed").exists()
