"""Random number generators of a rank: their seeds, and their state in a checkpoint.

TP ranks that share their data get one seed, as dropout on replicated tensors must be identical (sharded tensors have
streams of their own, see `tensor_parallel.dropout`); data ranks and pipeline stages get different seeds.
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
    """Return the default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def seed(number: int, mesh: DeviceMesh) -> int:
    """Seed the generators of Python, numpy and torch, on all devices.

    Args:
        number: The seed of the run, the same on all ranks.
        mesh: Mesh from `mesh_of`. Ranks that differ in "tp" alone get the same seed, all others different ones.

    Returns:
        The 63-bit seed of this rank, which can also seed a generator for the data order.
    """
    place = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names or () if name != _TP}
    known = sorted((name, index) for name, index in place.items() if index)  # independent of dims with one rank
    own = int.from_bytes(blake2b(repr((number, known)).encode(), digest_size=8).digest(), "little") >> 1
    random.seed(own)
    np.random.seed(own & 0xFFFFFFFF)
    torch.manual_seed(own)
    return own


class RandomState:
    """The state of the generators of Python, numpy and torch in this process, with a `state_dict`.

    Args:
        device: Device whose generator is included in addition to the CPU's.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, strings and CPU tensors; no random number is drawn."""
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
        """Restore the state of all generators.

        Raises:
            InputError: The state of a generator of this process is missing.
        """
        kinds = ["python", "numpy", "torch", *([self._device.type] if self._device.type != "cpu" else [])]
        missing = [kind for kind in kinds if kind not in state]
        if missing:
            raise InputError(
                f"random numbers: the state has {', '.join(state)}, {missing[0]} is missing; it was saved on another "
                "kind of device, so leave it out and call randomness.seed"
            )
        python, legacy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        words = np.array(legacy["words"].tolist(), dtype=np.uint32)
        np.random.set_state((legacy["kind"], words, legacy["position"], legacy["has_gauss"], legacy["gauss"]))
        torch.set_rng_state(state["torch"])
        if self._device.type != "cpu":
            generator_of(self._device).set_state(state[self._device.type])
