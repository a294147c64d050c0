"""Selection of the target tensors and their names."""

from __future__ import annotations

from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.naming import rename_tensors
from ckptx.conversion.steps.restoration import (
    RecordingResult,
    Restoration,
    TensorSelection,
    record_original,
)
from ckptx.conversion.steps.source_model import Ties, wrapper_notes
from ckptx.conversion.steps.target_tensors import apply_ties
from ckptx.model_view.view import ModelView
from ckptx.options.conversion import ConversionOptions


def select_tensors(
    base: BaseCheckpoint, view: ModelView, ties: Ties, output: OutputFormat, options: ConversionOptions
) -> TensorSelection:
    """Select the tensors of the original files if the output restores these, else apply `--tied` and `--names`.

    The manifest records the original files if the output format records them and does not restore them, no weight is
    dequantized, no adapter is merged, the names of the source are not Megatron's, and the target has every tensor of
    the source.

    Args:
        base: Source and base, see `BaseCheckpoint`.
        view: Model in the source.
        ties: Decisions on its tied weights.
        output: Format to write.
        options: `tied` and `names`.

    Raises:
        InputError: `--tied drop` would lose a tensor, some tensors that are combined into one are missing, tensors that
            the manifest declares tied differ, or the output requires a config and there is none.
        UnsupportedError: The class is unknown, or has a conversion that ckptx lacks.
    """
    is_altered = base.is_dequantized or base.is_renamed or base.is_merged
    restoration = Restoration() if is_altered else output.restored(base, view, ties)
    if restoration.files is not None:
        notes = (*restoration.notes, *wrapper_notes(view, are_kept=False))
        return TensorSelection(restoration.files.named_target, restoration.files, notes=notes)
    is_recorded = output.records_original_files and not is_altered
    record = record_original(view) if is_recorded else RecordingResult(None)
    target = apply_ties(view, ties.decisions, tied=options.tied, can_alias=output.can_alias)
    original = record.original if target.has_names(view.tensors) else None
    named_target = rename_tensors(
        view,
        target,
        names=options.names,
        default=output.default_naming(view),
        original_tensor_names=None if original is None else list(original.tensors),
    )
    wrappers = wrapper_notes(view, are_kept=output.keeps_wrappers and not named_target.naming.sources)
    notes = (*restoration.notes, *record.notes, *named_target.notes, *wrappers)
    return TensorSelection(named_target, None, original, notes)
