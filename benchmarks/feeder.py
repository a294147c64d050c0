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
    """Bytes that nobody has, on this machine."""
    with open("/proc/meminfo") as file:
        (line,) = (each for each in file if each.startswith("MemFree:"))
    return int(line.split()[1]) << 10


def taken(nbytes: int) -> mmap.mmap:
    """Memory, every page of it in use."""
    piece = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        piece.madvise(mmap.MADV_HUGEPAGE)  # freed in a hundredth of the time
    memoryview(piece)[:: mmap.PAGESIZE] = bytes(nbytes // mmap.PAGESIZE)
    return piece


def main() -> None:
    """Takes, and frees."""
    pieces = [taken(PIECE) for _ in range(-(-int(sys.argv[1]) // PIECE) + AHEAD // PIECE)]
    print("ready", flush=True)
    at_first, freed = free_memory(), 0
    while not select.select([sys.stdin], [], [], INTERVAL)[0]:
        wanted = at_first + freed - free_memory() + AHEAD  # what others took since, and some more
        while pieces and freed < wanted:
            pieces.pop().close()
            freed += PIECE


if __name__ == "__main__":
    main()
