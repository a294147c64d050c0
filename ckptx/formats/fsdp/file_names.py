"""Names of per-rank FSDP files, as written by verl's FSDP checkpoint manager.

    model_world_size_8_rank_0.pt         the state dict of rank 0 of 8
    optim_world_size_8_rank_0.pt         its optimizer, keyed by parameter index
    extra_state_world_size_8_rank_0.pt   its learning rate scheduler and RNG state
    fsdp_config.json                     {"FSDP_version": 2, "world_size": 8}; not written before mid 2025
    huggingface/                         config and tokenizer; sometimes weights

Source: `verl/utils/checkpoint/fsdp_checkpoint_manager.py`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

STATE_FILE_PATTERN = r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt"
_NAME = re.compile(r"model_world_size_(0|[1-9]\d{0,5})_rank_(0|[1-9]\d{0,5})\.pt")


class RankFile(NamedTuple):
    """The numbers in a file name.

    Attributes:
        world_size: Number of ranks that saved the checkpoint.
        rank: Rank that wrote the file.
    """

    world_size: int
    rank: int

    @property
    def name(self) -> str:
        """Return the file name."""
        return f"model_world_size_{self.world_size}_rank_{self.rank}.pt"


def parse_rank_file(name: str) -> RankFile | None:
    """Return the numbers in a file name; None for any other name, and if the rank is not below the world size."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    found = RankFile(int(match[1]), int(match[2]))
    return found if found.rank < found.world_size else None
