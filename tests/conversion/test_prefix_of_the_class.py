"""A prefix that the names of the class have themselves, such as `model.`, is not the prefix of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.optim.swa_utils import AveragedModel

import ckptx
from ckptx.errors import InputError, UsageError
from tests.support.models import bert, gpt2, gpt_neox, llama, t5

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Model -> prefix that its names have themselves.
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (llama, "model."),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), "model."),
    "gpt2": (gpt2, "transformer."),
    "gpt_neox": (gpt_neox, "gpt_neox."),
    "bert": (bert("BertForMaskedLM"), "bert."),
}
COMMANDS: dict[str, Callable[[Path, Path, str], Any]] = {
    "to-hf": lambda step, base, prefix: ckptx.convert("to-hf", step, step / "../out", base=base, source_prefix=prefix),
    "to-dcp": lambda step, base, prefix: ckptx.convert(
        "to-dcp", step, step / "../out", base=base, source_prefix=prefix
    ),
    "reshard": lambda step, base, prefix: ckptx.reshard(step, step / "../out", base=base, source_prefix=prefix, tp=2),
}


def write_step(root: Path, build: Callable[[], Any], key: str | None) -> None:
    """Write an HF checkpoint, and a DCP of the same model, whose state dict is under `key`."""
    torch.manual_seed(0)
    model = build()
    model.save_pretrained(root / "hf")
    state = model.state_dict()
    dcp.save(state if key is None else {key: state}, checkpoint_id=root / "step", no_dist=True)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("key", [None, "model", "policy"])
@pytest.mark.parametrize("name", MODELS)
def test_the_part_that_names_of_the_class_have_is_refused(
    name: str, key: str | None, command: str, tmp_path: Path
) -> None:
    build, own = MODELS[name]
    write_step(tmp_path, build, key)
    outer = "" if key is None else f"{key}."
    with pytest.raises(UsageError) as caught:
        COMMANDS[command](tmp_path / "step", tmp_path / "hf", outer + own)
    advice = f'pass --source-prefix "{outer}"' if outer else "leave out --source-prefix"
    assert f'begin with "{own}" themselves; {advice}' in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "step"]
    report = ckptx.convert("to-hf", tmp_path / "step", tmp_path / "out", base=tmp_path / "hf", source_prefix=outer)
    assert not report.dropped
    assert ckptx.verify(tmp_path / "hf", tmp_path / "out", strict=True).exit == 0


def test_a_model_without_such_names_takes_any_prefix(tmp_path: Path) -> None:
    write_step(tmp_path, t5, "encoder")
    ckptx.convert("to-hf", tmp_path / "step", tmp_path / "out", base=tmp_path / "hf", source_prefix="encoder.")
    assert ckptx.verify(tmp_path / "hf", tmp_path / "out").exit == 0


@pytest.mark.parametrize("prefix", [None, "ema.", "ema.module."])
def test_the_counter_of_an_averaged_model_is_dropped_with_a_reason(prefix: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    dcp.save({"ema": averaged.state_dict()}, checkpoint_id=tmp_path / "step", no_dist=True)
    report = ckptx.convert(
        "to-hf", tmp_path / "step", tmp_path / "out", base=tmp_path / "hf",
        **({} if prefix is None else {"source_prefix": prefix}),
    )  # fmt: skip
    assert [each["name"] for each in report.dropped] == ["ema.n_averaged"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == model.state_dict().keys()
    assert ckptx.verify(tmp_path / "hf", tmp_path / "out", strict=True).exit == 0


def test_a_tensor_of_that_name_in_an_hf_checkpoint_stays(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors") | {"n_averaged": torch.tensor(3)}
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    ckptx.convert("to-hf", tmp_path / "hf", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("key", "prefix", "error", "message"),
    [
        ("model", "model", UsageError, 'continue with "."; pass --source-prefix "model."'),
        ("a.b", "a.b", UsageError, 'continue with "."; pass --source-prefix "a.b."'),
        ("model", "module.", InputError, 'no tensor name begins with "module."'),
        ("model", "_orig_mod.", InputError, 'no tensor name begins with "_orig_mod."'),
        ("model", "ema.module.", InputError, 'no tensor name begins with "ema.module."'),
    ],
)
def test_a_prefix_that_no_model_has_is_refused(
    key: str, prefix: str, error: type[Exception], message: str, command: str, tmp_path: Path
) -> None:
    write_step(tmp_path, llama, key)
    with pytest.raises(error) as caught:
        COMMANDS[command](tmp_path / "step", tmp_path / "hf", prefix)
    assert message in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "step"]
