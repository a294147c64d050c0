"""Tied tensors that the manifest of a checkpoint records, the only source of ties for an unknown class."""

from __future__ import annotations

from ckptx.model_view.view import ModelView, read_valid_manifest


def recorded_ties(view: ModelView) -> dict[str, str]:
    """Return the tensors that the manifest records as tied: stored name -> stored name of the tensor it is tied to.

    Model tensors and training state are included. A manifest proves nothing about the bytes: a command that uses a tie
    compares them.

    Raises:
        ReadError: The storage failed.
    """
    manifest = read_valid_manifest(view.catalog, [])
    if manifest is None:
        return {}
    stored = view.catalog.tensors
    return {
        name: record.tied_to
        for name, record in manifest.tensors.items()
        if record.tied_to is not None and name in stored and record.tied_to in stored
    }
