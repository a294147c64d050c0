"""State that a comparison leaves out: its numbers for the report, and notes."""

from __future__ import annotations

from ckptx.model_view.view import ModelView
from ckptx.report.number_formats import uncompared_text


def count_uncompared(*views: ModelView, objects: int) -> dict[str, int]:
    """Return the `not_compared` of the report.

    Args:
        views: Checkpoints whose training state is not compared.
        objects: Number of pickled objects that are not compared.
    """
    return {
        "optimizer": sum(len(view.optimizer) for view in views),
        "other": sum(len(view.other) for view in views),
        "objects": objects,
    }


def note_on_uncompared(view: ModelView, *, objects: int = 0) -> tuple[str, ...]:
    """Return a note on a checkpoint whose training state is not compared; none if it has no state.

    Args:
        view: View of the checkpoint.
        objects: Number of its pickled objects that are not compared.
    """
    counts = uncompared_text(count_uncompared(view, objects=objects))
    return (f"{view.catalog.location}: not compared: {counts}",) if counts else ()
