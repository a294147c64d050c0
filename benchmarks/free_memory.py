"""Free memory while another process allocates it: python -I -S free_memory.py NBYTES.

The script prints "ready" when it has allocated its memory, and exits when its stdin is closed.

A virtual machine returns memory that has been free for two seconds to its host, and allocating it again takes up to
four times as long as a copy. So this process allocates as much as the command will, and frees it step by step while the
command runs: all memory that the command gets was in use a moment ago.
"""

import mmap
import select
import sys

BLOCK = 64 << 20  # bytes that are freed at a time
MARGIN = 512 << 20  # bytes that are freed before other processes need them
INTERVAL = 0.01  # seconds between two looks at the free memory


def free_bytes() -> int:
    """Return the bytes of free memory of this machine."""
    with open("/proc/meminfo") as file:
        (line,) = (each for each in file if each.startswith("MemFree:"))
    return int(line.split()[1]) << 10


def allocate(nbytes: int) -> mmap.mmap:
    """Allocate memory and touch every page."""
    block = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)  # 100 times faster to free
    memoryview(block)[:: mmap.PAGESIZE] = bytes(nbytes // mmap.PAGESIZE)
    return block


def main() -> None:
    """Allocate memory, and free it while other processes allocate."""
    blocks = [allocate(BLOCK) for _ in range(-(-int(sys.argv[1]) // BLOCK) + MARGIN // BLOCK)]
    print("ready", flush=True)
    free_at_start, freed = free_bytes(), 0
    while not select.select([sys.stdin], [], [], INTERVAL)[0]:
        target = free_at_start + freed - free_bytes() + MARGIN  # bytes that others allocated, plus a margin
        while blocks and freed < target:
            blocks.pop().close()
            freed += BLOCK


if __name__ == "__main__":
    main()
