"""A head that is missing and not tied is noted by commands that only read, and a report shows its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptx
from ckptx.errors import ArgumentTypeError
from tests.support.checkpoint_writers import LLAMA, llama, write_hf

NAMES = ("lm_head.weight", "model.embed_tokens.weight")


@pytest.mark.parametrize("missing", [(), (NAMES[0],), (NAMES[1],), NAMES])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_missing_tensor_is_noted_unless_it_is_tied(tmp_path: Path, missing: tuple[str, ...], is_tied: bool) -> None:
    tensors = {name: value for name, value in llama().items() if name not in missing}
    path = write_hf(tmp_path / "model", tensors, config={**LLAMA, "tie_word_embeddings": is_tied})
    is_incomplete = len(missing) == 2 or (len(missing) == 1 and not is_tied)
    for report in (ckptx.inspect(path), ckptx.verify(path, path)):
        found = [note for note in report.notes if "in the checkpoint" in note and "config.json differs" not in note]
        assert len(found) == is_incomplete and all(name in found[0] for name in missing[:is_incomplete])


def test_the_representation_of_a_report_has_the_verdict(tmp_path: Path) -> None:
    tensors = llama()
    first, second = write_hf(tmp_path / "a", tensors), write_hf(tmp_path / "b", {**tensors, **llama(hidden=16)})
    assert repr(ckptx.verify(first, first)) == "<VerifyReport of verify: exit 0, EQUAL, 21 tensors compared>"
    assert 'exit 1, DIFFERENT: "' in repr(ckptx.verify(first, second))
    assert "(shape)" in repr(ckptx.verify(first, second))


def test_an_unknown_option_suggests_only_a_similar_one() -> None:
    verify: Any = ckptx.verify
    with pytest.raises(ArgumentTypeError, match="verify does not take --dtyp; did you mean --dtype"):
        verify("a", "b", dtyp="fp32")
    with pytest.raises(ArgumentTypeError) as unrelated:
        verify("a", "b", bogus=1)
    assert "did you mean" not in str(unrelated.value)
