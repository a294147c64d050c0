"""Every tiny model, cut into stages that run one after another: it computes what it does in one piece."""

from __future__ import annotations

from itertools import product

import pytest
from support.microbatches import MULTIMODAL, pictures_of
from support.models import EVERY
from support.staged import CUTS, compared, compared_in_microbatches

from ckptx.errors import UnsupportedError

# Text alone goes by the layer that looks at images, where one stage would end and the next begin.
NOT_CUT = (("1 | rest", "mllama"), ("three", "mllama"))


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("how", "name"), list(product(CUTS, EVERY)))
def test_a_model_that_is_cut_computes_what_it_does_in_one_piece(how: str, name: str) -> None:
    is_equal, gradients, carry = compared(name, how)
    assert is_equal, "the same operations on the same bits"
    assert gradients < 3e-7, "float32; gradients of a parameter with several uses are summed in another order"
    assert carry.slots[0] == ()
    assert all(carry.slots[1:]), "at least the hidden state travels"


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("how", "name"), [each for each in product(CUTS, MULTIMODAL) if each not in NOT_CUT])
def test_microbatches_without_an_image_with_one_and_with_several(how: str, name: str) -> None:
    is_equal, gradients = compared_in_microbatches(name, how, pictures_of(name))
    assert is_equal
    assert gradients < 3e-7, "float32; gradients of a parameter with several uses are summed in another order"


@pytest.mark.parametrize(("how", "name"), NOT_CUT)
def test_a_cut_before_a_layer_that_text_goes_by_is_refused(how: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"first pipeline stage has not .*cut it elsewhere"):
        compared_in_microbatches(name, how, pictures_of(name))
