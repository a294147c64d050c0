"""Numbers of parameters of models whose tied names nothing declares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

import ckptx
from ckptx.errors import InputError
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf
from tests.support.tied_remote_model import CONFIG, EMBEDDING, HEAD, tensors

COUNT = sum(math.prod(shape) for _, shape, _ in tensors().values())
VOCABULARY = math.prod(tensors()[EMBEDDING][1])
OTHER = value("F32", *tensors()[EMBEDDING][1], seed=99)


@pytest.mark.parametrize("config", [CONFIG, None])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    ("extra", "count", "tied"),
    [
        ({HEAD: tensors()[EMBEDDING]}, COUNT, 1),
        ({HEAD: OTHER}, COUNT + VOCABULARY, 0),
        ({HEAD: tensors()[EMBEDDING], "teacher.weight": OTHER}, COUNT + VOCABULARY, 1),
        # Equal layers are not tied: they may have equal initial values.
        ({"core.blocks.7.down.weight": tensors()["core.blocks.0.down.weight"]}, COUNT + 8 * 12, 0),
    ],
)
def test_copies_of_equal_bytes_count_once(
    extra: Mapping[str, Value], count: int, tied: int, prefix: str, config: dict[str, object] | None, tmp_path: Path
) -> None:
    model = {prefix + name: each for name, each in (tensors() | extra).items()}
    report = ckptx.inspect(write_dcp(tmp_path / "dcp", model, config=config))
    assert report.parameters == count and len(report.tied_groups) == tied
    if tied:
        assert report.tied_groups == [[prefix + EMBEDDING, prefix + HEAD]]
    base = {} if config else {"base": "none"}
    converted = ckptx.convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf", **base)
    assert converted.parameters == count == ckptx.verify(tmp_path / "dcp", tmp_path / "hf").parameters
    assert ckptx.inspect(tmp_path / "hf").parameters == count


def test_equal_norms_of_megatron_layers_are_not_tied(tmp_path: Path) -> None:
    """Megatron stacks the layers of a model, and the norms of a new model are all ones."""
    ones = ("F32", (3, 8), bytes.fromhex("0000803f") * 24)
    norms = {
        "decoder.layers.input_layernorm.weight": ones,
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": ones,
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": ones,
    }
    report = ckptx.inspect(write_dcp(tmp_path / "dcp", norms))
    assert (report.parameters, report.tied_groups) == (3 * 24, [])


def test_an_invalid_tie_flag_names_the_directory_of_its_config(tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": "yes"}
    write_hf(tmp_path / "hf", llama(), config=config)
    with pytest.raises(InputError) as caught:
        ckptx.inspect(tmp_path / "hf")
    assert str(tmp_path / "hf") in str(caught.value) and 'tie_word_embeddings is "yes"' in str(caught.value)
