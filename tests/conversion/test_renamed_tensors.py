"""`--names torchtitan` through the commands: every byte where numpy puts it, and back to the files it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import ckptx
from ckptx.architecture.trainer_naming import detect
from ckptx.architecture.trainer_naming.scheme import TrainerScheme
from ckptx.catalog.region import full_region
from ckptx.errors import UnsupportedError
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.ops import Conversion
from ckptx.model_view.view import locate_all_archives, view_model
from ckptx.options.conversion import Names
from ckptx.report.text import conversion_text
from ckptx.storage.files import FilePool
from ckptx.transfer.stream import TensorReader
from tests.support.checkpoint_writers import LLAMA, Value, tree_bytes, value, write_dcp, write_hf
from tests.transfer.test_stream import Collect

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 6, 10, 2
CONFIG: dict[str, Any] = LLAMA | {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": 13,
}
# torchtitan's name now, its earlier one, the published one, the shape, and the heads whose rows are reordered
ROWS = (
    ("tok_embeddings.weight", None, "model.embed_tokens.weight", (13, HIDDEN), 0),
    ("layers.{}.attention.qkv_linear.wq.weight", "layers.{}.attention.wq.weight",
     "model.layers.{}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN), HEADS),
    ("layers.{}.attention.qkv_linear.wk.weight", "layers.{}.attention.wk.weight",
     "model.layers.{}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS),
    ("layers.{}.attention.qkv_linear.wv.weight", "layers.{}.attention.wv.weight",
     "model.layers.{}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), 0),
    ("layers.{}.attention.wo.weight", None, "model.layers.{}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM), 0),
    ("layers.{}.feed_forward.w1.weight", None, "model.layers.{}.mlp.gate_proj.weight", (14, HIDDEN), 0),
    ("layers.{}.feed_forward.w3.weight", None, "model.layers.{}.mlp.up_proj.weight", (14, HIDDEN), 0),
    ("layers.{}.feed_forward.w2.weight", None, "model.layers.{}.mlp.down_proj.weight", (HIDDEN, 14), 0),
    ("layers.{}.attention_norm.weight", None, "model.layers.{}.input_layernorm.weight", (HIDDEN,), 0),
    ("layers.{}.ffn_norm.weight", None, "model.layers.{}.post_attention_layernorm.weight", (HIDDEN,), 0),
    ("norm.weight", None, "model.norm.weight", (HIDDEN,), 0),
    ("lm_head.weight", "output.weight", "lm_head.weight", (13, HIDDEN), 0),
)  # fmt: skip


def both_spellings(earlier: bool = False) -> tuple[dict[str, Value], dict[str, Value]]:
    """A model in published names, and the same in torchtitan's by numpy."""
    published, titan = {}, {}
    for row, (now, before, name, shape, heads) in enumerate(ROWS):
        for layer in range(LAYERS) if "{}" in now else (0,):
            tensor = value("BF16", *shape, seed=100 * row + layer)
            published[name.format(layer)] = tensor
            rows = np.frombuffer(tensor[2], np.uint16).reshape(shape)
            if heads:  # from halves of a head to neighbouring pairs
                rows = rows.reshape(heads, 2, -1, shape[1]).transpose(0, 2, 1, 3)
            called = before if earlier and before else now
            titan[called.format(layer)] = "BF16", shape, np.ascontiguousarray(rows).tobytes()
    return published, titan


def contents(path: Path) -> dict[str, bytes]:
    view = view_model(open_checkpoint(path))
    found = {}
    with FilePool(view.catalog.root) as files:
        view = locate_all_archives(view, files)
        for name, entry in view.tensors.items():
            sink = Collect(1000)
            TensorReader(files).stream(entry, full_region(entry.shape), sink)
            found[name] = bytes(sink.data)
    return found


@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "pp": 2}, {"tp": 3, "dp_shard": 2}], ids=str)
def test_into_torchtitan_and_back_to_the_same_files(tmp_path: Path, mesh: dict[str, int]) -> None:
    published, titan = both_spellings()
    hf = write_hf(tmp_path / "hf", published, config=CONFIG)
    ckptx.convert("hf2dcp", hf, tmp_path / "titan", names="torchtitan", **mesh)
    assert contents(tmp_path / "titan") == {name: data for name, (_, _, data) in titan.items()}
    ckptx.reshard(tmp_path / "titan", tmp_path / "again", tp=2)
    assert contents(tmp_path / "again").keys() == titan.keys(), "a DCP keeps its names"
    ckptx.convert("dcp2hf", tmp_path / "again", tmp_path / "back")
    for name, data in tree_bytes(hf).items():
        assert (tmp_path / "back" / name).read_bytes() == data
    assert ckptx.verify(hf, tmp_path / "titan").exit == 0
    assert ckptx.diff(hf, tmp_path / "again").exit == 0


def test_what_reads_headers_alone_checks_torchtitans_names_against_the_config(tmp_path: Path) -> None:
    published, _ = both_spellings()
    hf, dcp = write_hf(tmp_path / "hf", published, config=CONFIG), tmp_path / "titan"
    ckptx.convert("hf2dcp", hf, dcp, names="torchtitan")
    report = ckptx.inspect(dcp)
    assert report.notes == [] and report.config_check is not None
    assert report.config_check["checked"] == "names and shapes" and report.config_check["mismatches"] == []
    assert ckptx.diff(hf, dcp).notes == []
    text = (dcp / "config.json").read_text()
    (dcp / "config.json").write_text(text.replace('"head_dim": 6', '"head_dim": 8'))
    fit = ckptx.inspect(dcp).config_check
    assert fit is not None and any("q_proj" in row["name"] for row in fit["mismatches"])


@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_of_torchtitan_becomes_hf(tmp_path: Path, earlier: bool) -> None:
    published, titan = both_spellings(earlier)
    hf = write_hf(tmp_path / "hf", published, config=CONFIG)
    write_dcp(tmp_path / "step", titan)
    ckptx.convert("dcp2hf", tmp_path / "step", tmp_path / "back", base=str(hf))
    assert contents(tmp_path / "back") == {name: data for name, (_, _, data) in published.items()}
    ckptx.reshard(tmp_path / "step", tmp_path / "cut", to="safetensors", tp=2, base=str(hf))
    assert contents(tmp_path / "cut") == {name: data for name, (_, _, data) in published.items()}
    assert ckptx.verify(hf, tmp_path / "cut").exit == 0


def test_the_summary_names_both_schemes_and_the_heads_of_permuted_rows(tmp_path: Path) -> None:
    published, titan = both_spellings()
    hf = write_hf(tmp_path / "hf", published, config=CONFIG)
    write_dcp(tmp_path / "step", titan)
    permuted = [
        {"name": "model.layers.*.self_attn.q_proj.weight", "heads": HEADS},
        {"name": "model.layers.*.self_attn.k_proj.weight", "heads": KV_HEADS},
    ]
    rows = "rows permuted within heads: q_proj (4 heads), k_proj (2 heads)"
    back = ckptx.convert("dcp2hf", tmp_path / "step", tmp_path / "back", base=hf)
    assert back.names == {"before": "torchtitan", "after": "hf", "permuted": permuted}
    assert f"names: torchtitan -> hf, {rows}" in conversion_text(back).splitlines()
    made = ckptx.convert("hf2dcp", hf, tmp_path / "titan", names="torchtitan")
    assert made.names == {"before": "hf", "after": "torchtitan", "permuted": permuted}
    for unchanged in (
        ckptx.convert("hf2dcp", hf, tmp_path / "dcp"),
        ckptx.reshard(tmp_path / "step", tmp_path / "cut", tp=2, base=hf),
    ):
        assert unchanged.names is None and "names:" not in conversion_text(unchanged)


def test_a_row_in_the_wrong_place_is_found(tmp_path: Path) -> None:
    published, titan = both_spellings()
    name = "layers.1.attention.qkv_linear.wq.weight"
    dtype, shape, data = titan[name]
    titan[name] = dtype, shape, data[2 * HIDDEN :] + data[: 2 * HIDDEN]
    hf = write_hf(tmp_path / "hf", published, config=CONFIG)
    write_dcp(tmp_path / "step", titan)
    ckptx.convert("dcp2hf", tmp_path / "step", tmp_path / "back", base=str(hf))
    report = ckptx.verify(hf, tmp_path / "back")
    assert [row["name"] for row in report.differing] == ["model.layers.1.self_attn.q_proj.weight"]


def test_a_class_without_names_in_torchtitan_is_refused(tmp_path: Path) -> None:
    published, _ = both_spellings()
    hf = write_hf(tmp_path / "hf", published, config=CONFIG | {"architectures": ["MistralForCausalLM"]})
    with pytest.raises(UnsupportedError, match="MistralForCausalLM"):
        ckptx.convert("hf2dcp", hf, tmp_path / "titan", names="torchtitan")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_every_scheme_is_a_choice_of_names() -> None:
    assert get_args(Names) == ("hf", "model", *detect.SCHEMES, "disk")


def test_names_of_a_second_trainer_are_recognized_and_become_torchtitans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conversions(class_name: str, config: Any) -> tuple[Conversion, ...]:
        return tuple(Conversion((f"other.{row[2].replace('{}', '*')}",), (row[2].replace("{}", "*"),)) for row in ROWS)

    embedding = "other.model.embed_tokens.weight"
    other = TrainerScheme(
        "other", frozenset({embedding}), "LlamaForCausalLM".__eq__, conversions, frozenset(), lambda _: ()
    )
    monkeypatch.setitem(detect.SCHEMES, "other", other)  # type: ignore[arg-type]  # a dict, read-only for the package
    published, titan = both_spellings()
    hf = tmp_path / "hf"
    write_hf(hf, published, config=CONFIG)
    write_dcp(tmp_path / "run", {f"other.{name}": tensor for name, tensor in published.items()})
    view = view_model(open_checkpoint(tmp_path / "run"), config=CONFIG)
    assert view.trainer_conversions == conversions("LlamaForCausalLM", CONFIG)
    ckptx.convert("to-dcp", tmp_path / "run", tmp_path / "titan", base=hf, names="torchtitan")
    assert contents(tmp_path / "titan") == {name: data for name, (_, _, data) in titan.items()}
