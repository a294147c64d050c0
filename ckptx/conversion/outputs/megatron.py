"""`convert to-megatron`: a Megatron `torch_dist` checkpoint of weights, in the directory of a training run.

DST/
    latest_checkpointed_iteration.txt    "release": weights without training state
    release/
        .metadata, __0_*.distcp          a DCP under Megatron's names; one chunk for each layer and expert
        metadata.json, common.pt         Megatron's own files
        config.json, tokenizer files     for the way back: Megatron does not read them
    ckptx.json                           the manifest
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptx.architecture.trainer_naming import megatron as megatron_naming
from ckptx.catalog.catalog import Catalog
from ckptx.conversion.outputs.dcp_parts import DcpOutput, append_part
from ckptx.conversion.outputs.output_format import Allocation, ConfigEdits, OutputContents, OutputFormat
from ckptx.conversion.outputs.safetensors_config import safetensors_edits
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.combined_tensors import CombinedTarget, combine_for_megatron
from ckptx.conversion.steps.dcp_check import check_dcp
from ckptx.conversion.steps.dtypes import CastTensors
from ckptx.conversion.steps.manifest import manifest_of
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.conversion.steps.source_model import DroppedState, Ties, drop_training_state
from ckptx.formats.dcp import layout as dcp_layout
from ckptx.formats.dcp.megatron import BACKEND_FILE, COMMON_FILE
from ckptx.formats.dcp.megatron_release import RELEASE, TRACKER_FILE, backend_bytes, common_bytes
from ckptx.formats.dcp.reader import METADATA
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.model_view.megatron_tensors import blocks_of
from ckptx.model_view.view import ModelView
from ckptx.options.conversion import ToMegatronOptions
from ckptx.storage.interface import SourceFiles


@dataclass(frozen=True)
class MegatronFormat(OutputFormat):
    """Weights as megatron-core's `dist_checkpointing` saves them.

    Attributes:
        options: Options of the conversion.
    """

    options: ToMegatronOptions
    sharding: None = None
    records_original_files: ClassVar[bool] = False
    directory: ClassVar[str] = f"{RELEASE}/"

    def dropped_state(self, view: ModelView) -> DroppedState:
        if not view.catalog.traits.is_training_format:
            return DroppedState()
        return drop_training_state(view, view.catalog.objects, "is not converted to Megatron")

    def default_naming(self, view: ModelView) -> str | None:
        """Return "hf": Megatron's tensors are made of those on the Hub."""
        return "hf"

    def combine(
        self, view: ModelView, named_target: NamedTarget, base: BaseCheckpoint, files: SourceFiles
    ) -> CombinedTarget:
        return combine_for_megatron(
            view,
            named_target,
            base,
            files,
            layers=self.options.layers,
            vocabulary_multiple=self.options.pad_vocab_to_multiple_of,
        )

    def allocate(self, dst: Path, contents: OutputContents, source: SourceFiles) -> Allocation:
        target = contents.sharded.target
        layout = dcp_layout.allocate_sharded(
            dst,
            ((entry, 0, blocks_of(name, entry.shape)) for name, entry in target.tensors.items()),
            ParallelDims(),
        )
        output = DcpOutput(Catalog(dst, "dcp", {}), [], [], {})
        append_part(output, layout, self.directory)
        metadata = dcp_layout.metadata_bytes(layout.catalog, target.aliases)
        is_stacked = any(megatron_naming.layer_suffix(name) is not None for name in target.tensors)
        output.markers.append((self.directory + METADATA, metadata))
        output.catalog_names[self.directory + METADATA] = {
            **{name: name for name in layout.catalog.tensors},
            **target.aliases,
        }
        return Allocation(
            output.catalog,
            lambda tree, _: check_dcp(tree, output),
            file_groups=output.file_groups,
            markers=(
                (self.directory + BACKEND_FILE, backend_bytes()),
                (self.directory + COMMON_FILE, common_bytes(has_stacked_layers=is_stacked)),
                *output.markers,
                (TRACKER_FILE, RELEASE.encode()),
            ),
            build_frame=archive_frame,
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
        return safetensors_edits(view, named_target, cast, base, ties, dtype)

    def sidecars(self, base: BaseCheckpoint) -> list[str]:
        written = (BACKEND_FILE, COMMON_FILE)
        return [sidecar.name for sidecar in base.sidecar_source.sidecars if sidecar.name not in written]

    def manifest(self, contents: OutputContents, allocation: Allocation, digests: Mapping[str, str]) -> dict[str, Any]:
        return manifest_of("dcp", allocation.catalog, digests, aliases=contents.sharded.target.aliases)
