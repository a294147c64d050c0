"""Reports of commands: dataclasses for `--json`, and their rendering as text, HTML and JUnit XML."""
