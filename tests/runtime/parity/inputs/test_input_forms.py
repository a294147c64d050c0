"""What rows say of the inputs of a class, and the functions that make them: each of the one has the other."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ckptx.architecture.correction_schema import INPUT_KINDS, InvalidCorrectionError
from ckptx.architecture.correction_types import InputCorrection
from ckptx.architecture.corrections import corrections_of
from ckptx.runtime.parity.inputs.batch import FORMS, make_inputs
from tests.support.corrections import all_corrections, patched_corrections

CONFIG: dict[str, Any] = {"model_type": "made-up", "vocab_size": 50}


def rows_by_type() -> list[tuple[str, InputCorrection]]:
    return [(model_type, row) for model_type, rows in all_corrections().items() for row in rows.inputs]


def test_every_form_is_of_a_row_and_every_row_has_a_form() -> None:
    assert FORMS.keys() == set(INPUT_KINDS)
    for kind, forms in FORMS.items():
        assert forms.keys() == {row.form for _, row in rows_by_type() if row.kind == kind}


@pytest.mark.parametrize(("model_type", "row"), rows_by_type())
def test_settings_are_those_of_the_form(model_type: str, row: InputCorrection) -> None:
    inspect.signature(FORMS[row.kind][row.form]).bind({}, 1, None, **row.settings)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (InputCorrection("images", "shapes", "r"), 'made-up: "shapes" is not a form of images; use one of any_size'),
        (InputCorrection("images", "chunk", "r"), 'made-up: "chunk" is not a form of images'),
        (InputCorrection("audio", "chunk", "r"), 'made-up: the form "chunk" does not accept its settings: missing'),
        (
            InputCorrection("audio", "chunk", "r", {"windows": 3}),
            'made-up: the form "chunk" does not accept its settings: ',
        ),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(row: InputCorrection, message: str) -> None:
    with patched_corrections("made-up", inputs=(row,)), pytest.raises(InvalidCorrectionError, match=message):
        make_inputs(CONFIG)


def test_a_model_that_is_made_up_needs_rows_alone() -> None:
    """A class of the form of Qwen2-VL under another model type."""
    config = {**CONFIG, "vision_config": {"patch_size": 2}, "image_token_id": 40}
    found = make_inputs(config)
    assert (found.kinds, found.missing) == (("text",), ("images",))
    with patched_corrections("made-up", inputs=corrections_of("qwen2_vl").inputs):
        found = make_inputs(config)
    assert (found.kinds, found.missing) == (("text", "images"), ())
    assert found.batch["image_grid_thw"].tolist() == [[1, 4, 6]] * 2


@pytest.mark.parametrize("model_type", [kind for kind, rows in all_corrections().items() if rows.as_tower])
def test_every_row_of_a_tower_changes_what_llava_is_given(model_type: str) -> None:
    vision = {"model_type": model_type, "patch_size": 2, "image_size": 8}
    config = {**CONFIG, "model_type": "llava", "vision_config": vision, "image_token_index": 40}
    given = make_inputs(config)
    with patched_corrections(model_type, as_tower=()):
        other = make_inputs(config)
    assert given.batch["input_ids"].shape != other.batch["input_ids"].shape
