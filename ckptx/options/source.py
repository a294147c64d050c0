"""Mixins for commands that open a checkpoint or model: log, Hub ids, prefixes, custom code."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from pathlib import Path
from typing import Annotated

from ckptx.options.option import SOURCE, Hook, Option, Options
from ckptx.report.report import Log


class LogOptions(Options):
    """Parameter for the log of a run."""

    log: Annotated[Log | None, Hook("Log that collects the notes of the run, even if the run fails.")] = None


class HubOptions(Options):
    """Options for checkpoints on the Hub."""

    revision: Annotated[
        str | None, Option("Branch, tag or commit of a Hub repository.", SOURCE, metavar="REV", default="main")
    ] = None
    token: Annotated[
        str | None,
        Option(
            "Hugging Face access token.",
            SOURCE,
            metavar="TOKEN",
            default="HF_TOKEN, else the token of hf auth login",
            is_secret=True,
        ),
    ] = None
    cache_dir: Annotated[
        str | Path | None,
        Option("Cache directory for Hub downloads.", SOURCE, metavar="DIR", default="HF_HUB_CACHE, else HF_HOME/hub"),
    ] = None


class SourcePrefixOptions(Options):
    """Option for the tensor names of a DCP."""

    source_prefix: Annotated[
        str,
        Option(
            'Prefix of the tensor names in a DCP, e.g. "model."; selects one of several models. "" is no prefix.',
            SOURCE,
            metavar="auto|TEXT",
            keywords=("auto",),
            replaces=("prefix",),
        ),
    ] = "auto"

    @property
    def model_prefix(self) -> str | None:
        """Return the prefix of the tensor names in the source; None means detect it."""
        return None if self.source_prefix == "auto" else self.source_prefix


class RemoteCodeOptions(Options):
    """Option for custom model code."""

    trust_remote_code: Annotated[bool, Option("Allow custom model code from the checkpoint.", SOURCE)] = False
