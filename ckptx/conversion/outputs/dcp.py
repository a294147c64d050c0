"""`convert to-dcp`, and `reshard` into a DCP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptx.catalog.catalog import Catalog
from ckptx.conversion.outputs.dcp_parts import DcpContents, DcpOutput, allocate_dcp
from ckptx.conversion.outputs.dcp_prefix import refuse_unreadable_prefix
from ckptx.conversion.outputs.output_format import Allocation, ConfigEdits, OutputContents, OutputFormat, float_edits
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.dcp_check import check_dcp
from ckptx.conversion.steps.dtypes import CastTensors, config_dtype_edits
from ckptx.conversion.steps.manifest import manifest_of
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.conversion.steps.source_model import DroppedState, Ties, drop_training_state
from ckptx.formats.dcp import layout as dcp_layout
from ckptx.formats.dcp.reader import METADATA
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.model_view.view import ModelView
from ckptx.options.conversion import DcpOptions
from ckptx.options.mesh import OutputShardingOptions
from ckptx.storage.interface import SourceFiles


@dataclass(frozen=True)
class DcpFormat(OutputFormat):
    """A DCP, as `torch.distributed.checkpoint.save` writes it.

    Attributes:
        options: Options of the conversion.
        sharding: Mesh and sharding rules if each rank gets its own files; None if tensors stay whole and files are
            balanced by size.
    """

    options: DcpOptions
    sharding: OutputShardingOptions | None
    can_alias: ClassVar[bool] = True
    keeps_wrappers: ClassVar[bool] = True
    needs_model: ClassVar[bool] = False

    @property
    def has_new_prefix(self) -> bool:
        return bool(self.options.prefix)

    def keeps_state(self, source: Catalog) -> bool:
        traits = source.traits
        return traits.is_training_format and traits.can_keep_state and self.options.optimizer != "drop"

    def dropped_state(self, view: ModelView) -> DroppedState:
        if not view.catalog.traits.is_training_format:
            return DroppedState()
        reason = self.options.drop_reason if view.catalog.traits.can_keep_state else "of torch.save is not converted"
        return drop_training_state(view, view.catalog.objects, reason)

    def default_naming(self, view: ModelView) -> str | None:
        return "hf" if view.catalog.traits.has_model_names else None

    def names(self, view: ModelView, named_target: NamedTarget) -> dict[str, str]:
        """Map target names to output names.

        Names of a training checkpoint are kept with wrappers and prefix, because the trainer that wrote it expects
        them, unless `--names` changes them. Names of an HF source get the prefix of `--prefix`.

        Raises:
            UsageError: The reader would not find the model under the prefix.
        """
        names = OutputFormat.names(self, view, named_target)
        if not view.catalog.traits.is_training_format:
            prefix = self.options.prefix
            if prefix:
                refuse_unreadable_prefix(prefix, names, view)
            return {name: prefix + name for name in names}
        if named_target.naming.sources:
            return names
        return {name: view.tensors[name].name if name in view.tensors else view.prefix + name for name in names}

    def aliases(self, view: ModelView, named_target: NamedTarget, names: Mapping[str, str]) -> dict[str, str]:
        """Map each second name of a tensor to its first; both are written because the trainer may read either."""
        if named_target.naming.sources:
            return {}
        prefix = "" if view.catalog.traits.is_training_format else self.options.prefix
        stored_names = {entry.name: names[name] for name, entry in view.tensors.items() if name in names}
        return {
            prefix + name: stored_names[other]
            for name, other in view.duplicates.items()
            if other in stored_names and name not in stored_names
        }

    def allocate(self, dst: Path, contents: OutputContents, source: SourceFiles) -> Allocation:
        output = _allocate_parts(dst, contents, self.options.files)
        return Allocation(
            output.catalog,
            lambda tree, _: check_dcp(tree, output),
            file_groups=output.file_groups,
            markers=tuple(output.markers),
            build_frame=archive_frame,
            ranks=output.ranks,
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
        return float_edits(view, cast, base, config_dtype_edits(view, cast, base, named_target.naming, dtype))

    def sidecars(self, base: BaseCheckpoint) -> list[str]:
        return [sidecar.name for sidecar in base.sidecar_source.sidecars]

    def manifest(self, contents: OutputContents, allocation: Allocation, digests: Mapping[str, str]) -> dict[str, Any]:
        target, state = contents.sharded.target, contents.state
        return manifest_of(
            "dcp",
            allocation.catalog,
            digests,
            aliases={**target.aliases, **state.aliases},
            copies={**target.copied_aliases, **state.copies},
            original=contents.original_files,
            sharding=contents.sharded.sharded_model,
            model_names=_model_names(contents),
        )


def _allocate_parts(dst: Path, contents: OutputContents, files: int | None) -> DcpOutput:
    """Assign every block and pickled object to a file and an offset, in each part of the output.

    Args:
        dst: Directory to write.
        contents: Contents of the output; without a mesh, it has no training state.
        files: Number of `.distcp` files, as for `dcp_layout.allocate`; None chooses it by size.
    """
    target, state, sharding = contents.sharded.target, contents.state, contents.sharded.sharded_model
    if sharding is None:
        assert not state.tensors
        catalog = dcp_layout.allocate(dst, target.tensors.values(), files)
        marker = (METADATA, dcp_layout.metadata_bytes(catalog, target.aliases))
        names_in_metadata = {**{name: name for name in catalog.tensors}, **target.aliases}
        return DcpOutput(catalog, [(name,) for name in catalog.files], [marker], {}, {METADATA: names_in_metadata})
    order = {name: index for index, name in enumerate(target.source.tensors)}
    source_names = {**target.source_names, **state.source_names}
    blocks = [
        (entry, sharding.placements[name].stage, sharding.placements[name].blocks)
        for name, entry in target.tensors.items()
    ]
    blocks += [(entry, *state.placements[name]) for name, entry in state.tensors.items()]
    blocks.sort(key=lambda each: order[source_names[each[0].name]])  # source order: one sequential pass
    dcp_contents = DcpContents(
        blocks,
        state.objects,
        {**target.aliases, **state.aliases},
        {**target.copied_aliases, **state.copies},
    )
    return allocate_dcp(dst, dcp_contents, sharding.dims, files, target.source)


def _model_names(contents: OutputContents) -> dict[str, str]:
    """Map output names to loaded names, where they differ."""
    naming = contents.naming
    if naming.rules is None:
        return {}
    model_names = {out: naming.loaded_name(name) for name, out in contents.names.items()}
    return {out: name for out, name in model_names.items() if name is not None and name != out}
