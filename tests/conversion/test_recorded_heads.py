"""A config with other heads than the recorded one is refused if the rows of a tensor depend on them, else accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import ckptx
from ckptx.errors import InputError
from tests.conversion.steps import TIED
from tests.conversion.test_recorded_config import OPS
from tests.conversion.test_renamed_tensors import CONFIG, both_spellings
from tests.support.checkpoint_writers import SINGLE, llama, write_hf

QUERY = "layers.*.attention.qkv_linear.wq.weight"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", both_spellings()[0], config=CONFIG)


def with_config(root: Path, copy: Path, **changes: Any) -> Path:
    """Copy a checkpoint and change its config; None removes a key."""
    shutil.copytree(root, copy)
    config = {**json.loads((root / "config.json").read_text()), **changes}
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (copy / "config.json").write_text(text)
    return copy


# Other heads with the same rows in all.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
MORE_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 2}


@pytest.mark.parametrize("command", ["to-hf", "reshard"])
@pytest.mark.parametrize("changes", [HEADS, MORE_HEADS], ids=["fewer", "more"])
def test_an_edited_config_next_to_torchtitans_tensors_is_refused(
    hf: Path, tmp_path: Path, changes: dict[str, Any], command: str
) -> None:
    ckptx.convert("to-dcp", hf, tmp_path / "made", names="torchtitan")
    made = with_config(tmp_path / "made", tmp_path / "edited", **changes)
    with pytest.raises(InputError) as caught:
        if command == "to-hf":
            ckptx.convert("to-hf", made, tmp_path / "back")
        else:
            ckptx.reshard(made, tmp_path / "back", tp=2, to="safetensors")
    assert str(caught.value) == (
        f"{made}/config.json: differs from the config that ckptx.json records, which sets the order of rows in tensors "
        f'("{QUERY}" and 3 more); restore it, or pass --base PATH with the config that the tensors were written with'
    )
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("changes", [HEADS, MORE_HEADS], ids=["fewer", "more"])
def test_a_base_with_other_heads_than_the_recorded_config_is_refused(
    hf: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    ckptx.convert("to-dcp", hf, tmp_path / "made", names="torchtitan")
    base = with_config(hf, tmp_path / "base", **changes)
    with pytest.raises(InputError) as caught:
        ckptx.convert("to-hf", tmp_path / "made", tmp_path / "back", base=base)
    assert str(caught.value) == (
        f'{base}/config.json: gives {changes["num_attention_heads"]} heads for "{QUERY}", but the tensors were written '
        "with a config.json that gives 4, and the order of rows depends on this number; pass --base PATH with the "
        "model that they came from"
    )


def test_the_base_counts_if_the_recorded_config_is_gone(hf: Path, tmp_path: Path) -> None:
    """The config next to the tensors was edited, and nothing else tells which config is the right one."""
    ckptx.convert("to-dcp", hf, tmp_path / "made", names="torchtitan")
    made = with_config(tmp_path / "made", tmp_path / "edited", **HEADS)
    ckptx.convert("to-hf", made, tmp_path / "back", base=with_config(hf, tmp_path / "base", comment="same heads"))
    assert_equal(tmp_path / "back", hf)


def assert_equal(found_root: Path, expected_root: Path) -> None:
    found, expected = load_file(found_root / SINGLE), load_file(expected_root / SINGLE)
    assert found.keys() == expected.keys() and all(found[name].equal(each) for name, each in expected.items())


@pytest.mark.parametrize("names", ["torchtitan", "model", "hf"])
@pytest.mark.parametrize("changes", [{"rope_theta": 7.0}, {"comment": "edited"}])
def test_a_base_that_differs_in_other_numbers_is_accepted(
    hf: Path, tmp_path: Path, names: str, changes: dict[str, Any]
) -> None:
    ckptx.convert("to-dcp", hf, tmp_path / "made", names=names)
    base = with_config(hf, tmp_path / "base", **changes)
    ckptx.convert("to-hf", tmp_path / "made", tmp_path / "back", base=base)
    assert_equal(tmp_path / "back", hf)


@pytest.mark.parametrize("names", ["model", "hf"])
def test_heads_do_not_matter_under_names_whose_rows_do_not_depend_on_them(hf: Path, tmp_path: Path, names: str) -> None:
    ckptx.convert("to-dcp", hf, tmp_path / "made", names=names)
    made = with_config(tmp_path / "made", tmp_path / "edited", **HEADS)
    ckptx.convert("to-hf", made, tmp_path / "back", allow_config_mismatch=True)
    assert (tmp_path / "back" / SINGLE).read_bytes() == (hf / SINGLE).read_bytes()


def test_a_base_of_an_unknown_class_is_refused_for_tensors_without_disk_names(tmp_path: Path) -> None:
    config, tensors = OPS["merge and concat"]
    hf = write_hf(tmp_path / "hf", tensors, config=config)
    ckptx.convert("to-dcp", hf, tmp_path / "made", names="model", allow_config_mismatch=True)
    base = with_config(hf, tmp_path / "base", architectures=["FooForCausalLM"], model_type="foo")
    with pytest.raises(InputError) as caught:
        ckptx.convert("to-hf", tmp_path / "made", tmp_path / "back", base=base, allow_config_mismatch=True)
    assert str(caught.value) == (
        f"{base}/config.json: its class has no disk names (as on the Hub) for tensors of the checkpoint "
        '("model.layers.0.mlp.experts.gate_up_proj" and 1 more); pass --base PATH with the model that they came from'
    )


def test_a_base_of_a_class_that_knows_no_tensor_is_refused_as_well(tmp_path: Path) -> None:
    config, tensors = OPS["merge and concat"]
    hf = write_hf(tmp_path / "hf", tensors, config=config)
    ckptx.convert("to-dcp", hf, tmp_path / "made", names="model", allow_config_mismatch=True)
    base = with_config(hf, tmp_path / "base", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    with pytest.raises(
        InputError, match=r"its class has no disk names .* \(.*gate_up_proj.* and 1 more\); pass --base"
    ):
        ckptx.convert("to-hf", tmp_path / "made", tmp_path / "back", base=base, allow_config_mismatch=True)


def test_a_tied_name_that_the_files_lacked_needs_no_disk_name(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", llama(head=False), config=TIED)
    ckptx.convert("to-dcp", hf, tmp_path / "made")
    base = with_config(hf, tmp_path / "base", architectures=["FooForCausalLM"], model_type="foo")
    ckptx.convert("to-hf", tmp_path / "made", tmp_path / "back", base=base, allow_config_mismatch=True)
    found, expected = load_file(tmp_path / "back" / SINGLE), load_file(hf / SINGLE)
    assert found.keys() - expected.keys() <= {"lm_head.weight"}
    assert all(found[name].equal(each) for name, each in expected.items())
