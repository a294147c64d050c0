"""The files that travel with the weights: config, tokenizer, code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptx.conversion.steps.base import BaseCheckpoint
from ckptx.formats.hf.reader import json_in
from ckptx.formats.links import leading_out
from ckptx.formats.sidecars import QUANTIZATION_FILES
from ckptx.mapping.config import edited_config
from ckptx.storage.interface import StoredFile
from ckptx.wording import counted

_NAMED_LINKS = 5


@dataclass(frozen=True, slots=True)
class Sidecars:
    """What lies beside the weights of an output.

    Attributes:
        files: Name in the output -> file to copy, or bytes to write.
        edits: Changes to config.json, if it is among them.
        notes: What the user should know.
    """

    files: Mapping[str, StoredFile | bytes]
    edits: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def carry(base: BaseCheckpoint, names: Sequence[str], edits: Sequence[dict[str, Any]]) -> Sidecars:
    """The sidecars of an output; config.json is written anew only when something in it changes.

    Args:
        base: Where they come from.
        names: Of those that travel along.
        edits: What config.json has to say otherwise.

    Raises:
        InputError: config.json is damaged.
    """
    source = base.files_from.source
    notes: list[str] = []
    if any(edit["key"].endswith("quantization_config") for edit in edits):
        left = [name for name in names if name in QUANTIZATION_FILES]
        names = [name for name in names if name not in left]
        notes.extend(f"{name}: left out, it tells how a base is quantised" for name in left)
    files: dict[str, StoredFile | bytes] = {name: StoredFile(source, name) for name in names}
    outside = [f"{name} -> {real}" for name, real in leading_out(source, files)]
    if outside:
        more = f" and {len(outside) - _NAMED_LINKS} more" if len(outside) > _NAMED_LINKS else ""
        notes.append(
            f"carried through {counted(len(outside), 'link')} out of the checkpoint: "
            f"{', '.join(outside[:_NAMED_LINKS])}{more}"
        )
    if not edits or "config.json" not in files:
        return Sidecars(files, (), tuple(notes))
    files["config.json"] = edited_config(json_in(source, "config.json"), edits)
    return Sidecars(files, tuple(edits), tuple(notes))
