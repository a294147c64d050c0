"""Which tensors of the model the target holds, under which names."""

from __future__ import annotations

from ckptx.conversion.outputs.output_format import OutputFormat
from ckptx.conversion.steps.base import BaseCheckpoint
from ckptx.conversion.steps.model import Ties, wrapper_notes
from ckptx.conversion.steps.naming import rename
from ckptx.conversion.steps.restoration import OriginalFilesRecord, TensorSelection, remember
from ckptx.conversion.steps.target import share
from ckptx.model_view.view import ModelView
from ckptx.options.conversion import ConversionOptions


def select_tensors(
    base: BaseCheckpoint, view: ModelView, ties: Ties, output: OutputFormat, options: ConversionOptions
) -> TensorSelection:
    """The tensors of the files that the source began as; else ties as `--tied` says, and names as `--names` says.

    Args:
        base: The config, and where it comes from.
        view: The model.
        ties: Decisions on its tied names.
        output: The format to write.
        options: `tied`, `names`, and whatever asks for other files than the original ones.

    Raises:
        InputError: `--tied drop` would lose a tensor, tensors that belong together are not all there, or what the
            manifest calls tied is not.
        UnsupportedError: The class is unknown, or has a conversion that ckptx lacks.
    """
    restoring = output.restored(base, view, ties)
    if restoring.files is not None:
        notes = (*restoring.notes, *wrapper_notes(view, kept=False))
        return TensorSelection(restoring.files.named, restoring.files, notes=notes)
    remembered = remember(view) if output.remembers else OriginalFilesRecord(None)
    target = share(view, ties.decisions, tied=options.tied, can_alias=output.can_alias)
    original = remembered.original if target.holds(view.tensors) else None
    named = rename(
        view,
        target,
        asked=options.names,
        by_default=output.default_naming(view),
        original=None if original is None else list(original.tensors),
    )
    wrappers = wrapper_notes(view, kept=output.keeps_wrappers and not named.naming.sources)
    notes = (*restoring.notes, *remembered.notes, *named.notes, *wrappers)
    return TensorSelection(named, None, original, notes)
