"""Every tiny model, cut into stages that run one after another: it computes what it does in one piece."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ckptx.errors import UnsupportedError
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from tests.support.microbatches import MULTIMODAL, image_microbatches
from tests.support.models import EVERY
from tests.support.staged_models import SPLITS, compare_split, compare_split_in_microbatches


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("how", "name"), list(product(SPLITS, EVERY)))
def test_a_model_that_is_cut_computes_what_it_does_in_one_piece(how: str, name: str) -> None:
    is_equal, gradients, carry = compare_split(name, how)
    assert is_equal, "the same operations on the same bits"
    assert gradients < 3e-7, "float32; gradients of a parameter with several uses are summed in another order"
    assert carry.slots[0] == ()
    assert all(carry.slots[1:]), "at least the hidden state travels"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("how", "name"), list(product(SPLITS, MULTIMODAL)))
def test_microbatches_without_an_image_with_one_and_with_several(how: str, name: str) -> None:
    is_equal, gradients = compare_split_in_microbatches(name, how, image_microbatches(name))
    assert is_equal
    assert gradients < 3e-7, "float32; gradients of a parameter with several uses are summed in another order"


def test_text_goes_by_a_layer_that_looks_at_images_where_a_stage_begins() -> None:
    """The stage is given what comes after that layer, and for images what comes before."""
    is_equal, gradients = compare_split_in_microbatches("mllama", "1 | rest", image_microbatches("mllama"))
    assert is_equal
    assert gradients < 3e-7, "as above"


def test_a_kind_of_microbatch_that_was_not_shown_is_refused() -> None:
    carry = StageBoundaries(((), ()), {}, {frozenset({"input_ids"}): ((), ())})
    with pytest.raises(
        UnsupportedError, match=r"unknown for a microbatch of input_ids, pixel_values, known for input_ids;"
    ):
        carry.slots_for({"input_ids": torch.ones(1), "pixel_values": torch.ones(1)})
