"""Modules with a few numbers, whose outputs, loss and gradients can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parity.inputs.batch import Inputs

RANK_CONTEXT = RankContext(0, 1, torch.device("cpu"))

ULP = 2.0**-22  # difference of 3.0 to the adjacent float32 values


def inputs_of(ids: Sequence[Sequence[int]], **further: torch.Tensor) -> Inputs:
    """Return tokens of shape (rows, length), which are also the labels."""
    tokens = torch.tensor(ids)
    return Inputs({"input_ids": tokens, **further}, tokens.clone(), ("text",), ())


class Scaled(nn.Module):
    """A model in which every token is (3, 3), times a scale of (4, 4), so that each output is 12.

    With ids above the width of the outputs, which cannot be logits, the loss is the mean square, 144.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 2, dtype=dtype)
        self.scale = nn.Parameter(torch.full((2,), 4.0, dtype=dtype))
        with torch.no_grad():
            self.embed.weight.fill_(3)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"last_hidden_state": self.embed(input_ids) * self.scale}


class Looped(nn.Module):
    """A model in which `shared` runs twice on different inputs, then `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.shared, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))
        with torch.no_grad():
            self.embed.weight.copy_(torch.arange(1, 9).reshape(4, 2))
            self.shared.weight.copy_(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
            self.last.weight.copy_(torch.eye(2))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.last(self.shared(self.shared(self.embed(input_ids))))}


class Chosen(nn.Module):
    """Experts; tokens with an id above 1 go to the second expert, others to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 1)
        self.experts = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        self.last = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.embed.weight.fill_(1.0)
            for expert in (*self.experts, self.last):
                expert.weight.fill_(2.0)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        found = torch.zeros_like(hidden)
        for expert, chosen in zip(self.experts, (hidden <= 1, hidden > 1), strict=True):
            if chosen.any():
                found[chosen] = expert(hidden[chosen][:, None])[:, 0]
        return {"logits": self.last(found)}


class InPlace(nn.Module):
    """A model that multiplies the output of `first` in place by a separate parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.first, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            self.embed.weight.fill_(1.0)
            for each in (self.first, self.last):
                each.weight.copy_(torch.eye(2))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(self.embed(input_ids))
        hidden.mul_(self.scale)
        return {"logits": self.last(hidden)}
