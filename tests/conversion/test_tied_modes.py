"""`--tied` and `--tie-missing`: which names an output stores, which share bytes, and what the report lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import ckptx
from ckptx.errors import InputError
from tests.conversion.steps import CONFIG, TIED
from tests.support.checkpoint_writers import SINGLE, Value, llama, write_hf
from tests.support.torch_dcp import load, metadata, payload_bytes, raw

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEAD_BYTES = len(llama()[HEAD][2])


def tensors(kind: str) -> dict[str, Value]:
    """Return a model that stores both names, equal or different, or only one of them."""
    found = llama()
    if kind == "equal":
        found[HEAD] = found[EMBED]
    if kind == "embedding":
        del found[HEAD]
    if kind == "head":
        del found[EMBED]
    return found


def vocabulary(root: Path) -> dict[str, bytes]:
    """Return the bytes of embedding and head, as stock torch or safetensors reads them."""
    if (root / ".metadata").exists():
        found = load(root, [name for name in metadata(root) if name in (EMBED, HEAD)])
    else:
        found = load_file(root / SINGLE)
    return {name: raw(each) for name, each in found.items() if name in (EMBED, HEAD)}


@pytest.mark.parametrize("tied", ["auto", "copy", "drop"])
@pytest.mark.parametrize("kind", ["equal", "embedding", "head"])
def test_names_in_hf_files(tmp_path: Path, kind: str, tied: str) -> None:
    source = write_hf(tmp_path / "hf", tensors(kind), config=TIED)
    ckptx.convert("to-dcp", source, tmp_path / "dcp")
    report = ckptx.convert("to-hf", tmp_path / "dcp", tmp_path / "out", tied=tied)
    kept = {"equal": EMBED, "embedding": EMBED, "head": HEAD}[kind]
    expected = {EMBED, HEAD}
    if tied == "drop":
        expected = {EMBED}
    if tied == "auto":  # the original files come back
        expected = {EMBED, HEAD} if kind == "equal" else {kept}
    assert vocabulary(tmp_path / "out") == dict.fromkeys(expected, tensors(kind)[kept][2])
    (tie,) = report.ties
    assert tie["action"] == ("copy" if len(expected) == 2 else "single")
    assert tie["output_names"] == [name if name in expected else None for name in (HEAD, EMBED)]
    assert report.tensors == len(llama()) - 2 + len(expected)


@pytest.mark.parametrize("tied", ["auto", "alias", "copy", "drop"])
@pytest.mark.parametrize("kind", ["equal", "embedding", "head"])
def test_names_in_a_dcp(tmp_path: Path, kind: str, tied: str) -> None:
    source = write_hf(tmp_path / "hf", tensors(kind), config=TIED)
    report = ckptx.convert("to-dcp", source, tmp_path / "out", tied=tied)
    kept = HEAD if kind == "head" else EMBED
    expected = {EMBED} if tied == "drop" else {EMBED, HEAD}
    assert vocabulary(tmp_path / "out") == dict.fromkeys(expected, tensors(kind)[kept][2])
    (tie,) = report.ties
    assert tie["action"] == {"auto": "alias", "alias": "alias", "copy": "copy", "drop": "single"}[tied]
    assert tie["output_names"] == [name if name in expected else None for name in (HEAD, EMBED)]
    assert len(report.aliases) == (tied in ("auto", "alias"))
    assert {*report.aliases.items()} <= {(HEAD, EMBED), (EMBED, HEAD)}
    ckptx.convert("to-dcp", source, tmp_path / "copy", tied="copy")
    assert payload_bytes(tmp_path / "copy") - payload_bytes(tmp_path / "out") >= (0 if tied == "copy" else HEAD_BYTES)
    count = {"source": len(tensors(kind)), "written": len(llama()) - 1, "tied": int(kind == "equal")}
    if tied == "copy" and kind == "equal":
        count |= {"written": len(llama()) - 1, "tied": 1}
    assert {name: report.ledger[name] for name in count} == count


@pytest.mark.parametrize("tied", ["auto", "copy", "drop"])
@pytest.mark.parametrize("kind", ["embedding", "equal", "different"])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_a_missing_head_that_the_config_does_not_tie_is_stored_under_both_names(
    tmp_path: Path, config: dict[str, Any], kind: str, tied: str
) -> None:
    """No loader would tie it."""
    source = write_hf(tmp_path / "hf", tensors(kind), config=config)
    if tied == "drop" and kind == "different" and config is TIED:
        with pytest.raises(InputError, match="--tied drop would lose one"):
            ckptx.convert("to-hf", source, tmp_path / "out", tied=tied, tie_missing=True)
        return
    report = ckptx.convert("to-hf", source, tmp_path / "out", tied=tied, tie_missing=True)
    found = vocabulary(tmp_path / "out")
    is_tied = kind == "embedding" or (kind == "equal" and config is TIED)
    if not is_tied:
        assert found == {name: tensors(kind)[name][2] for name in (EMBED, HEAD)}
    elif tied == "copy" or (tied == "auto" and config is CONFIG):
        assert found == dict.fromkeys((EMBED, HEAD), tensors(kind)[EMBED][2])
    else:
        assert found == {EMBED: tensors(kind)[EMBED][2]}
    note = "--tie-missing has no effect: no name of a tied weight is missing"
    assert (note in report.notes) == (kind != "embedding")
    differ = [note for note in report.notes if note.startswith("the config ties two tensors that differ")]
    assert bool(differ) == (config is TIED and kind == "different")


def test_a_missing_head_is_refused_without_the_option(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tensors("embedding"), config=CONFIG)
    with pytest.raises(InputError, match=HEAD):
        ckptx.convert("to-hf", source, tmp_path / "out")
    report = ckptx.convert("to-hf", source, tmp_path / "out", allow_config_mismatch=True)
    assert vocabulary(tmp_path / "out").keys() == {EMBED}
    assert any(HEAD in note for note in report.notes)


@pytest.mark.parametrize("kind", ["embedding", "head", "equal"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_tied_head_of_another_stage_is_a_copy(tmp_path: Path, to: str, pp: int, kind: str) -> None:
    source = write_hf(tmp_path / "hf", tensors(kind), config=TIED)
    report = ckptx.reshard(source, tmp_path / "out", to=to, tp=2, pp=pp)
    (tie,) = report.ties
    is_alias = to == "dcp" and pp == 1
    assert tie["action"] == ("alias" if is_alias else "copy")
    assert {*tie["output_names"]} == {EMBED, HEAD}
    assert len(report.aliases) == is_alias
    assert report.ledger["target"]["copies"] == (not is_alias)
    back = ckptx.convert("to-hf", tmp_path / "out", tmp_path / "back")
    assert back.exit == 0 and load_file(tmp_path / "back" / SINGLE).keys() == tensors(kind).keys()
