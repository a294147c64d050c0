"""Sidecar files that are copied with the weights: config, tokenizer, code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.formats.hf.reader import read_json_object
from ckptx.formats.outside_links import find_outside_links
from ckptx.formats.sidecars import QUANTIZATION_FILES
from ckptx.mapping.config_edits import format_edited_config
from ckptx.storage.interface import StoredFile
from ckptx.wording import counted

_MAX_LISTED_LINKS = 5


@dataclass(frozen=True, slots=True)
class Sidecars:
    """Sidecar files of an output.

    Attributes:
        files: Name in the output -> file to copy, or bytes to write.
        edits: Changes to config.json; empty if it is copied unchanged or absent.
        notes: Notes for the user.
    """

    files: Mapping[str, StoredFile | bytes]
    edits: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def collect_sidecars(base: BaseCheckpoint, names: Sequence[str], edits: Sequence[dict[str, Any]]) -> Sidecars:
    """Collect the sidecars of an output; config.json is rewritten only if something in it changes.

    Args:
        base: Checkpoint that they come from.
        names: Names of the files to copy.
        edits: Changes to config.json.

    Raises:
        InputError: config.json is damaged.
    """
    source = base.sidecar_source.source
    notes: list[str] = []
    if any(edit["key"].endswith("quantization_config") for edit in edits):
        dropped = [name for name in names if name in QUANTIZATION_FILES]
        names = [name for name in names if name not in dropped]
        notes.extend(f"{name}: not copied, it describes the quantization of the base" for name in dropped)
    files: dict[str, StoredFile | bytes] = {name: StoredFile(source, name) for name in names}
    outside_links = [f"{name} -> {real}" for name, real in find_outside_links(source, files)]
    if outside_links:
        more = f" and {len(outside_links) - _MAX_LISTED_LINKS} more" if len(outside_links) > _MAX_LISTED_LINKS else ""
        notes.append(
            f"copied through {counted(len(outside_links), 'link')} that point outside the checkpoint: "
            f"{', '.join(outside_links[:_MAX_LISTED_LINKS])}{more}"
        )
    if not edits or "config.json" not in files:
        return Sidecars(files, (), tuple(notes))
    files["config.json"] = format_edited_config(read_json_object(source, "config.json"), edits)
    return Sidecars(files, tuple(edits), tuple(notes))
