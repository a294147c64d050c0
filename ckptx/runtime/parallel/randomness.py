"""Random numbers of a rank: where they begin, and what a checkpoint keeps of them.

TP ranks that share their data begin alike, for what they hold whole must be dropped alike (what is cut has streams of
its own, see `tensor_parallel.dropout`); data ranks and pipeline stages begin differently.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from ckptx.errors import InputError

_TP = "tp"


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def seed(number: int, mesh: DeviceMesh) -> int:
    """Seeds Python's, numpy's and torch's generators, those of all devices included.

    Args:
        number: The seed of the run, the same on all ranks.
        mesh: As `mesh_of` made it. Ranks that differ in "tp" alone get the same, all others other seeds.

    Returns:
        The seed of this rank, of 63 bits; a generator that stands for the order of data can be made of it.
    """
    place = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names or () if name != _TP}
    known = sorted((name, index) for name, index in place.items() if index)  # a dim of one rank changes nothing
    own = int.from_bytes(blake2b(repr((number, known)).encode(), digest_size=8).digest(), "little") >> 1
    random.seed(own)
    np.random.seed(own & 0xFFFFFFFF)
    torch.manual_seed(own)
    return own


class RandomState:
    """The state of Python's, numpy's and torch's generators of this process, as something with a `state_dict`.

    Args:
        device: Whose generator is kept beside that of the CPU.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts and tensors of the CPU alone; nothing is drawn."""
        version, words, gauss = random.getstate()
        legacy: Any = np.random.get_state()
        found: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "numpy": {
                "kind": str(legacy[0]), "words": torch.tensor(legacy[1].tolist()), "position": int(legacy[2]),
                "has_gauss": int(legacy[3]), "gauss": float(legacy[4]),
            },
            "torch": torch.get_rng_state(),
        }  # fmt: skip
        if self._device.type != "cpu":
            found[self._device.type] = generator_of(self._device).get_state()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts the generators into a state.

        Raises:
            InputError: It lacks a generator that this process has.
        """
        kinds = ["python", "numpy", "torch", *([self._device.type] if self._device.type != "cpu" else [])]
        missing = [kind for kind in kinds if kind not in state]
        if missing:
            raise InputError(
                f"random numbers: the state has {', '.join(state)}, needed {missing[0]}, too; it was saved on another "
                "device, so leave it out and call randomness.seed"
            )
        python, legacy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        words = np.array(legacy["words"].tolist(), dtype=np.uint32)
        np.random.set_state((legacy["kind"], words, legacy["position"], legacy["has_gauss"], legacy["gauss"]))
        torch.set_rng_state(state["torch"])
        if self._device.type != "cpu":
            generator_of(self._device).set_state(state[self._device.type])
