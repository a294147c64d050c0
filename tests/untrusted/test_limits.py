"""Numbers that nobody means: as options, in config.json, in names of files and in headers; each is refused at once."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ckptx.catalog.dtype import DTYPES_BY_TORCH_NAME, DType
from ckptx.catalog.region import Region
from ckptx.cli import main as main_module
from ckptx.formats.dcp.metadata import TensorMetadata, parse_metadata
from ckptx.formats.dcp.metadata_writer import metadata_to_bytes
from ckptx.formats.torch_archive.archive import archive_length
from ckptx.untrusted.limits import MAX_DIMS, find_shape_fault
from tests.support.checkpoint_writers import INDEX, LLAMA, framed, llama, write_dcp, write_hf

CONFIG = {
    **LLAMA, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def within_ten_seconds() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("took more than ten seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Run:
    """Runs a command line and gives its exit code and what it said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: object) -> tuple[int, str]:
        self._monkeypatch.setattr("sys.argv", ["ckptx", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main_module.main()
        assert isinstance(left.value.code, int)
        said = self._capsys.readouterr().err
        assert (len(said) < 5000 and len(said.splitlines()) <= 1) or not left.value.code
        return left.value.code, said


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


HUGE = ["65537", "1000000000", str(1 << 64), "9" * 400, "9" * 5000]


@pytest.mark.parametrize("amount", HUGE, ids=["more than ranks", "1e9", "2**64", "400 digits", "5000 digits"])
@pytest.mark.parametrize("option", ["--tp", "--pp", "--dp-shard", "--workers"])
def test_counts_on_the_command_line(option: str, amount: str, tmp_path: Path, run: Run) -> None:
    hf = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    assert run("reshard", hf, tmp_path / "out", option, amount)[0] == 2
    assert run("convert", "hf2dcp", hf, tmp_path / "out", "--files", amount)[0] == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["9" * 400 + "GB", "9" * 5000, "1e30GB", "1025TiB", "2000000TB", "-1", "0"])
@pytest.mark.parametrize("option", ["--max-memory", "--max-shard-size"])
def test_sizes_on_the_command_line(option: str, size: str, tmp_path: Path, run: Run) -> None:
    hf = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    assert run("convert", "hf2dcp", hf, tmp_path / "dcp")[0] == 0
    code, said = run("convert", "dcp2hf", tmp_path / "dcp", tmp_path / "out", option, size)
    assert code == 2 and option in said


def test_axes_that_are_too_many_together(tmp_path: Path, run: Run) -> None:
    hf = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    code, said = run("reshard", hf, tmp_path / "out", "--tp", 4096, "--dp-shard", 4096)
    assert code == 2 and "must be at most 65,536" in said


KEYS = [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "head_dim",
]
VALUES = [10**12, 10**90, -1, 0, "8", 1.5, float("nan"), [2], {"a": 2}, None, True, [[]] * 3]


@pytest.mark.parametrize("key", KEYS)
def test_values_of_a_config(key: str, tmp_path: Path, run: Run) -> None:
    root = write_hf(tmp_path / "hf", llama())
    for number, value in enumerate(VALUES):
        (root / "config.json").write_text(json.dumps({**CONFIG, key: value}))
        for words in (["inspect", root], ["reshard", root, tmp_path / f"out{number}", "--tp", 2, "--pp", 2]):
            code, said = run(*words)
            assert code in (0, 2, 3, 4), (value, said)


WORDS = ["architectures", "model_type", "auto_map", "text_config", "tie_word_embeddings", "torch_dtype"]


@pytest.mark.parametrize(
    ("key", "value"),
    list(product(WORDS, VALUES)),
    ids=str,
)
def test_words_of_a_config(key: str, value: object, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptx.architecture.introspection.meta_model", None)  # would build what is unknown
    root = write_hf(tmp_path / "hf", llama(), config={**CONFIG, key: value})
    assert run("inspect", root)[0] in (0, 3, 4, 7)
    assert run("convert", "hf2dcp", root, tmp_path / "out")[0] in (0, 3, 4, 7)


@pytest.mark.parametrize("name", ["shard-99999999999-model-00001-of-00001", "shard-00001-model-00001-of-99999999999"])
def test_numbers_in_names_of_shards(name: str, tmp_path: Path, run: Run) -> None:
    info = json.dumps({"a": {"saved_offsets": [4]}})
    rows = {"__metadata__": {"DCP_SHARDING_INFO": info}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    (tmp_path / f"{name}.safetensors").write_bytes(framed(rows, bytes(4)))
    code, said = run("inspect", tmp_path)
    assert code == 3 and "no shard covers" in said


@pytest.mark.parametrize("length", [256, 5000])
def test_names_of_files_that_no_system_has(length: int, tmp_path: Path, run: Run) -> None:
    name = "x" * length
    root = write_hf(tmp_path / "hf", llama(), shards=2, config=CONFIG)
    index = json.loads((root / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (root / INDEX).write_text(json.dumps(index))
    good = write_hf(tmp_path / "good", llama(), config=CONFIG)
    assert run("inspect", root)[0] == 3
    assert run("inspect", tmp_path / name)[0] == 3
    assert run("diff", good, tmp_path / name)[0] == 3
    assert run("reshard", good, tmp_path / "out", "--tp", 2, "--base", tmp_path / name)[0] == 3
    assert run("reshard", good, tmp_path / "out", "--tp", 2, "--tp-plan", tmp_path / name)[0] == 2
    assert run("convert", "hf2dcp", good, tmp_path / name)[0] == 5


@pytest.mark.parametrize("digits", [5, 19, 400, 3990, 5000])
def test_layers_with_long_numbers(digits: int, tmp_path: Path, run: Run) -> None:
    name = f"model.layers.{'9' * digits}.self_attn.q_proj.weight"
    root = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    (root / "model.safetensors").write_bytes(
        framed({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    )
    for words in (["inspect", root], ["reshard", root, tmp_path / "out", "--tp", 2, "--pp", 2], ["verify", root, root]):
        assert run(*words)[0] in (0, 3, 4)


NO_SHAPES = [
    [0, 1 << 64], [1 << 63], [1 << 62], [1 << 59], [1 << 40, 1 << 40, 0], [1] * (MAX_DIMS + 1), [0] * 1000, [10**4000],
    [10**4000] * 3,
]  # fmt: skip


@pytest.mark.parametrize("shape", NO_SHAPES)
def test_shapes_in_a_header(shape: list[int], tmp_path: Path, run: Run) -> None:
    count = 1 if 0 not in shape and max(shape) == 1 else 0
    rows = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * count]}}
    root = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    (root / "model.safetensors").write_bytes(framed(rows, bytes(4 * count)))
    assert run("convert", "hf2dcp", root, tmp_path / "out")[0] == 3
    assert find_shape_fault(shape) is not None


@pytest.mark.parametrize("shape", [[], [0], [1 << 58], [0, (1 << 63) - 1], [1] * MAX_DIMS, [3, 0, 5]])
def test_shapes_that_torch_has_pass(shape: list[int]) -> None:
    assert find_shape_fault(shape) is None


@pytest.mark.parametrize("dtype", DTYPES_BY_TORCH_NAME.values(), ids=DTYPES_BY_TORCH_NAME)
@pytest.mark.parametrize("shape", [((1 << 59) - 1,), (1 << 58,), (1 << 29, 1 << 29), (3, 1 << 57), (0, (1 << 63) - 1)])
def test_no_count_of_bytes_overflows(dtype: DType, shape: tuple[int, ...]) -> None:
    """Of the largest shapes that pass, in every dtype: an archive has a length."""
    assert find_shape_fault(shape) is None
    assert archive_length(dtype, dtype.from_torch_elements(shape)) < 1 << 64


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("size", [1 << 40, 1 << 58, (1 << 59) - 1, 1 << 59, 1 << 60, 1 << 61, 1 << 62, (1 << 63) - 1])
def test_shapes_in_a_metadata(dtype: str, size: int, tmp_path: Path, run: Run) -> None:
    """A tensor whose `.metadata` says it is larger than its file: refused at the latest when its bytes are read."""
    root, out = write_dcp(tmp_path / "dcp", llama(), config=CONFIG), tmp_path / "out"
    metadata = parse_metadata((root / ".metadata").read_bytes(), "x")
    claimed = TensorMetadata(dtype, (size,), (Region((0,), (size,)),))
    tensors = {**metadata.tensors, "model.norm.weight": claimed}
    (root / ".metadata").write_bytes(metadata_to_bytes(replace(metadata, tensors=tensors)))
    for words in (["convert", "dcp2hf", root, out], ["reshard", root, out, "--tp", 2]):
        for base in ([], ["--base", "none"]):
            code, said = run(*words, *base)
            assert code in (3, 4), said
            assert not out.exists()
