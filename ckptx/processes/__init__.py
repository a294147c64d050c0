"""Every way in which ckptx starts a process or meets one that somebody else started.

    fork           one call each, in a fork: forecasts and memory checks, whose memory is gone afterwards
    launch         ranks of `verify --run`: each is a whole command, with its own report, exit code and stderr
    peers          starts nothing: conversions that torchrun started write one output together
    worker         pipe, call, answer, error and end of a process, for forks and for the ranks of `robustness`
    rendezvous     the variables and the store by which ranks, whoever starts them, know each other
    peak_memory    of this process and of those below it

Two more are in `robustness_suite`. `ranks.py` keeps workers over many calls, as ranks that meet anew for each of them;
it stays there because it measures what a call leaves in models and groups. Third-party code runs in sessions of its
own, without a pipe into it: `commands.py` has a command watched by `supervisor.py`, which outlives whatever the command
does and imports no ckptx, and `losses.py` kills `matcher.py` when a regular expression of a recipe takes too long.

What is shared and what is not: a fork has no rendezvous, since forks never talk to each other. A worker answers over
its pipe and carries exceptions back as they were. A launched rank does not: its errors have become the report of a
command by then, which is what torchrun would see too. Its process must not depend on one that has imported torch.
"""
