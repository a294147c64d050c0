"""What ckptx says a tensor of a model is made of is what stock code makes of it: names, fused weights, experts, ties.

On one side what ckptx reads, by itself, as the tensors of the model: from the HF checkpoint, and from the DCP that it
writes under the names of the model. On the other what `from_pretrained` put into the model, and what torch loads from
that DCP, strictly, into a model of the class; in a process that never imports ckptx. That a DCP under the names on disk
holds their bytes is asked in `test_oracle_models.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptx.catalog.entry import TensorEntry
from ckptx.catalog.region import full_region
from ckptx.model_view.view import ModelView, locate_archives
from ckptx.runtime.checkpointing.reading import RegionReader, open_source
from tests.support.against_transformers import TransformersResults, list_differences
from tests.support.models import EVERY, read_hf
from tests.support.slow import slow_but
from tests.support.stock_outputs import fingerprint

FAST = ("llama-tied", "gemma3-vlm", "qwen3-moe", "deepseek-v3", "phi3", "gpt2", "mixtral", "llava")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> TransformersResults:
    return TransformersResults(tmp_path_factory.mktemp("mapping"), FAST, dcp=True)


def read(reading: RegionReader, entry: TensorEntry) -> torch.Tensor:
    target = torch.empty(entry.shape, dtype=getattr(torch, str(entry.dtype.torch_name)))
    reading.fill(entry, full_region(entry.shape), target)
    return target


def read_as_model(path: Path) -> tuple[dict[str, str], set[str]]:
    """Fingerprints by name in the model, tied ones included; and the names on disk that they are made of."""
    with open_source(path) as source:
        reading = RegionReader(source.files)
        found = {name: fingerprint(read(reading, entry)) for name, entry in source.tensors.items()}
        found |= {name: found[stored] for name, stored in source.find_tied_names().items()}
        return found, {each for names in source.stored_names.values() for each in names}


def held(theirs: Mapping[str, object]) -> dict[str, str]:
    """Fingerprints of what is in the state dict of a model."""
    tensors, stored = theirs["tensors"], theirs["stored"]
    assert isinstance(tensors, dict) and isinstance(stored, list)
    return {name: tensors[name] for name in stored}


@pytest.mark.parametrize("name", slow_but(EVERY, FAST))
def test_the_tensors_of_a_model_are_those_that_transformers_loads(judge: TransformersResults, name: str) -> None:
    expected = held(judge(name))
    found, used = read_as_model(judge.work / "hf" / name)
    assert found == expected
    assert used == set(read_hf(judge.work / "hf" / name))


@pytest.mark.parametrize("name", slow_but(EVERY, FAST))
def test_torch_fills_a_model_from_our_dcp_as_transformers_does(judge: TransformersResults, name: str) -> None:
    assert list_differences(judge(name, "stock-dcp"), judge(name)) == []
    assert read_as_model(judge.work / "dcp" / name)[0] == held(judge(name))


@pytest.mark.parametrize(
    ("name", "first", "second", "where"),
    [
        ("qwen3-moe", "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.experts.1.up_proj.weight",
         "model.layers.0.mlp.experts.gate_up_proj"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1.weight",
         "model.layers.0.block_sparse_moe.experts.0.w3.weight", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)  # fmt: skip
def test_exchanged_parts_of_a_fused_tensor_are_found(
    judge: TransformersResults, monkeypatch: pytest.MonkeyPatch, name: str, first: str, second: str, where: str
) -> None:
    """The chunks of two names on disk change places, as a wrong mapping would have them."""

    def exchanged(*args: Any, **how: Any) -> ModelView:
        seen = locate_archives(*args, **how)
        by_name = {entry.name: key for key, entry in seen.tensors.items()}
        one, other = by_name[first], by_name[second]
        tensors = dict(seen.tensors)
        for here, there in ((one, other), (other, one)):
            tensors[here] = seen.tensors[here]._replace(chunks=seen.tensors[there].chunks)
        return replace(seen, tensors=tensors)

    expected = held(judge(name))
    monkeypatch.setattr("ckptx.runtime.checkpointing.reading.locate_archives", exchanged)
    found, _ = read_as_model(judge.work / "hf" / name)
    assert [each for each in expected if found[each] != expected[each]] == [where]
