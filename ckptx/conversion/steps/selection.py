"""Selection of the target tensors and their names."""

from __future__ import annotations

from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.naming import rename_tensors
from ckptx.conversion.steps.restoration import OriginalFilesRecord, TensorSelection, record_original
from ckptx.conversion.steps.source_model import Ties, wrapper_notes
from ckptx.conversion.steps.target_tensors import apply_ties
from ckptx.model_view.view import ModelView
from ckptx.options.conversion import ConversionOptions


def select_tensors(
    base: BaseCheckpoint, view: ModelView, ties: Ties, output: OutputFormat, options: ConversionOptions
) -> TensorSelection:
    """Select the tensors of the original files, or apply `--tied` and `--names` if these are not restored.

    Args:
        base: Checkpoint that the config comes from.
        view: Model in the source.
        ties: Decisions on its tied weights.
        output: Format to write.
        options: `tied`, `names`, and the options that rule out restoring the original files.

    Raises:
        InputError: `--tied drop` would lose a tensor, some tensors that are combined into one are missing, or tensors
            that the manifest declares tied differ.
        UnsupportedError: The class is unknown, or has a conversion that ckptx lacks.
    """
    restoration = output.restored(base, view, ties)
    if restoration.files is not None:
        notes = (*restoration.notes, *wrapper_notes(view, kept=False))
        return TensorSelection(restoration.files.named, restoration.files, notes=notes)
    record = record_original(view) if output.records_original_files else OriginalFilesRecord(None)
    target = apply_ties(view, ties.decisions, tied=options.tied, can_alias=output.can_alias)
    original = record.original if target.has_names(view.tensors) else None
    named = rename_tensors(
        view,
        target,
        names=options.names,
        default=output.default_naming(view),
        original_names=None if original is None else list(original.tensors),
    )
    wrappers = wrapper_notes(view, kept=output.keeps_wrappers and not named.naming.sources)
    notes = (*restoration.notes, *record.notes, *named.notes, *wrappers)
    return TensorSelection(named, None, original, notes)
