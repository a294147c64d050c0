"""What a model gets beside text: tensors of its own, and the tokens that stand for them in every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Batch = dict[str, torch.Tensor]

LENGTH = 12  # tokens of text in a row


class MultimodalInput(NamedTuple):
    """One image or one sound in every row.

    Attributes:
        tokens: What is put into every row, in order.
        placeholder: The one of them that the model replaces, its place has no label; -1 where it replaces none.
        tensors: Further arguments of `forward`.
        types: An argument that says of each token what it stands for, and the number for this kind; None where the
            class has no such argument.
        row: Makes the arguments that are as long as a row from the finished tokens, (rows, length); None for none.
    """

    tokens: list[int]
    placeholder: int
    tensors: Batch
    types: tuple[str, int] | None = None
    row: Callable[[torch.Tensor], Batch] | None = None


def random_of(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Pixels or features as a processor gives them: around zero."""
    return torch.randn(shape, generator=generator)
