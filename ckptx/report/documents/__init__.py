"""Reports of each command, in addition to the common fields of `Report`; docs/report.md defines all fields.

Each has a file of its own, so that a command defines only the classes that it needs: making a dataclass takes time.
"""
