"""`convert to-hf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptx.catalog.manifest import OriginalFiles
from ckptx.conversion.outputs.output_format import Allocation, ConfigEdits, OutputContents, OutputFormat
from ckptx.conversion.outputs.safetensors_config import safetensors_edits
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint, no_config_error
from ckptx.conversion.steps.dtypes import CastTensors
from ckptx.conversion.steps.manifest import manifest_of
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.conversion.steps.output_check import check_digests, check_huggingface
from ckptx.conversion.steps.restoration import Restoration, restore_original
from ckptx.conversion.steps.source_model import DroppedState, Ties, drop_training_state
from ckptx.conversion.steps.target_tensors import TargetTensors
from ckptx.formats.dcp.megatron import names_without_backend_file
from ckptx.formats.hf import layout as huggingface_layout
from ckptx.formats.hf.hf_metadata import FILE_MAPPING
from ckptx.formats.hf.original_files import plan_recorded_files, record_files
from ckptx.model_view.view import ModelView, has_model_names
from ckptx.options.conversion import ToHfOptions
from ckptx.storage.interface import Source, SourceFiles
from ckptx.transfer.executor import CopyResult
from ckptx.wording import counted, first_of


@dataclass(frozen=True)
class HuggingFaceFormat(OutputFormat):
    """Safetensors with an index, as `save_pretrained` writes them.

    Attributes:
        options: Options of the conversion.
    """

    options: ToHfOptions
    sharding: None = None
    needs_tokenizer: ClassVar[bool] = True
    records_original_files: ClassVar[bool] = False

    @property
    def quantizes(self) -> bool:
        return self.options.quantize is not None

    def dropped_state(self, view: ModelView) -> DroppedState:
        return drop_training_state(view, view.catalog.objects, "is not converted to HF")

    def default_naming(self, view: ModelView) -> str | None:
        """Return "hf" for trainer and model names, because every loader knows disk names; None keeps disk names."""
        return "hf" if view.trainer_conversions or has_model_names(view) else None

    def restored(self, base: BaseCheckpoint, view: ModelView, ties: Ties) -> Restoration:
        """Restore the original files recorded in the manifest, unless options ask for a different output.

        Raises:
            InputError: No files can be restored, and there is neither a config nor `--base`.
        """
        options = self.options
        has_other_options = options.dtype != "auto" or options.sets_files or options.tied != "auto" or view.prefix
        restoration = Restoration()
        if not (
            has_other_options or base.catalog is not None or options.base == "none" or options.names not in (None, "hf")
        ):
            restoration = restore_original(view, ties.decisions, options.names)
        if restoration.files is None and base.config is None and options.base is None:
            raise no_config_error(base.source)
        return restoration

    def allocate(self, dst: Path, contents: OutputContents, source: SourceFiles) -> Allocation:
        target, restored, options = contents.sharded.target, contents.restored_files, self.options
        notes: list[str] = []
        original = self._files_of_base(contents.base, target) if restored is None else None
        if restored is not None:
            layout = restored.layout(dst)
        elif original is not None:
            assert contents.base.catalog is not None
            layout = plan_recorded_files(dst, original, target.tensors, str(contents.base.catalog.root))
        else:
            files = self._base_file_numbers(contents.base, target, notes)
            groups = None
            if options.group_experts is not None:
                from ckptx.model_view.experts import ep_ranks_of_experts  # not needed for other conversions

                option = f"--group-experts {options.group_experts}"
                groups = ep_ranks_of_experts(target.tensors, options.group_experts, option)
            layout = huggingface_layout.allocate(dst, target.tensors.values(), options.shard_bytes, files, groups)
        if options.index == "always":
            layout = huggingface_layout.with_index(layout)
        recorded_digests = {} if restored is None else restored.digests

        def check(tree: Source, outcome: CopyResult) -> None:
            check_huggingface(tree, layout)
            check_digests(outcome, recorded_digests)
            if restored is not None and restored.reordered_digests:
                from ckptx.conversion.steps.reordered_tensors import check_reordered

                check_reordered(tree, layout.catalog, restored, source, options)

        markers = () if layout.index_text is None else ((layout.index_name, layout.index_text.encode()),)
        return Allocation(layout.catalog, check, prologues=layout.prologues, markers=markers, notes=tuple(notes))

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
        catalog = base.sidecar_source
        return names_without_backend_file(catalog.source, catalog.sidecars)

    def manifest(self, contents: OutputContents, allocation: Allocation, digests: Mapping[str, str]) -> dict[str, Any]:
        return manifest_of("huggingface", allocation.catalog, digests)

    def _files_of_base(self, base: BaseCheckpoint, target: TargetTensors) -> OriginalFiles | None:
        """Return the files of the base if the output is quantized like it and has the same tensors; else None."""
        catalog = base.catalog
        if not self.quantizes or catalog is None or self.options.sets_files:
            return None
        if {name: (each.dtype, each.shape) for name, each in target.tensors.items()} != {
            name: (each.dtype, each.shape) for name, each in catalog.tensors.items()
        }:
            return None
        return record_files(catalog, []) if catalog.traits.can_be_restored else None

    def _base_file_numbers(
        self, base: BaseCheckpoint, target: TargetTensors, notes: list[str]
    ) -> Mapping[str, int] | None:
        """Return tensor name -> number of its file in the base, from 1; None if unknown or if options set the files.

        `notes` receives a note on names in the base that the target does not have.
        """
        has_other_options = self.options.sets_files or self.options.names not in (None, "hf")
        if has_other_options or base.file_numbers.keys().isdisjoint(target.tensors):
            return None
        unstored_names = [name for name in base.file_numbers if name not in target.tensors]
        if unstored_names:
            names = f"{counted(len(unstored_names), 'name')} without a stored tensor (such as tied weights) skipped"
            notes.append(f"{FILE_MAPPING}: {names}: {first_of(unstored_names)}")
        return base.file_numbers
