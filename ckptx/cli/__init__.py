"""The command line: one file per command, each of which calls a Python function and prints its report."""
