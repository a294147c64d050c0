"""`ckptx env`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import click

from ckptx.cli.options import GLOBAL, SETTINGS, SectionedCommand, with_global_options
from ckptx.version import __version__

# The versions the test suite runs with; others in the ranges of pyproject.toml are expected to work.
_TESTED = {"torch": "2.13.0", "transformers": "5.23.0", "safetensors": "0.8.0"}
_ALSO = ("huggingface-hub", "numpy", "xxhash", "isal", "click", "tqdm")


@click.command("env", cls=SectionedCommand, context_settings=SETTINGS, sections=[GLOBAL], examples=["ckptx env"])
@with_global_options
def command() -> int:
    """Say which versions and which machine this is. Imports nothing it reports on."""
    click.echo(f"ckptx            {__version__}")
    click.echo(f"python           {platform.python_version()}")
    click.echo(f"platform         {platform.platform()}")
    click.echo(f"cores            {len(os.sched_getaffinity(0))}")
    for package in (*_TESTED, *_ALSO):
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        tested = f" (tested with {_TESTED[package]})" if package in _TESTED else ""
        click.echo(f"{package:<16} {found}{tested}")
    return 0
