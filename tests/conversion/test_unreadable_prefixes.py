"""`--prefix` is refused if the model under it would not be found, and otherwise the model comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import ckptx
from ckptx.errors import UsageError
from ckptx.untrusted.limits import MAX_NAME_LENGTH
from tests.conversion.steps import CONFIG
from tests.support.checkpoint_writers import SINGLE, llama, write_hf
from tests.support.torch_dcp import metadata

WITHOUT_CLASS = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
UNKNOWN = {**CONFIG, "architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
SECOND = "names with this prefix would be read as training state"


@pytest.mark.parametrize("config", [CONFIG, UNKNOWN, None], ids=["llama", "unknown class", "no config"])
@pytest.mark.parametrize("prefix", ["app.", "model.", "a.b.net."])
def test_the_model_comes_back_from_under_a_prefix(tmp_path: Path, prefix: str, config: dict[str, Any] | None) -> None:
    source = write_hf(tmp_path / "hf", llama(), config=config)
    report = ckptx.convert("to-dcp", source, tmp_path / "dcp", prefix=prefix)
    assert metadata(tmp_path / "dcp").keys() == {prefix + name for name in llama()}
    assert report.output_prefix == prefix and report.prefix is None
    options: dict[str, Any] = (
        {} if config is CONFIG else {"source_prefix": prefix, "base": source if config else "none"}
    )
    ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "back", **options)
    found, expected = load_file(tmp_path / "back" / SINGLE), load_file(source / SINGLE)
    assert found.keys() == expected.keys() and all(found[name].equal(each) for name, each in expected.items())


@pytest.mark.parametrize(
    ("prefix", "config", "reason"),
    [
        ("a.*.", CONFIG, 'a component "*" stands for an index where names are looked up'),
        ("_orig_mod.", CONFIG, 'the wrapper "_orig_mod." would be removed from names when the output is read'),
        ("state.module.", CONFIG, 'the wrapper "module." would be removed from names when the output is read'),
        ("optimizer.", CONFIG, SECOND),
        ("optimizer.", UNKNOWN, SECOND),
        ("optimizer.", None, SECOND),
        ("lr_scheduler.", UNKNOWN, SECOND),
    ],
)
def test_a_prefix_that_hides_the_model_is_refused(
    tmp_path: Path, prefix: str, config: dict[str, Any] | None, reason: str
) -> None:
    source = write_hf(tmp_path / "hf", llama(), config=config)
    with pytest.raises(UsageError) as caught:
        ckptx.convert("to-dcp", source, tmp_path / "dcp", prefix=prefix)
    assert str(caught.value) == f'--prefix "{prefix}": {reason}; choose another prefix, such as "app."'
    assert not (tmp_path / "dcp").exists()


@pytest.mark.parametrize("extra", [0, 1])
def test_a_prefix_is_refused_from_the_first_name_that_is_too_long(tmp_path: Path, extra: int) -> None:
    source = write_hf(tmp_path / "hf", llama(), config=CONFIG)
    prefix = "a" * (MAX_NAME_LENGTH - max(map(len, llama())) + extra - 1) + "."
    if not extra:
        ckptx.convert("to-dcp", source, tmp_path / "dcp", prefix=prefix)
        assert max(map(len, metadata(tmp_path / "dcp"))) == MAX_NAME_LENGTH
        return
    with pytest.raises(UsageError) as caught:
        ckptx.convert("to-dcp", source, tmp_path / "dcp", prefix=prefix)
    number, limit = f"{MAX_NAME_LENGTH + 1:,}", f"{MAX_NAME_LENGTH:,}"
    assert f"the longest name would have {number} characters, at most {limit} are allowed" in str(caught.value)


@pytest.mark.parametrize("prefix", ["model.", "app.", "a.b."])
@pytest.mark.parametrize("model_type", ["llama", None])
def test_a_class_that_the_config_does_not_name_must_be_inferred_under_the_prefix(
    tmp_path: Path, model_type: str | None, prefix: str
) -> None:
    config = {**WITHOUT_CLASS, **({"model_type": model_type} if model_type else {})}
    source = write_hf(tmp_path / "hf", llama(), config=config)
    if model_type is None:
        with pytest.raises(UsageError) as caught:
            ckptx.convert("to-dcp", source, tmp_path / "dcp", prefix=prefix)
        assert str(caught.value) == (
            f'--prefix "{prefix}": config.json names no class, and the class cannot be inferred from names with this '
            'prefix; choose another prefix, such as "app."'
        )
        return
    report = ckptx.convert("to-dcp", source, tmp_path / "dcp", prefix=prefix)
    assert report.architecture is not None and report.architecture["class"] == "LlamaForCausalLM"
    ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "back")
    assert load_file(tmp_path / "back" / SINGLE).keys() == llama().keys()
