"""Every tiny model, cut into stages that run one after another: it computes what it does in one piece."""

from __future__ import annotations

from itertools import product

import pytest
from support.models import EVERY
from support.staged import CUTS, compared


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("how", "name"), list(product(CUTS, EVERY)))
def test_a_model_that_is_cut_computes_what_it_does_in_one_piece(how: str, name: str) -> None:
    is_equal, gradients, carry = compared(name, how)
    assert is_equal, "the same operations on the same bits"
    assert gradients < 3e-7, "float32; gradients of a parameter with several uses are summed in another order"
    assert carry.slots[0] == ()
    assert all(carry.slots[1:]), "at least the hidden state travels"
