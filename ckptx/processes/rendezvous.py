"""Read the environment variables that a launcher (torchrun or ckptx) sets for a rank, and open the store of the ranks.

    RANK, LOCAL_RANK, WORLD_SIZE       rank of this process, its index on this machine, and number of ranks
    MASTER_ADDR, MASTER_PORT           address of a key-value store: that of torchrun's agent, or else of rank 0
    TORCHELASTIC_RESTART_COUNT         number of restarts by torchrun after failures

It imports torch only to open the store.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptx.errors import EnvironmentProblem

if TYPE_CHECKING:
    from torch.distributed import Store

START_TIMEOUT = 300  # seconds that a rank waits for the others to start
LAUNCHED_VARIABLE = "CKPTX_LAUNCHED"  # environment variable that `launch` sets for its ranks
_LAUNCHER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.+|"
    rf"TORCH_NCCL_ASYNC_ERROR_HANDLING|{LAUNCHED_VARIABLE}"
)


def is_launched() -> bool:
    """Return True if torchrun, a compatible launcher or `launch` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched_by_us() -> bool:
    """Return True if `launch` started this process.

    The process that called `launch` has printed the notes and checked the memory, so that a rank does not repeat it.
    """
    return LAUNCHED_VARIABLE in os.environ


def is_first_rank() -> bool:
    """Return True for rank 0, and for a process without a rank."""
    return os.environ.get("RANK", "0") == "0"


def launched_world_size() -> int | None:
    """Return the number of launched ranks; None for a process without a rank."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else None


def rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment variables of a rank, if all ranks are on this machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}


def remove_launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process that is not a rank: without the variables that identify a rank."""
    return {key: value for key, value in environment.items() if not _LAUNCHER_VARIABLES.fullmatch(key)}


def open_store(host: str, port: int, rank: int, name: str, timeout: float = START_TIMEOUT) -> Store:
    """Open the store of torchrun's agent, or else that of rank 0, which rank 0 starts.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        rank: Rank of this process.
        name: Name of the rendezvous, which prefixes its keys; the same on every rank.
        timeout: Seconds to wait for the store.

    Raises:
        EnvironmentProblem: The port is in use on rank 0.
        DistNetworkError: The store cannot be reached.
    """
    from datetime import timedelta  # imported here, so that commands without ranks start faster

    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            host, port, None, is_master, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
        )
    except DistNetworkError as error:
        if not is_master or not _is_in_use(port):
            raise
        raise EnvironmentProblem(
            f"rank 0: port {port} (MASTER_PORT) is in use: another process with RANK 0 has started the store of the "
            "processes, or another program uses the port; give each process a RANK of its own, or choose another "
            "MASTER_PORT"
        ) from error
    return PrefixStore(f"ckptx/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}", store)


def _is_in_use(port: int) -> bool:
    """Return True if a process of this machine listens on a port."""
    import socket

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
