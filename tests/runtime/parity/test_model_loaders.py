"""The two sides of a run: tied on one and not on the other, windows, padding, and what is refused before a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptx.errors import InputError
from ckptx.options.verify import RunOptions
from ckptx.report.report import Log
from ckptx.runtime.parity import memory
from ckptx.runtime.parity.forward import verify_run
from ckptx.runtime.parity.model_loaders import make_loaders
from tests.support.models import EVERY, llama, randomize, read_hf, write

Head = Callable[[torch.Tensor], torch.Tensor] | None

HEADS: dict[str, tuple[bool, Head]] = {  # what the config says, and what is stored beside the embedding
    "tied": (True, None),
    "tied, stored equal": (True, lambda embedding: embedding),
    "tied, stored x 1.01": (True, lambda embedding: embedding * 1.01),
    "untied, equal": (False, lambda embedding: embedding),
    "untied, x 1.01": (False, lambda embedding: embedding * 1.01),
}
COMPUTES = {name: "x 1.01" in name for name in HEADS}  # by which head


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    torch.manual_seed(0)
    randomize(llama(tie_word_embeddings=True).float()).save_pretrained(root / "tied")  # type: ignore[operator]
    tensors = read_hf(root / "tied")
    config = json.loads((root / "tied" / "config.json").read_text())
    found = {}
    for name, (is_tied, head) in HEADS.items():
        found[name] = root / name
        found[name].mkdir(exist_ok=True)
        own = {} if head is None else {"lm_head.weight": head(tensors["model.embed_tokens.weight"]).clone()}
        save_file(tensors | own, found[name] / "model.safetensors", {"format": "pt"})
        (found[name] / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
    return found


def verified(reference: Path, checkpoint: Path, **settings: Any) -> dict[str, Any]:
    return verify_run(reference, checkpoint, RunOptions(**settings), Log()).to_dict()


@pytest.mark.sampled(13)
@pytest.mark.parametrize("checkpoint", HEADS)
@pytest.mark.parametrize("reference", HEADS)
def test_ties_are_judged_by_values(written: dict[str, Path], reference: str, checkpoint: str) -> None:
    """Not by the flags in the configs, nor by how many of the two names are stored."""
    found = verified(written[reference], written[checkpoint])
    is_equal = COMPUTES[reference] == COMPUTES[checkpoint]
    assert found["exit"] == (not is_equal), found["differing"]
    levels = {row["level"] for row in found["differing"]}
    assert levels == (set() if is_equal else {"bytes", "forward", "gradients"})
    assert {row["name"] for row in found["differing"] if row["level"] == "bytes"} <= {"lm_head.weight"}


def test_a_tie_on_one_side_alone_is_said(written: dict[str, Path]) -> None:
    (said,) = verified(written["tied"], written["untied, equal"])["notes"]
    assert said.startswith("lm_head.weight: tied in one checkpoint and separate in the other; compared as separate")
    assert verified(written["tied"], written["tied, stored equal"])["notes"] == []


def test_a_head_that_nobody_stores_is_refused(written: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((written["tied"] / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(read_hf(written["tied"]), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lm_head\.weight: not in the checkpoint"):
        verified(written["tied"], tmp_path)


def with_config(source: Path, to: Path, **changes: Any) -> Path:
    to.mkdir()
    save_file(read_hf(source), to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | changes))
    return to


def test_a_window_that_no_text_crosses_is_run_small(tmp_path: Path) -> None:
    """So a model that has none, or an implementation that forgets it, computes something else."""
    write(EVERY["mistral"], tmp_path / "plain")
    long = with_config(tmp_path / "plain", tmp_path / "long", sliding_window=4096)
    longer = with_config(tmp_path / "plain", tmp_path / "longer", sliding_window=4095)
    none = with_config(tmp_path / "plain", tmp_path / "none", sliding_window=None)
    same = verified(long, long)
    assert (same["exit"], same["attention_windows"]) == (0, {"sliding_window": [4096, 5]})
    assert {row["level"] for row in verified(long, longer)["differing"]} == {"config"}
    other = verified(long, none)
    assert {row["level"] for row in other["differing"]} == {"config", "forward", "gradients"}
    assert verified(none, none)["attention_windows"] == {}


def test_rows_have_padding_where_the_class_takes_a_mask(tmp_path: Path) -> None:
    write(EVERY["llama-untied"], tmp_path)
    _, second, _, seen = make_loaders(tmp_path, tmp_path, RunOptions())
    (inputs,) = second.make_batches(seen)
    assert inputs.batch["attention_mask"].tolist() == [[1] * 9 + [0] * 3, [1] * 12]
    assert (inputs.labels[0] == -100).tolist() == [False] * 9 + [True] * 3
    (plain,) = second.make_batches(seen._replace(takes_mask=False))
    assert plain.batch.keys() == {"input_ids"}


def test_what_does_not_fit_is_refused_before_it_has_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(EVERY["llama-untied"], tmp_path)
    monkeypatch.setattr(memory, "read_free_bytes", lambda device: 1000)
    with pytest.raises(Exception, match=r"the reference requires at least .* in up to 2 parts, and the limit is 900 B"):
        verified(tmp_path, tmp_path)
