"""`verify` and `diff` must find what is injected: each defect is made by stock libraries, found, and named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptx
from ckptx.errors import InputError
from ckptx.report.report import Report
from tests.support.models import RECIPES, read_hf, write
from tests.support.torch_dcp import raw

Tensors = dict[str, torch.Tensor]
Row = dict[str, object]

_DOWN = "model.layers.1.mlp.down_proj.weight"  # 32 x 97
_NORM = "model.norm.weight"
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_INVENTED = "model.layers.1.mlp.renamed.weight"


def swap_rows(tensors: Tensors) -> None:
    tensors[_DOWN] = tensors[_DOWN][[0, 1, 2, 7, 4, 5, 6, 3, *range(8, 32)]]


def flip_one_bit(tensors: Tensors) -> None:
    flipped = tensors[_DOWN].clone()
    flipped.view(torch.int16)[31, 96] ^= 1
    tensors[_DOWN] = flipped


def round_once(tensors: Tensors) -> None:
    tensors[_DOWN] = tensors[_DOWN].to(torch.float8_e4m3fn).to(tensors[_DOWN].dtype)


def cast_once(tensors: Tensors) -> None:
    tensors[_NORM] = tensors[_NORM].float()


def transpose(tensors: Tensors) -> None:
    tensors[_DOWN] = tensors[_DOWN].t().contiguous()


def transpose_square(tensors: Tensors) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].t().contiguous()


def drop(tensors: Tensors) -> None:
    del tensors[_DOWN]


def rename(tensors: Tensors) -> None:
    tensors[_INVENTED] = tensors.pop(_DOWN)


def pad(tensors: Tensors) -> None:
    tensors[_EMBED] = torch.cat([tensors[_EMBED], torch.zeros(3, 32, dtype=tensors[_EMBED].dtype)])


def reshape(tensors: Tensors) -> None:
    tensors[_NORM] = tensors[_NORM].reshape(32, 1)


def swap_head_and_embedding(tensors: Tensors) -> None:
    tensors[_HEAD], tensors[_EMBED] = tensors[_EMBED], tensors[_HEAD]


# Each with the rows that must be found: name -> what and, for contents, the index.
DEFECTS: dict[Callable[[Tensors], None], dict[str, tuple[str, list[int] | None]]] = {
    swap_rows: {_DOWN: ("content", [3, 0])},
    flip_one_bit: {_DOWN: ("content", [31, 96])},
    round_once: {_DOWN: ("content", None)},
    transpose_square: {"model.layers.0.self_attn.o_proj.weight": ("content", [0, 1])},
    cast_once: {_NORM: ("dtype", None)},
    transpose: {_DOWN: ("shape", None)},
    drop: {_DOWN: ("missing", None)},
    rename: {_DOWN: ("missing", None), _INVENTED: ("missing", None)},
    pad: {_EMBED: ("shape", None)},
    reshape: {_NORM: ("shape", None)},
    swap_head_and_embedding: {_HEAD: ("content", [0, 0]), _EMBED: ("content", [0, 0])},
}

INJECTED = pytest.mark.parametrize("inject", DEFECTS, ids=lambda inject: inject.__name__)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One untied model as HF, as a DCP of stock torch, and as a DCP of ckptx."""
    root = tmp_path_factory.mktemp("forms")
    paths = {name: root / name for name in ("hf", "stock", "ckptx")}
    write(RECIPES["llama-untied"], paths["hf"])
    save_dcp(read_hf(paths["hf"]), paths["stock"], paths["hf"])
    ckptx.convert("hf2dcp", paths["hf"], paths["ckptx"])
    return paths


def save_dcp(tensors: Tensors, path: Path, hf: Path) -> None:
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path, thread_count=2), no_dist=True)
    shutil.copy(hf / "config.json", path)


def save_hf(tensors: Tensors, path: Path, hf: Path) -> None:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    shutil.copy(hf / "config.json", path)


@pytest.fixture(params=["hf", "dcp"])
def injected(
    request: pytest.FixtureRequest, forms: dict[str, Path], inject: Callable[[Tensors], None], tmp_path: Path
) -> Path:
    """The model with the defect, as HF or DCP."""
    tensors = read_hf(forms["hf"])
    inject(tensors)
    save = save_hf if request.param == "hf" else save_dcp
    save(tensors, tmp_path / "injected", forms["hf"])
    return tmp_path / "injected"


def assert_found(report: Report, inject: Callable[[Tensors], None], contents: bool) -> None:
    expected = {name: row for name, row in DEFECTS[inject].items() if contents or row[0] != "content"}
    rows = {row["name"]: row for row in report.differing}
    assert rows.keys() == expected.keys()
    for name, (what, index) in expected.items():
        assert rows[name]["what"] == what
        if index is not None:
            assert rows[name]["index"] == index
        if what == "content":
            assert rows[name]["a"] != rows[name]["b"]
    assert report.exit == (1 if expected else 0)
    assert report.ok is not bool(expected)


@INJECTED
@pytest.mark.parametrize("reference", ["hf", "stock", "ckptx"])
def test_verify_finds_the_defect_whichever_side_it_is_on(
    forms: dict[str, Path], injected: Path, inject: Callable[[Tensors], None], reference: str
) -> None:
    assert_found(ckptx.verify(forms[reference], injected), inject, contents=True)
    assert_found(ckptx.verify(injected, forms[reference]), inject, contents=True)


@INJECTED
@pytest.mark.parametrize("reference", ["hf", "stock", "ckptx"])
def test_diff_finds_what_headers_show(
    forms: dict[str, Path], injected: Path, inject: Callable[[Tensors], None], reference: str
) -> None:
    assert_found(ckptx.diff(forms[reference], injected), inject, contents=False)


def test_without_a_defect_all_forms_are_equal(forms: dict[str, Path]) -> None:
    for a in forms.values():
        for b in forms.values():
            for report in (ckptx.verify(a, b), ckptx.diff(a, b)):
                assert (report.exit, report.differing) == (0, [])
                assert report.compared == 21


@pytest.mark.parametrize("recipe", ["llama-tied", "gemma3-vlm"])
@pytest.mark.parametrize("which", ["source", "target"])
def test_changed_tied_tensor_is_found_when_the_other_side_has_one_name(recipe: str, which: str, tmp_path: Path) -> None:
    """A DCP that holds both names of a tie, one of them changed, is not equal to an HF checkpoint that holds one."""
    write(RECIPES[recipe], tmp_path / "hf")
    tensors = read_hf(tmp_path / "hf")
    ((target, source),) = RECIPES[recipe].aliases.items()
    tensors[target] = tensors[source].clone()
    save_dcp(tensors, tmp_path / "equal", tmp_path / "hf")
    assert ckptx.verify(tmp_path / "hf", tmp_path / "equal").exit == 0
    changed = {"source": source, "target": target}[which]
    tensors[changed][5, 3] += 1
    save_dcp(tensors, tmp_path / "changed", tmp_path / "hf")
    for report in (
        ckptx.verify(tmp_path / "hf", tmp_path / "changed"),
        ckptx.verify(tmp_path / "changed", tmp_path / "hf"),
    ):
        assert report.exit == 1
        assert [(row["name"], row["index"]) for row in report.differing] == [(changed, [5, 3])]


@pytest.mark.parametrize("file", ["hf", "dcp"])
def test_one_flipped_bit_in_a_file_is_never_called_equal(file: str, forms: dict[str, Path], tmp_path: Path) -> None:
    """A bit of the payload itself: found as content in safetensors, as a checksum in a DCP."""
    shutil.copytree(forms["hf" if file == "hf" else "stock"], tmp_path / "bad")
    payload = raw(read_hf(forms["hf"])[_DOWN])
    (holder,) = [path for path in (tmp_path / "bad").iterdir() if payload in path.read_bytes()]
    data = bytearray(holder.read_bytes())
    data[data.index(payload) + 2 * (97 * 4 + 5)] ^= 0x20
    holder.write_bytes(data)
    if file == "hf":
        report = ckptx.verify(forms["ckptx"], tmp_path / "bad")
        assert [(row["name"], row["index"]) for row in report.differing] == [(_DOWN, [4, 5])]
        assert report.exit == 1
    else:
        with pytest.raises(InputError, match=_DOWN):
            ckptx.verify(forms["ckptx"], tmp_path / "bad")
        with pytest.raises(InputError, match=_DOWN):
            ckptx.convert("dcp2hf", tmp_path / "bad", tmp_path / "out")
        assert not (tmp_path / "out").exists()
