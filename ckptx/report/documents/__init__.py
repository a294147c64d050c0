"""What each command reports beside what every report has; docs/report.md defines the words.

Each has a file of its own, so that a command makes the classes it needs and no others.
"""
