"""Sidecar files that are copied with the weights: config, tokenizer, code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.formats.dcp.megatron import BACKEND_FILE, COMMON_FILE
from ckptx.formats.hf.hf_metadata import config_source
from ckptx.formats.hf.reader import read_json_object, read_text
from ckptx.formats.outside_links import find_outside_links
from ckptx.formats.sidecars import QUANTIZATION_FILES, is_known_sidecar, is_tokenizer_file
from ckptx.mapping.config_edits import format_edited_config
from ckptx.storage.interface import Source, StoredFile
from ckptx.untrusted.json_text import refuse_malformed_json
from ckptx.untrusted.limits import MAX_CONFIG_BYTES
from ckptx.wording import counted, list_names

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


def collect_sidecars(
    base: BaseCheckpoint,
    names: Sequence[str],
    edits: Sequence[dict[str, Any]],
    *,
    needs_tokenizer: bool = False,
    keeps_state: bool = False,
) -> Sidecars:
    """Collect the sidecars of an output; config.json is rewritten only if something in it changes.

    Args:
        base: Source and base, see `BaseCheckpoint`; sidecars come from the base, if there is one.
        names: Names of the files to copy; with `--base none`, only files of Megatron's format are copied.
        edits: Changes to config.json.
        needs_tokenizer: True to add a note if a model with a vocabulary has no tokenizer files.
        keeps_state: True to copy `Catalog.training_files` of the source, too; False to note that they are not copied.

    Raises:
        InputError: A JSON file that loaders read, such as config.json or tokenizer.json, is damaged.
    """
    source = base.sidecar_source.source
    notes: list[str] = []
    if base.uses_no_base:
        names = [name for name in names if name in (COMMON_FILE, BACKEND_FILE)]
    if base.is_dequantized or any(edit["key"].endswith("quantization_config") for edit in edits):
        dropped = [name for name in names if name in QUANTIZATION_FILES]
        names = [name for name in names if name not in dropped]
        notes.extend(f"{name}: not copied, it describes the quantization of the base" for name in dropped)
    for name in names:
        _refuse_malformed_file(source, name)
    has_tokenizer = any(is_tokenizer_file(PurePosixPath(name).name) for name in names)
    if needs_tokenizer and not has_tokenizer and not base.uses_no_base and _has_vocabulary(base.config or {}):
        root = config_source(base.sidecar_source).location
        notes.append(f"no tokenizer files in {root}, so the output has none; vLLM and SGLang need them")
    files: dict[str, StoredFile | bytes] = {name: StoredFile(source, name) for name in names}
    outside_links = [f"{name} -> {real}" for name, real in find_outside_links(source, files)]
    training_files = base.source.training_files
    if keeps_state:
        state_source = base.source.source
        outside_links += [f"{name} -> {real}" for name, real in find_outside_links(state_source, training_files)]
        files |= {name: StoredFile(state_source, name) for name in training_files}
    elif dropped_files := [name for name in training_files if name not in files]:
        notes.append(f"not copied, because the output has no training state: {list_names(dropped_files)}")
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


def _refuse_malformed_file(source: Source, name: str) -> None:
    """Refuse a file that loaders read as JSON and that is not JSON; other files are copied unread.

    Raises:
        InputError: It is malformed, for example truncated.
    """
    is_read = name.endswith(".json") and is_known_sidecar(PurePosixPath(name).name)
    if is_read and source.size(name) <= MAX_CONFIG_BYTES:
        refuse_malformed_json(read_text(source, name, MAX_CONFIG_BYTES), source.location / name)


def _has_vocabulary(config: Mapping[str, Any]) -> bool:
    """Return True if a config or one of its sub-configs has a vocabulary."""
    return "vocab_size" in config or any(
        isinstance(value, Mapping) and key.endswith("config") and _has_vocabulary(value)
        for key, value in config.items()
    )
