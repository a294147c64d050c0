"""Start processes, and communicate with processes that torchrun started.

    fork           one call per forked process: forecasts and memory checks, whose memory is freed afterwards
    launch         ranks of `verify --run`: each is a whole command, with its own report, exit code and stderr
    peers          communication of conversions that torchrun started, which write one output together
    worker         a process that answers calls over a pipe, for forks and for the ranks of `robustness`
    imports        imports that a fork in another thread does not interrupt
    threads        start threads, run a function in several, and wait for them
    rendezvous     the environment variables and the store of the ranks, whether torchrun or ckptx starts them
    peak_memory    peak memory of this process and its children

Two more are in `robustness_suite`. `ranks.py` keeps workers over many calls, as ranks that form a new process group for
each call; it is there because it measures what a call leaves in models and groups. Third-party code runs in its own
sessions, without a pipe: `commands.py` runs a command under `supervisor.py`, which survives whatever the command does
and imports no ckptx, and `losses.py` kills `matcher.py` when a regular expression of a recipe takes too long.

A fork has no rendezvous, because forks never communicate. A worker answers over its pipe and returns exceptions
unchanged. A launched rank does not: its errors are in the report of a command, as under torchrun, and its process must
not depend on one that has imported torch.
"""
