"""`--dtype base`, and what config.json says of dtypes: loading by it must not round what the files hold."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.api.convert import convert
from ckptx.api.reshard import reshard
from ckptx.errors import UsageError
from ckptx.formats.registry import open_checkpoint
from ckptx.storage.files import FilePool
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf

SHAPES = {name: tensor[1] for name, tensor in llama(layers=1).items()}
SIZES = {
    "hidden_size": 8, "intermediate_size": 24, "vocab_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
NO_PLAIN_FLOATS = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I64", "BOOL")
FLOATS = ("BF16", "F16", "F32")
# What a dtype that a config names can hold.
HELD = {"bfloat16": {"BF16"}, "float16": {"F16"}, "float32": {"BF16", "F16", "F32"}}
ORDER = sorted(SHAPES)


def numbers(dtype: str, shape: tuple[int, ...], seed: int) -> Value:
    """A tensor of small whole numbers, which every float dtype holds: casts between them lose nothing."""
    values = np.random.default_rng(seed).integers(-128, 129, shape).astype(np.float32)
    return dtype, shape, encoded(values, dtype)


def encoded(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F16": np.float16, "F32": np.float32}[dtype]).tobytes()


def model(dtypes: Mapping[str, str]) -> dict[str, Value]:
    return {name: numbers(dtypes[name], SHAPES[name], seed) for seed, name in enumerate(ORDER)}


def config(**dtypes: str) -> dict[str, Any]:
    plain = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    return {**plain, **SIZES, "nested_config": {"size": 3}, **dtypes}


def written(root: Path) -> dict[str, Value]:
    catalog = open_checkpoint(root)
    with FilePool(root) as files:
        return {
            name: (entry.dtype.name, entry.shape, b"".join(files.read(*chunk[1:4]) for chunk in entry.chunks))
            for name, entry in catalog.tensors.items()
        }


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def dtypes_of(choices: tuple[str, ...]) -> st.SearchStrategy[dict[str, str]]:
    return st.one_of(
        st.sampled_from(choices).map(lambda dtype: dict.fromkeys(SHAPES, dtype)),
        st.fixed_dictionaries({name: st.sampled_from(choices) for name in SHAPES}),
    )


@given(dtypes_of(FLOATS), dtypes_of(FLOATS), st.sampled_from(sorted(HELD)), st.sampled_from(["dtype", "torch_dtype"]))
@settings(max_examples=60, deadline=None)
def test_a_config_holds_whatever_training_changed(
    before: dict[str, str], after: dict[str, str], said: str, key: str
) -> None:
    with scratch() as root:
        base = write_hf(root / "base", model(before), config=config(**{key: said}))
        report = convert("dcp2hf", write_dcp(root / "step", model(after)), root / "hf", base=str(base))
        assert written(root / "hf") == model(after)
        text = (root / "hf" / "config.json").read_bytes()
        now = json.loads(text)[key]
        changed = {after[name] for name in SHAPES if after[name] != before[name]}
        assert all(dtype in HELD[now] for dtype in changed), "loading by this config rounds what training made"
        if changed <= HELD[said]:
            assert text == (base / "config.json").read_bytes(), "edited without need"
            assert report.config_edits == []
        else:
            assert report.config_edits == [{"key": key, "before": said, "after": now}]
            settled = {dtype for dtype in after.values() if dtype in HELD[said]}
            narrowest = next(name for name in HELD if changed - HELD[said] | settled <= HELD[name])
            assert now == narrowest, "wider than need be"


@given(dtypes_of(FLOATS), st.sampled_from(sorted(HELD)))
@settings(max_examples=40, deadline=None)
def test_without_a_base_the_config_holds_what_the_files_mostly_hold(dtypes: dict[str, str], said: str) -> None:
    with scratch() as root:
        step = write_dcp(root / "step", model(dtypes), config=config(dtype=said))
        convert("dcp2hf", step, root / "hf")
        now = json.loads((root / "hf" / "config.json").read_text())["dtype"]
        elements = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
        lost = sum(elements[name] for name in SHAPES if dtypes[name] not in HELD[said])
        if 2 * lost < sum(elements.values()) or not lost:
            assert now == said
        else:
            assert {dtypes[name] for name in SHAPES} <= HELD[now]


@given(dtypes_of(FLOATS), st.sampled_from(sorted(HELD)), st.sampled_from([None, "10KB", "1KB"]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_nobody_trained_keeps_its_config_to_the_byte(
    dtypes: dict[str, str], said: str, size: str | None, through_shards: bool
) -> None:
    """Published configs do not always say what is in the files; a conversion alone is no reason to correct them."""
    with scratch() as root:
        hf = write_hf(root / "hf", model(dtypes), config=config(torch_dtype=said))
        convert("hf2dcp", hf, root / "made")
        if through_shards:
            reshard(root / "made", root / "shards", tp=2, to="safetensors")
            assert (root / "shards" / "config.json").read_bytes() == (hf / "config.json").read_bytes()
        convert("dcp2hf", root / ("shards" if through_shards else "made"), root / "back", max_shard_size=size)
        assert (root / "back" / "config.json").read_bytes() == (hf / "config.json").read_bytes()
        assert written(root / "back") == model(dtypes)


@given(
    dtypes_of(FLOATS),
    dtypes_of(FLOATS),
    st.sets(st.sampled_from(ORDER), max_size=4),
    st.sampled_from(["dcp2hf", "reshard"]),
)
@settings(max_examples=60, deadline=None)
def test_dtype_base_gives_every_tensor_the_dtype_it_had(
    before: dict[str, str], after: dict[str, str], lacking: set[str], command: str
) -> None:
    lacking -= {"lm_head.weight", "model.embed_tokens.weight"}  # without which it would be another model
    expected = {name: after[name] if name in lacking else before[name] for name in SHAPES}
    with scratch() as root:
        published = {name: tensor for name, tensor in model(before).items() if name not in lacking}
        base = write_hf(root / "base", published, config=config(dtype="float32"))
        step = write_dcp(root / "step", model(after))
        options: dict[str, Any] = {"base": str(base), "dtype": "base"}
        if lacking and "allow_config_mismatch" in _options():
            options["allow_config_mismatch"] = True
        if command == "dcp2hf":
            report = convert("dcp2hf", step, root / "out", **options)
        else:
            report = reshard(step, root / "out", to="safetensors", **options)
        assert written(root / "out") == model(expected)
        assert (root / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()
        said = report.base_dtypes
        assert (said["matching"], said["not_in_base"], said["quantized_in_base"]) == (
            len(SHAPES) - len(lacking),
            sorted(lacking),
            [],
        )
        assert any("not in the base, dtype unchanged" in line for line in report.notes) is bool(lacking)


def _options() -> set[str]:
    from ckptx.options.conversion import ReshardOptions
    from ckptx.options.option import settings_of

    return set(settings_of(ReshardOptions))


@pytest.mark.parametrize(
    ("there", "other"),
    [("base", "F4"), *((there, other) for there in ("base", "step") for other in NO_PLAIN_FLOATS)],
)
def test_dtype_base_touches_plain_floats_alone(tmp_path: Path, there: str, other: str) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    plain, odd = model(dict.fromkeys(SHAPES, "F32")), value(other, *SHAPES[name], seed=9)
    base = model(dict.fromkeys(SHAPES, "BF16")) | ({name: odd} if there == "base" else {})
    step = plain | ({name: odd} if there == "step" else {})
    write_hf(tmp_path / "base", base)
    report = convert(
        "dcp2hf", write_dcp(tmp_path / "step", step), tmp_path / "hf", base=str(tmp_path / "base"), dtype="base"
    )
    found = written(tmp_path / "hf")
    assert found[name] == step[name]
    assert {tensor[0] for each, tensor in found.items() if each != name} == {"BF16"}
    assert report.base_dtypes["quantized_in_base"] == ([name] if there == "base" else [])
    assert any("quantized in the base, dtype unchanged" in line for line in report.notes) is (there == "base")


@pytest.mark.parametrize("how", [{}, {"base": "none"}, {"base": "config alone"}])
def test_dtype_base_without_the_dtypes_of_a_base_is_a_mistake(tmp_path: Path, how: dict[str, str]) -> None:
    step = write_dcp(tmp_path / "step", llama(layers=1), config=config())
    if how.get("base") == "config alone":
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "config.json").write_text(json.dumps(config()))
        how = {"base": str(tmp_path / "config")}
    with pytest.raises(UsageError, match="--dtype base: the dtypes of the base are unknown"):
        convert("dcp2hf", step, tmp_path / "hf", dtype="base", **how)
    hf = write_hf(tmp_path / "published", llama(layers=1))
    with pytest.raises(UsageError, match="--dtype base: the dtypes of the base are unknown"):
        convert("hf2dcp", hf, tmp_path / "dcp", dtype="base")
    assert not (tmp_path / "hf").exists() and not (tmp_path / "dcp").exists()


def test_an_explicit_dtype_is_said_even_when_nothing_had_to_be_cast(tmp_path: Path) -> None:
    write_hf(tmp_path / "base", model(dict.fromkeys(SHAPES, "BF16")), config=config(dtype="bfloat16"))
    step = write_dcp(tmp_path / "step", model(dict.fromkeys(SHAPES, "F32")))
    report = convert("dcp2hf", step, tmp_path / "hf", base=str(tmp_path / "base"), dtype="fp32")
    assert report.config_edits == [{"key": "dtype", "before": "bfloat16", "after": "float32"}]


@pytest.mark.parametrize("names", ["hf", "model", "torchtitan"])
def test_what_a_base_keeps_in_float32_is_kept_under_any_names(tmp_path: Path, names: str) -> None:
    """The names that are written need not be those of the base."""
    mixed = {name: "F32" if "norm" in name else "BF16" for name in SHAPES}
    base = write_hf(tmp_path / "base", model(mixed), config=config(dtype="bfloat16"))
    step = write_dcp(tmp_path / "step", model(dict.fromkeys(SHAPES, "F32")))
    for dtype in ("bf16", "base"):
        convert("dcp2hf", step, tmp_path / f"as-{dtype}", base=str(base), dtype=dtype, names=names)
        found = {name: tensor[0] for name, tensor in written(tmp_path / f"as-{dtype}").items()}
        assert {name for name, said in found.items() if said == "F32"} == {name for name in found if "norm" in name}
