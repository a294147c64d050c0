"""Buffers that a trainer's model requires and files on the Hub lack: zero, as in a new model of the trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptx.architecture.trainer_naming.detect import SCHEMES
from ckptx.catalog.entry import Chunk
from ckptx.catalog.region import full_region
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.quantization.computed_files import ComputedFile, ComputedFiles, FileOfZeros
from ckptx.storage.interface import SourceFiles
from ckptx.wording import counted, first_of


@dataclass(frozen=True, slots=True)
class TargetWithBuffers:
    """Target with the buffers of a trainer's model.

    Attributes:
        named_target: Target tensors under the names of the trainer, with the buffers.
        files: Files of the source, and a computed file of each buffer.
        notes: Notes for the user.
    """

    named_target: NamedTarget
    files: SourceFiles
    notes: tuple[str, ...] = ()


def add_trainer_buffers(named_target: NamedTarget, files: SourceFiles) -> TargetWithBuffers:
    """Add the buffers that the model of a trainer requires, if the tensors were renamed to the names of the trainer.

    Args:
        named_target: Target tensors under their new names.
        files: Files of the source.
    """
    change = named_target.scheme_change
    scheme = None if change is None else SCHEMES.get(change.after)
    target = named_target.target
    buffers = [] if scheme is None else list(scheme.buffers_to_add(target.tensors))
    if not buffers:
        return TargetWithBuffers(named_target, files)
    assert scheme is not None
    computed: dict[str, ComputedFile] = {}
    source_tensors, tensors = dict(target.source.tensors), dict(target.tensors)
    source_names, stored_names = dict(target.source_names), dict(target.stored_names)
    for buffer in buffers:
        file_name = f"zeros {buffer.name}"
        computed[file_name] = FileOfZeros(buffer.nbytes)
        entry = buffer._replace(chunks=(Chunk(full_region(buffer.shape), file_name, 0, buffer.nbytes),))
        source_tensors[file_name] = entry.with_name(file_name)
        tensors[buffer.name], source_names[buffer.name], stored_names[buffer.name] = entry, file_name, ()
    new_target = replace(
        target,
        source=replace(target.source, tensors=source_tensors),
        tensors=tensors,
        source_names=source_names,
        stored_names=stored_names,
    )
    names = [buffer.name for buffer in buffers]
    note = f"{counted(len(names), 'tensor')} of zeros added, which {scheme.trainer} requires: {first_of(names)}"
    return TargetWithBuffers(replace(named_target, target=new_target), ComputedFiles(files, computed), (note,))
