"""Run a command; print seconds from fork to exit and peak RSS in bytes: python -I -S launch.py COMMAND..."""

import os
import sys
import time

start = time.perf_counter()
child = os.fork()
if not child:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execvp(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(child, 0)
print(time.perf_counter() - start, usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
