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


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def seed(base_seed: int, mesh: DeviceMesh) -> int:
    """Seed the generators of Python, numpy and torch, on all devices.

    Args:
        base_seed: The seed of the run, the same on all ranks.
        mesh: Mesh from `mesh_of`. Ranks that differ in "tp" alone get the same seed, all others different ones.

    Returns:
        The 63-bit seed of this rank, which can also seed a generator for the data order.
    """
    indices_by_dim = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names or () if name != _TP}
    # without index 0, so that a mesh without a dim gives the same seeds as one with a single rank in that dim
    coordinates = sorted((name, index) for name, index in indices_by_dim.items() if index)
    rank_seed = int.from_bytes(blake2b(repr((base_seed, coordinates)).encode(), digest_size=8).digest(), "little") >> 1
    random.seed(rank_seed)
    np.random.seed(rank_seed & 0xFFFFFFFF)
    torch.manual_seed(rank_seed)
    return rank_seed


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
        numpy_state: Any = np.random.get_state()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "numpy": {
                "kind": str(numpy_state[0]), "words": torch.tensor(numpy_state[1].tolist()),
                "position": int(numpy_state[2]),
                "has_gauss": int(numpy_state[3]), "gauss": float(numpy_state[4]),
            },
            "torch": torch.get_rng_state(),
        }  # fmt: skip
        if self._device.type != "cpu":
            state[self._device.type] = default_generator(self._device).get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of all generators.

        Raises:
            InputError: The state of a generator of this process is missing.
        """
        generator_names = ["python", "numpy", "torch", *([self._device.type] if self._device.type != "cpu" else [])]
        missing = [name for name in generator_names if name not in state]
        if missing:
            raise InputError(
                f"random number generators: the state of {missing[0]} is missing, found {', '.join(state)}; it was "
                "saved on another kind of device; leave it out and call ckptx.runtime.seed"
            )
        python, numpy_state = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        words = np.array(numpy_state["words"].tolist(), dtype=np.uint32)
        np.random.set_state(
            (numpy_state["kind"], words, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"])
        )
        torch.set_rng_state(state["torch"])
        if self._device.type != "cpu":
            default_generator(self._device).set_state(state[self._device.type])
