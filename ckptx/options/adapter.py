"""Mixin for commands that read the adapter in a training checkpoint."""

# No `from __future__ import annotations`: `settings_of` reads the annotations of fields as objects.

from math import isfinite
from pathlib import Path
from typing import Annotated, NamedTuple

from ckptx.errors import UsageError
from ckptx.options.option import SOURCE, Option, Options


class AdapterSettings(NamedTuple):
    """Settings of the adapter in a training checkpoint, which does not record them.

    Attributes:
        config_file: Path of an `adapter_config.json`; None for none.
        alpha: Alpha of all layers; None if it is not given.
        base_name: Name or path of the base model, to record; None for none.
    """

    config_file: str | None
    alpha: float | None
    base_name: str | None


class AdapterOptions(Options):
    """Options for the settings of an adapter, which a training checkpoint does not record."""

    adapter_config: Annotated[
        str | Path | None,
        Option(
            "adapter_config.json of the training run, for an adapter in a training checkpoint, which does not record "
            "its alpha.",
            SOURCE,
            metavar="FILE",
            default="the file next to the training checkpoint, if any",
            excludes=("alpha",),
        ),
    ] = None
    alpha: Annotated[
        str | float | None,
        Option(
            "Alpha of an adapter in a training checkpoint, for plain LoRA (scaling alpha / rank), if you have no "
            "adapter_config.json of the run.",
            SOURCE,
            metavar="N",
            default="that in lora_train_meta.json of verl, if any",
            replaces=("lora_alpha",),
        ),
    ] = None

    def adapter_settings(self, base_name: str | None = None) -> AdapterSettings:
        """Return the settings.

        Args:
            base_name: Name or path of the base model, to record; None for none.

        Raises:
            UsageError: Alpha is no finite number other than 0.
        """
        alpha = None
        if self.alpha is not None:
            try:
                alpha = float(self.alpha)
            except ValueError:
                alpha = 0.0
            if not isfinite(alpha) or not alpha:
                raise UsageError(f'--alpha: "{self.alpha!s:.40}" must be a number other than 0')
        return AdapterSettings(None if self.adapter_config is None else str(self.adapter_config), alpha, base_name)

    def check(self) -> None:
        super().check()
        self.adapter_settings()
