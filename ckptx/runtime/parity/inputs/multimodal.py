"""Non-text inputs of a model: further tensors, and the tokens that stand for them in every sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Batch = dict[str, torch.Tensor]

TEXT_LENGTH = 12  # text tokens per sequence


class MultimodalInput(NamedTuple):
    """Images or audio for each sequence of a batch.

    Attributes:
        tokens: Tokens inserted into every sequence, in order.
        placeholder: Token that the model replaces with features, and that has no label; -1 if it replaces none.
        tensors: Further arguments of `forward`.
        token_types: Name of the argument of `forward` with the type of each token, and the type of the placeholders;
            None if the class has no such argument.
        make_text_arguments: Makes arguments of sequence length from the finished tokens, (batch, length); None
            if there are none.
    """

    tokens: list[int]
    placeholder: int
    tensors: Batch
    token_types: tuple[str, int] | None = None
    make_text_arguments: Callable[[torch.Tensor], Batch] | None = None


def make_random_tensor(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return random pixels or features around zero, as a processor would."""
    return torch.randn(shape, generator=generator)
