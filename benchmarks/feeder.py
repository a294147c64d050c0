"""Free memory while a command allocates it: python -I -S feeder.py NBYTES; prints "ready", and exits with its stdin.

A virtual machine returns memory that has been free for two seconds to its host, and allocating it again takes up to
four times as long as a copy. So this process allocates as much as the command will, and frees it step by step while the
command runs: all memory that the command gets was in use a moment ago.
"""

import mmap
import select
import sys

PIECE = 64 << 20
AHEAD = 512 << 20
INTERVAL = 0.01  # seconds


def free_memory() -> int:
    """Return the bytes of free memory of this machine."""
    with open("/proc/meminfo") as file:
        (line,) = (each for each in file if each.startswith("MemFree:"))
    return int(line.split()[1]) << 10


def taken(nbytes: int) -> mmap.mmap:
    """Allocate memory and touch every page."""
    piece = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        piece.madvise(mmap.MADV_HUGEPAGE)  # 100 times faster to free
    memoryview(piece)[:: mmap.PAGESIZE] = bytes(nbytes // mmap.PAGESIZE)
    return piece


def main() -> None:
    """Allocate memory, and free it while other processes allocate."""
    pieces = [taken(PIECE) for _ in range(-(-int(sys.argv[1]) // PIECE) + AHEAD // PIECE)]
    print("ready", flush=True)
    at_first, freed = free_memory(), 0
    while not select.select([sys.stdin], [], [], INTERVAL)[0]:
        wanted = at_first + freed - free_memory() + AHEAD  # bytes that others allocated, plus AHEAD
        while pieces and freed < wanted:
            pieces.pop().close()
            freed += PIECE


if __name__ == "__main__":
    main()
