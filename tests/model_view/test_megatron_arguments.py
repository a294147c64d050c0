"""The arguments that a Megatron checkpoint records are compared with config.json, and nothing in their pickle runs."""

from __future__ import annotations

import enum
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner

import ckptx
from ckptx.errors import CkptxError
from tests.support.megatron_layout import to_megatron
from tests.support.megatron_models import config_of, save_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class AttnBackend(enum.Enum):
    """An enum, as arguments of Megatron contain them."""

    auto = 1


def arguments_of(config: dict[str, Any], **changes: Any) -> Namespace:
    """Arguments of a run of Megatron-LM with this model."""
    arguments = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "rotary_base": int(config["rope_theta"]),
        "norm_epsilon": config["rms_norm_eps"],
        "attention_backend": AttnBackend.auto,
        "activation_func": torch.nn.functional.silu,
        "params_dtype": torch.bfloat16,
        "data_path": [Path("/data")],
        "multi_latent_attention": False,
    }
    return Namespace(**{**arguments, **changes})


def save_megatron(path: Path, tensors: dict[str, Tensor], common: Any, *, in_the_dcp: bool = False) -> Path:
    """Save as megatron-core does, with `common` in common.pt or as an object."""
    state = {**tensors, "common_state/shard_0_1": common} if in_the_dcp else tensors
    dcp.save(state, checkpoint_id=path, planner=DefaultSavePlanner(flatten_state_dict=False))
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(backend))
    if not in_the_dcp:
        torch.save(common, path / "common.pt")
    return path


def make_model(tmp_path: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return config, weights on the Hub, and tensors in Megatron's layout of a small Llama."""
    config = config_of("LlamaForCausalLM", **settings)
    weights = save_model(tmp_path / "hf", config)
    return config, weights, to_megatron(weights, config, rows=26)


@pytest.mark.parametrize("in_the_dcp", [False, True])
def test_equal_arguments_are_no_news(in_the_dcp: bool, tmp_path: Path) -> None:
    config, weights, tensors = make_model(tmp_path)
    common = {"args": arguments_of(config), "iteration": 7}
    source = save_megatron(tmp_path / "megatron", tensors, common, in_the_dcp=in_the_dcp)
    report = ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert not any("training run" in note for note in report.notes)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("in_the_dcp", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 16},
            "num_attention_heads 2, but config.json",
        ),
        ({"num_attention_heads": 4, "num_query_groups": 4}, "num_query_groups 4, but config.json has num_key_value_h"),
        ({"group_query_attention": False}, "num_query_groups 4, but config.json has num_key_value_heads 2"),
        ({"kv_channels": 4}, "kv_channels 4, but config.json has head_dim 8"),
    ],
)
def test_a_config_with_other_heads_is_refused(
    changes: dict[str, Any], message: str, in_the_dcp: bool, tmp_path: Path
) -> None:
    config, _, tensors = make_model(tmp_path)
    common = {"args": arguments_of(config, **changes)}
    source = save_megatron(tmp_path / "megatron", tensors, common, in_the_dcp=in_the_dcp)
    with pytest.raises(CkptxError) as caught:
        ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert message in str(caught.value) and "pass --base PATH with the config" in str(caught.value)
    assert caught.value.exit_code == 3 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "rotary_interleaved"])
def test_values_with_another_meaning_are_refused(name: str, tmp_path: Path) -> None:
    config, _, tensors = make_model(tmp_path)
    source = save_megatron(tmp_path / "megatron", tensors, {"args": arguments_of(config, **{name: True})})
    with pytest.raises(CkptxError, match=f"the training run had {name}, so .* which is not converted") as caught:
        ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert caught.value.exit_code == 4 and not (tmp_path / "out").exists()
    assert ckptx.convert("to-hf", source, tmp_path / "out", base="none").exit == 0


def test_the_wrong_base_whose_shapes_are_equal_is_refused(tmp_path: Path) -> None:
    """Without the arguments, the rows of q, k and v would be moved to wrong heads, with exit 0."""
    config, _, tensors = make_model(tmp_path)
    other = {**config, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(other))
    (tmp_path / "hf" / "model.safetensors").unlink()
    unrecorded = save_megatron(tmp_path / "unrecorded", tensors, {"iteration": 7})
    assert ckptx.convert("to-hf", unrecorded, tmp_path / "wrong", base=tmp_path / "hf").exit == 0
    recorded = save_megatron(tmp_path / "recorded", tensors, {"args": arguments_of(config)})
    with pytest.raises(CkptxError, match=r"num_attention_heads 4, but config\.json has num_attention_heads 2"):
        ckptx.convert("to-hf", recorded, tmp_path / "out", base=tmp_path / "hf")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"rotary_base": 500000}, "config.json has rope_theta 10000.0, but the training run had rotary_base 500000"),
        ({"norm_epsilon": 1e-5}, "config.json has rms_norm_eps 1e-06, but the training run had norm_epsilon 1e-05"),
        (
            {"untie_embeddings_and_output_weights": False},
            "has tie_word_embeddings false, but the training run had untie_embeddings_and_output_weights False",
        ),
    ],
)
def test_arguments_that_change_the_computation_are_noted(changes: dict[str, Any], note: str, tmp_path: Path) -> None:
    config, _, tensors = make_model(tmp_path)
    source = save_megatron(tmp_path / "megatron", tensors, {"args": arguments_of(config, **changes)})
    report = ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert report.exit == 0 and [each for each in report.notes if note in each]
    assert [each for each in ckptx.verify(tmp_path / "hf", source).notes if note in each]


@pytest.mark.parametrize(
    "common",
    [
        {"iteration": 7}, {"args": None}, {"args": {"num_attention_heads": 2}}, [1, 2], {"args": Path("/x")},
        {"args": Namespace()}, {"args": Namespace(num_attention_heads=True)},
        {"args": Namespace(num_attention_heads="2")},
        {"args": Namespace(num_attention_heads=4, num_query_groups=None, kv_channels=None, group_query_attention=True)},
    ],
    ids=str,
)  # fmt: skip
def test_without_usable_arguments_the_config_decides(common: Any, tmp_path: Path) -> None:
    _, _, tensors = make_model(tmp_path)
    source = save_megatron(tmp_path / "megatron", tensors, common)
    report = ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert report.exit == 0 and not any("training run" in note for note in report.notes)


def test_a_damaged_file_is_noted(tmp_path: Path) -> None:
    config, _, tensors = make_model(tmp_path)
    source = save_megatron(tmp_path / "megatron", tensors, {"args": arguments_of(config)})
    content = (source / "common.pt").read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"text", content.replace(b"Namespace", b"Nam\xffspace")):
        (source / "common.pt").write_bytes(damaged)
        report = ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf", overwrite=True)
        assert report.exit == 0
        assert [each for each in report.notes if each.startswith("arguments of the training run not compared with")]


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_nothing_in_the_pickle_runs(tmp_path: Path) -> None:
    config, _, tensors = make_model(tmp_path)
    arguments = arguments_of(config, rotary_base=500000, extra=Hostile(tmp_path / "ran"))
    source = save_megatron(tmp_path / "megatron", tensors, {"args": arguments, "more": Hostile(tmp_path / "ran")})
    report = ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf")
    assert not (tmp_path / "ran").exists()
    assert any("rotary_base 500000" in note for note in report.notes)


def test_latent_attention_has_no_groups_of_heads(tmp_path: Path) -> None:
    config, _, tensors = make_model(tmp_path)
    arguments = arguments_of(config, num_query_groups=1, kv_channels=999, multi_latent_attention=True)
    source = save_megatron(tmp_path / "megatron", tensors, {"args": arguments})
    assert ckptx.convert("to-hf", source, tmp_path / "out", base=tmp_path / "hf").exit == 0
