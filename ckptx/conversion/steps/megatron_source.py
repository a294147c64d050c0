"""A source with Megatron's names as one with disk names, which all later steps read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptx.architecture.trainer_naming.megatron_prefixes import find_prefixes
from ckptx.catalog.catalog import Catalog
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.naming import SchemeChange
from ckptx.conversion.steps.recorded_config import check_megatron_config
from ckptx.conversion.steps.source_model import DroppedState
from ckptx.errors import UnsupportedError
from ckptx.options.conversion import ConversionOptions
from ckptx.quantization.computed_files import ComputedFiles, FileOfBytes
from ckptx.storage.interface import SourceFiles

if TYPE_CHECKING:  # imported for a source with Megatron's names only
    from ckptx.model_view.megatron_names import MegatronModel


@dataclass(frozen=True, slots=True)
class RenamedSource:
    """The source, under disk names if its names are Megatron's.

    Attributes:
        base: Base with the source to convert.
        stored: Catalog of the source under its stored names.
        files: Files of the source, and a computed one for the step of a renamed optimizer.
        model: Renamed model; None if the names are not Megatron's.
        notes: Notes for the user.
    """

    base: BaseCheckpoint
    stored: Catalog
    files: SourceFiles
    model: MegatronModel | None = None
    notes: tuple[str, ...] = ()

    @property
    def keeps_optimizer(self) -> bool:
        """Return True if the renamed model has the optimizer state of the source."""
        return self.model is not None and self.model.has_optimizer

    def stored_names(self, names: Iterable[str]) -> set[str]:
        """Return the stored names of the tensors that these tensors are made of."""
        if self.model is None:
            return set(names)
        return {stored for name in names for stored in self.model.stored_names.get(name, (name,))}

    def dropped_state(self) -> DroppedState:
        """Return what is not written: the tensors that the renamed catalog does not have, and all pickled objects.

        Only called if the names of the source are Megatron's.
        """
        assert self.model is not None
        nbytes = sum(self.stored.tensors[name].nbytes for name in self.model.optimizer)
        objects = self.stored.objects.values()
        return DroppedState(
            self.model.dropped,
            {"tensors": len(self.model.optimizer), "bytes": nbytes},
            {"count": len(objects), "bytes": sum(entry.nbytes for entry in objects)},
        )

    def scheme_change(self, names: str) -> SchemeChange | None:
        """Return the change of names to the scheme `names`; None if the names are not Megatron's."""
        return None if self.model is None else SchemeChange("megatron", names, self.model.conversions)


def rename_megatron_source(
    base: BaseCheckpoint, files: SourceFiles, options: ConversionOptions, *, with_optimizer: bool
) -> RenamedSource:
    """Rename the tensors of the source to disk names if they have Megatron's names and there is a config.

    Args:
        base: Source and config.
        files: Files of the source.
        options: `optimizer`.
        with_optimizer: True if the output keeps optimizer state.

    Raises:
        InputError: See `map_megatron_names` and `check_megatron_config`.
        UnsupportedError: See `map_megatron_names`, or `--optimizer keep`.
    """
    if base.uses_no_base or not find_prefixes(base.source.tensors):
        return RenamedSource(base, base.source, files)
    from ckptx.model_view.megatron_names import STEP_FILE, map_megatron_names

    model = map_megatron_names(base.source, base.config, files, with_optimizer=with_optimizer)
    if model is None:
        return RenamedSource(base, base.source, files)
    check_megatron_config(base)
    if options.optimizer == "keep" and not model.has_optimizer:
        raise UnsupportedError(
            f"{base.source.location}: --optimizer keep: has no optimizer state that can be mapped; leave out "
            "--optimizer, or save with --dist-ckpt-optim-fully-reshardable"
        )
    if model.step_contents:
        files = ComputedFiles(files, {STEP_FILE: FileOfBytes(model.step_contents)})
    return RenamedSource(replace(base, source=model.catalog, is_renamed=True), base.source, files, model, model.notes)
