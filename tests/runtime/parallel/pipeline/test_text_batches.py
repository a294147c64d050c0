"""The batches that find what stages send each other: a text, and one with padding if the class can mask it."""

from __future__ import annotations

import pytest
import torch

from ckptx.runtime.parallel.pipeline.plan import make_text_batches
from tests.support.staged_models import build_deep_model

MASKED = ("llama-tied", "gpt2", "gemma3", "mixtral", "bert-mlm", "mamba", "t5")


@pytest.mark.parametrize("name", MASKED)
def test_a_class_with_a_mask_gets_a_batch_with_padding(name: str) -> None:
    model = build_deep_model(name)
    plain, padded = make_text_batches(model)
    assert "attention_mask" not in plain
    mask = padded["attention_mask"]
    assert mask.shape == padded["input_ids"].shape == plain["input_ids"].shape
    assert mask.dtype == torch.int64 and mask.sum(1).tolist() == [mask.shape[1] - 3, mask.shape[1]]
    assert not mask[0, -3:].any(), "at the end of the first sequence"
    assert {key for key in padded if key != "attention_mask"} == set(plain)
    assert all(torch.equal(padded[key], plain[key]) for key in plain)


def test_a_class_without_a_mask_or_without_text_gets_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_deep_model("llama-tied")

    def forward(self: object, input_ids: torch.Tensor) -> None:
        raise AssertionError("batches are made without running the model")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", forward)
        assert [set(each) for each in make_text_batches(model)] == [{"input_ids"}]
    audio = {"input_features": torch.ones(2, 3)}
    monkeypatch.setattr("ckptx.runtime.parallel.pipeline.plan.make_text_batch", lambda model: audio)
    assert make_text_batches(model) == [audio]
