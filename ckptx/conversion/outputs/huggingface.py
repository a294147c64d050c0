"""`convert dcp2hf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptx.catalog.catalog import Catalog
from ckptx.conversion.outputs.output_format import Allocation, ConfigEdits, Contents, OutputFormat
from ckptx.conversion.outputs.safetensors_config import safetensors_edits
from ckptx.conversion.steps.base import Base, no_config
from ckptx.conversion.steps.dtypes import Cast
from ckptx.conversion.steps.manifest import manifest_of
from ckptx.conversion.steps.model import LeftBehind, Ties, leave_state_behind
from ckptx.conversion.steps.naming import Named
from ckptx.conversion.steps.opening import Opened
from ckptx.conversion.steps.reordered import check_reordered
from ckptx.conversion.steps.restoring import Restoring, restore_original
from ckptx.conversion.steps.target import Target
from ckptx.conversion.steps.written import check_digests, check_huggingface
from ckptx.formats.dcp.megatron import COMMON_FILE, without_backend
from ckptx.formats.hf import layout as huggingface_layout
from ckptx.formats.hf.hf_metadata import FILES
from ckptx.model_view.view import ModelView, has_model_names
from ckptx.transfer.executor import Outcome
from ckptx.wording import counted, first_of


@dataclass(frozen=True)
class HuggingFaceFormat(OutputFormat):
    """Safetensors with an index, as `save_pretrained` writes them."""

    is_cut: bool = False
    remembers: ClassVar[bool] = False

    def is_prefix_of_source(self, source: Catalog) -> bool:
        return True

    def left_behind(self, view: ModelView) -> LeftBehind:
        return leave_state_behind(view, view.catalog.objects, "is not converted to HF")

    def default_naming(self, view: ModelView) -> str | None:
        """Published names, which all loaders know; tensors that have such, old ones or new, keep theirs."""
        return "disk" if view.trainer_naming or has_model_names(view) else None

    def restored(self, opened: Opened, base: Base, view: ModelView, ties: Ties) -> Restoring:
        """What the manifest of this very checkpoint remembers, unless the options ask for something else.

        Raises:
            InputError: It remembers nothing, and there is no config.
        """
        options = opened.options
        asked = options.dtype != "auto" or options.max_shard_size_given or options.tied != "auto" or view.prefix
        found = Restoring()
        if not (asked or base.catalog is not None or options.base == "none" or options.names not in (None, "disk")):
            found = restore_original(view, ties.decisions, options.names)
        if found.found is None and base.config is None and options.base is None:
            raise no_config(opened.source.root)
        return found

    def allocate(self, opened: Opened, contents: Contents) -> Allocation:
        target, restored, options = contents.sharded.target, contents.restored, opened.options
        notes: list[str] = []
        if restored is not None:
            layout = restored.layout(opened.dst)
        else:
            files = _files_of_base(opened, contents.base, target, notes)
            layout = huggingface_layout.allocate(opened.dst, target.tensors.values(), options.max_shard_size, files)
        if options.index == "always":
            layout = huggingface_layout.with_index(layout)
        recorded = {} if restored is None else restored.digests

        def check(tree: Path, outcome: Outcome) -> None:
            check_huggingface(tree, layout)
            check_digests(outcome, recorded)
            if restored is not None and restored.reordered:
                check_reordered(tree, layout.catalog, restored, opened.files, options)

        markers = () if layout.index_text is None else ((layout.index_name, layout.index_text.encode()),)
        return Allocation(layout.catalog, check, prologues=layout.prologues, markers=markers, notes=tuple(notes))

    def edits(self, opened: Opened, view: ModelView, named: Named, cast: Cast, base: Base, ties: Ties) -> ConfigEdits:
        return safetensors_edits(opened, view, named, cast, base, ties)

    def sidecars(self, opened: Opened, base: Base) -> list[str]:
        beside = base.files_from
        names = without_backend(beside.root, beside.sidecars)
        return [name for name in names if name == COMMON_FILE] if opened.options.base == "none" else names

    def manifest(self, contents: Contents, allocation: Allocation, digests: Mapping[str, str]) -> dict[str, Any]:
        return manifest_of("huggingface", allocation.catalog, digests)


def _files_of_base(opened: Opened, base: Base, target: Target, notes: list[str]) -> Mapping[str, int] | None:
    """Which file of the base each tensor was in, where the trainer noted it and nothing else is asked for."""
    asked = opened.options.max_shard_size_given or opened.options.names not in (None, "disk")
    if asked or base.files.keys().isdisjoint(target.tensors):
        return None
    lost = [name for name in base.files if name not in target.tensors]
    if lost:
        said = f"{counted(len(lost), 'name')} of no tensor here, as tied ones are, left out of the files"
        notes.append(f"{FILES}: {said}: {first_of(lost)}")
    return base.files
