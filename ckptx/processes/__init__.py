"""Processes: forks of this one, ranks that are launched, peers that write one output together, and their memory."""
