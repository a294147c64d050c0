"""A config that was edited beside a checkpoint: the original files come back, or the conversion is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ckptx
from ckptx.conversion import run_conversion
from ckptx.errors import CkptxError, InputError
from tests.conversion.test_renamed_tensors import CONFIG, both_spellings
from tests.support.checkpoint_writers import SINGLE, Value, tree_bytes, value, write_dcp, write_hf

SIZES = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 1,
    "intermediate_size": 12, "vocab_size": 10, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
BOTH = {"text_config": SIZES, "vision_config": SIZES}
WORDS = "vision_encoder.transformer.layers.0.attention"
BLOCK = "vision_model.transformer.resblocks.0.attn"
EXPERTS = "model.layers.0.mlp.experts"


class Op(NamedTuple):
    """An operation, tensors that it is about, and a config that it reads."""

    config: dict[str, Any]
    tensors: dict[str, Value]


def _tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Value]:
    return {name: value("BF16", *shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def _config(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [name], "model_type": kind, "tie_word_embeddings": False, **SIZES, **more}


_OF_LLAMA = CONFIG | {"rope_theta": 10000.0}
OPS = {
    "permute_rope of a trainer": Op(_OF_LLAMA, both_spellings()[0]),
    "permute_rope without head_dim": Op(
        _config("LlamaForCausalLM", "llama", head_dim=None),
        _tensors({f"model.layers.0.self_attn.{name}_proj.weight": (8 if name in "qo" else 4, 8) for name in "qkvo"}
                 | {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}),
    ),
    "permute_rope of a tower": Op(
        _config("MistralLarge4ForConditionalGeneration", "mistral_large4", **BOTH),
        _tensors({f"{WORDS}.{name}.weight": (16, 8) for name in ("wq", "wk", "wv")} | {f"{WORDS}.wo.weight": (8, 16)}),
    ),
    "chunk and permute_rope": Op(
        _config("Step3p7ForConditionalGeneration", "step3p7", **BOTH),
        _tensors({f"{BLOCK}.in_proj_weight": (48, 16), f"{BLOCK}.in_proj_bias": (48,)}),
    ),
    "split": Op(
        _config("Molmo2TextModel", "molmo2_text"),
        _tensors({"layers.0.self_attn.att_proj.weight": (32, 8), "layers.0.mlp.ff_proj.weight": (24, 8)}),
    ),
    "merge and concat": Op(
        _config("Qwen3MoeForCausalLM", "qwen3_moe", num_experts=2, moe_intermediate_size=6),
        _tensors({f"{EXPERTS}.{e}.{name}_proj.weight": ((8, 6) if name == "down" else (6, 8))
                  for e in range(2) for name in ("gate", "up", "down")} | {"model.embed_tokens.weight": (10, 8)}),
    ),
}  # fmt: skip
EDITS: dict[str, Any] = {
    "nothing": None,
    "num_attention_heads": 2,
    "num_key_value_heads": 4,
    "head_dim": 2,
    "vision_config.num_attention_heads": 2,
    "text_config.num_attention_heads": 2,
    "num_experts": 1,
    "rope_theta": 5.0,
    "torch_dtype": "float32",
    "architectures": ["FooForCausalLM"],
}
FORMATS = ("dcp disk", "dcp disk tp", "dcp model", "sharded", "torchtitan", "torchtitan tp")
PATHS = ("dcp2hf", "reshard dcp", "reshard sharded", "base")


def edited(path: Path, key: str, new: Any) -> None:
    """Edits one key of a config; what the config lacks is added."""
    config = json.loads(path.read_text())
    *parents, last = key.split(".")
    place = config
    for parent in parents:
        place = place.setdefault(parent, {})
    if key != "nothing":
        place[last] = new
    path.write_text(json.dumps(config, indent=2) + ("\n" if key == "nothing" else ""))


def write_format(root: Path, hf: Path, kind: str) -> Path | None:
    """The checkpoint in one format; None where the class has no such names."""
    try:
        if kind == "sharded":
            ckptx.reshard(hf, root, tp=2, to="safetensors", allow_config_mismatch=True)
        else:
            names = {"dcp model": "model", "torchtitan": "torchtitan", "torchtitan tp": "torchtitan"}.get(kind)
            mesh = {"tp": 2} if kind.endswith("tp") else {}
            ckptx.convert("hf2dcp", hf, root, names=names, allow_config_mismatch=True, **mesh)  # type: ignore[arg-type]
    except CkptxError:
        return None
    return root


CASES = list(product(OPS, EDITS, FORMATS, PATHS))


@pytest.mark.sampled(60)
@pytest.mark.parametrize(("op", "key", "kind", "path"), CASES)
def test_the_files_come_back_or_the_conversion_is_refused(
    tmp_path: Path, op: str, key: str, kind: str, path: str
) -> None:
    config, tensors = OPS[op]
    hf = write_hf(tmp_path / "in" / "hf", tensors, config=config)
    made = write_format(tmp_path / "made", hf, kind)
    if made is None:
        assert kind.startswith("torchtitan") and config["model_type"] not in ("llama", "qwen3_moe")
        return
    options: dict[str, Any] = {"allow_config_mismatch": True}
    if path == "base":  # the config beside the tensors is right, that of the base is edited
        shutil.copytree(hf, tmp_path / "base")
        edited(tmp_path / "base" / "config.json", key, EDITS[key])
        options["base"] = str(tmp_path / "base")
    else:
        edited(made / "config.json", key, EDITS[key])
    try:
        if path.startswith("reshard"):
            to = "dcp" if path == "reshard dcp" else "safetensors"
            ckptx.reshard(made, tmp_path / "again", to=to, tp=2, **options)
            made = tmp_path / "again"
        ckptx.convert("dcp2hf", made, tmp_path / "back", max_shard_size="5GB", **options)
    except InputError as error:
        assert "\n" not in str(error) and key != "nothing"
        is_read = path == "base" or (kind.startswith("dcp disk") and path != "reshard sharded")
        assert not (key in ("rope_theta", "torch_dtype") and is_read), "nothing that decides a byte was edited"
        assert not (tmp_path / "back").exists()
    except CkptxError:
        assert key == "architectures"
    else:
        _assert_equal(hf, tmp_path / "back")


@pytest.mark.parametrize(
    ("op", "key", "kind"),
    [
        ("permute_rope of a trainer", "num_attention_heads", "torchtitan"),
        ("permute_rope without head_dim", "num_attention_heads", "torchtitan tp"),
        ("permute_rope of a tower", "vision_config.num_attention_heads", "sharded"),
        ("chunk and permute_rope", "vision_config.num_attention_heads", "dcp model"),
    ],
)
def test_the_cases_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, key: str, kind: str) -> None:
    """Injected defect: without the check, the rows come out in another order."""
    monkeypatch.setattr(run_conversion, "check_recorded_config", lambda *given: None)
    config, tensors = OPS[op]
    hf = write_hf(tmp_path / "in" / "hf", tensors, config=config)
    made = write_format(tmp_path / "made", hf, kind)
    assert made is not None
    edited(made / "config.json", key, EDITS[key])
    ckptx.convert("dcp2hf", made, tmp_path / "back", allow_config_mismatch=True)
    with pytest.raises(AssertionError):
        _assert_equal(hf, tmp_path / "back")


def _assert_equal(hf: Path, back: Path) -> None:
    from tests.conversion.test_base_dtypes import written

    assert written(back) == written(hf)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_an_edit_that_decides_no_byte_is_no_reason_to_refuse(tmp_path: Path, op: str, kind: str) -> None:
    """Heads of no tensor that the class reorders; and every edit beside published names."""
    if op != "merge and concat" and not kind.startswith("dcp disk"):
        return
    config, tensors = OPS[op]
    hf = write_hf(tmp_path / "in" / "hf", tensors, config=config)
    made = write_format(tmp_path / "made", hf, kind)
    if made is None:
        return
    edited(made / "config.json", "rope_theta", 7.0)
    ckptx.convert("dcp2hf", made, tmp_path / "back", allow_config_mismatch=True)
    assert (tmp_path / "back" / SINGLE).read_bytes() == (hf / SINGLE).read_bytes()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (2, 2), (8, 2), (4, 1), (1, 1), (8, 4)])
@pytest.mark.parametrize("head_dim", [None, 6])
def test_torchtitans_files_without_a_manifest_have_to_fit_the_config(
    tmp_path: Path, heads: int, kv_heads: int, head_dim: int | None
) -> None:
    """Shapes alone can tell: a config of other heads is refused wherever it asks for other shapes."""
    _, titan = both_spellings()
    config = CONFIG | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
                       "intermediate_size": 14}  # fmt: skip
    made = write_dcp(tmp_path / "titan", titan, config=config)
    with pytest.raises(InputError):  # another product of heads and head_dim, or no whole number of rotary pairs
        ckptx.convert("dcp2hf", made, tmp_path / "back")
    made = write_dcp(tmp_path / "right", titan, config=CONFIG | {"intermediate_size": 14})
    ckptx.convert("dcp2hf", made, tmp_path / "back")
    assert tree_bytes(tmp_path / "back")[SINGLE]


@pytest.mark.parametrize("at", range(0, 160, 16))
@pytest.mark.parametrize("name", ["wq", "wk"])
@pytest.mark.parametrize("forged", [False, True])
def test_bytes_of_reordered_tensors_are_checked_when_the_files_come_back(
    tmp_path: Path, name: str, at: int, forged: bool
) -> None:
    """One bit of a permuted tensor flips on disk, with its archive's checksum or (`forged`) without one to object."""
    hf = write_hf(tmp_path / "hf", both_spellings()[0], config=CONFIG)
    ckptx.convert("hf2dcp", hf, tmp_path / "titan", names="torchtitan")
    tensor = both_spellings()[1][f"layers.1.attention.qkv_linear.{name}.weight"][2]
    file = next(path for path in (tmp_path / "titan").glob("*.distcp") if tensor in path.read_bytes())
    data = bytearray(file.read_bytes())
    begin = data.index(tensor)
    data[begin + at % len(tensor)] ^= 1
    if forged:
        import zlib

        recorded = zlib.crc32(tensor).to_bytes(4, "little")
        now = zlib.crc32(bytes(data[begin : begin + len(tensor)])).to_bytes(4, "little")
        assert recorded in data
        data = bytearray(bytes(data).replace(recorded, now))
    file.write_bytes(data)
    with pytest.raises(InputError, match="the bytes changed since they were converted" if forged else "CRC-32"):
        ckptx.convert("dcp2hf", tmp_path / "titan", tmp_path / "back")
    assert not (tmp_path / "back").exists()
