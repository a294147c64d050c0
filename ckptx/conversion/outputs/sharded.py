"""`reshard` into sharded safetensors.

Loaders look for every tensor by its model name, so a tied weight is stored under both names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptx.conversion.outputs.output_format import Allocation, ConfigEdits, OutputContents, OutputFormat
from ckptx.conversion.outputs.safetensors_config import safetensors_edits
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.dtypes import CastTensors
from ckptx.conversion.steps.manifest import manifest_of
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.conversion.steps.output_check import check_sharded
from ckptx.conversion.steps.source_model import DroppedState, Ties, drop_training_state
from ckptx.formats.dcp.megatron import names_without_backend_file
from ckptx.formats.sharded import layout as sharded_layout
from ckptx.model_view.view import ModelView
from ckptx.options.mesh import OutputShardingOptions
from ckptx.storage.interface import SourceFiles


@dataclass(frozen=True)
class ShardedFormat(OutputFormat):
    """Safetensors with separate files for each rank, in the format of torch's `HuggingFaceStorageWriter`.

    Attributes:
        sharding: Mesh and sharding rules.
    """

    sharding: OutputShardingOptions
    can_alias: ClassVar[bool] = True  # until tensors are sharded: the manifest records which names share bytes
    own_files_only: ClassVar[bool] = True

    def dropped_state(self, view: ModelView) -> DroppedState:
        if not view.catalog.traits.is_training_format:
            return DroppedState()
        return drop_training_state(view, view.catalog.objects, "cannot be stored in safetensors")

    def default_naming(self, view: ModelView) -> str | None:
        return "model"

    def allocate(self, dst: Path, contents: OutputContents, source: SourceFiles) -> Allocation:
        target, sharding = contents.sharded.target, contents.sharded.sharded_model
        assert sharding is not None
        layout = sharded_layout.allocate(
            dst,
            (
                (entry, sharding.placements[name].stage, sharding.placements[name].blocks)
                for name, entry in target.tensors.items()
            ),
            sharding.dims,
        )
        return Allocation(
            layout.catalog,
            lambda tree, _: check_sharded(tree, layout.catalog),
            file_groups=layout.file_groups,
            prologues=layout.prologues,
            ranks={name: int(name.split("-")[1]) - 1 for name in layout.catalog.files},
        )

    def edits(
        self,
        view: ModelView,
        named_target: NamedTarget,
        cast: CastTensors,
        base: BaseCheckpoint,
        ties: Ties,
        dtype: str,
    ) -> ConfigEdits:
        edits = safetensors_edits(view, named_target, cast, base, ties, dtype)
        return ConfigEdits(edits.changes, (*edits.notes, *_forced_tie_note(ties, edits)))

    def sidecars(self, base: BaseCheckpoint) -> list[str]:
        catalog = base.sidecar_source
        return names_without_backend_file(catalog.source, catalog.sidecars)

    def manifest(self, contents: OutputContents, allocation: Allocation, digests: Mapping[str, str]) -> dict[str, Any]:
        return manifest_of(
            "sharded",
            allocation.catalog,
            digests,
            copies=contents.sharded.target.copied_aliases,
            original=contents.original_files,
            sharding=contents.sharded.sharded_model,
        )


def _forced_tie_note(ties: Ties, edits: ConfigEdits) -> tuple[str, ...]:
    """Return a note if transformers would overwrite one tensor with the values of another.

    Its loader of sharded safetensors fills the parameters of a model that is already tied, and never compares them.
    """
    differing = [each for each in ties.decisions if each.declared and each.action == "keep-both"]
    if not differing or any(edit["key"].endswith("tie_word_embeddings") for edit in edits.changes):
        return ()
    note = (
        f'"{differing[0].target}" and "{differing[0].source}" differ, but the class always ties them: from_pretrained '
        "would load one for both from sharded safetensors; convert to-hf for from_pretrained, or load with torch's "
        "HuggingFaceStorageReader"
    )
    return (note,)
