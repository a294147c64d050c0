"""Interface of an output format; one pipeline writes all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.manifest import OriginalFiles
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.combined_tensors import CombinedTarget
from ckptx.conversion.steps.dtypes import CastTensors, dequantization_edits_if_float
from ckptx.conversion.steps.naming import NamedTarget, NameMap
from ckptx.conversion.steps.restoration import Restoration, RestoredFiles
from ckptx.conversion.steps.sharding import ShardedTarget
from ckptx.conversion.steps.source_model import DroppedState, Ties
from ckptx.conversion.steps.training_state import TrainingState
from ckptx.model_view.view import ModelView
from ckptx.options.adapter import AdapterSettings
from ckptx.options.mesh import OutputShardingOptions
from ckptx.storage.interface import Source, SourceFiles
from ckptx.transfer.executor import CopyResult
from ckptx.transfer.plan import ArchiveFrameBuilder


@dataclass(frozen=True, slots=True)
class OutputContents:
    """All contents of an output, under their output names.

    Attributes:
        sharded: Tensors of the model, by output name, with their shards.
        state: Training state; empty if the output does not keep it.
        names: Target name -> output name.
        naming: Map from target names to loaded names and to view names.
        base: Source and base, see `BaseCheckpoint`.
        restored_files: Original files of the source if they are restored; else None.
        original_files: Original files that the manifest of the output records; None for none.
    """

    sharded: ShardedTarget
    state: TrainingState
    names: Mapping[str, str]
    naming: NameMap
    base: BaseCheckpoint
    restored_files: RestoredFiles | None = None
    original_files: OriginalFiles | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Files of an output, with the position of every block.

    Attributes:
        catalog: Every tensor and object of the output.
        check: Checks the finished files before they are marked as complete.
        file_groups: Names of files that are written together because they have shards of the same tensors; None to
            write each file on its own.
        prologues: File name -> bytes before the first block; None if no file has such bytes.
        markers: Name and bytes of each file that is written last, in this order.
        build_frame: Function that returns the archive frame around a block from dtype and shape of the block; None for
            formats without frames.
        ranks: File name -> rank; empty if files do not belong to ranks.
        notes: Notes for the user.
    """

    catalog: Catalog
    check: Callable[[Source, CopyResult], None]
    file_groups: Sequence[Sequence[str]] | None = None
    prologues: Mapping[str, bytes] | None = None
    markers: tuple[tuple[str, bytes], ...] = ()
    build_frame: ArchiveFrameBuilder | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigEdits:
    """Changes to config.json.

    Attributes:
        changes: `key` (dotted), `before` and `after` of each change; `after` is None for a key that is removed.
        notes: Notes for the user.
    """

    changes: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


class OutputFormat(ABC):
    """Output format of a conversion.

    Attributes:
        sharding: Mesh and sharding rules if each rank gets its own files; None if tensors stay whole.
        can_alias: True if two names can point at the same bytes.
        keeps_wrappers: True if names keep torch's wrapper components, which the trainer that wrote them expects.
        needs_model: True if a source without model tensors is refused.
        needs_tokenizer: True if loaders of the output expect the files of a tokenizer.
        own_files_only: True if each rank reads only its own files.
        records_original_files: True if the manifest records the original files, so that they can be restored.
        directory: Directory of the output that sidecars are copied to, with a slash at the end; empty for its root.
    """

    sharding: OutputShardingOptions | None
    can_alias: ClassVar[bool] = False
    keeps_wrappers: ClassVar[bool] = False
    needs_model: ClassVar[bool] = True
    needs_tokenizer: ClassVar[bool] = False
    own_files_only: ClassVar[bool] = False
    records_original_files: ClassVar[bool] = True
    directory: ClassVar[str] = ""

    @property
    def quantizes(self) -> bool:
        """Return True if weights are quantized like those of the base."""
        return False

    @property
    def adapter_settings(self) -> AdapterSettings | None:
        """Return the settings of the adapter in the source if the output is an adapter; None for a model."""
        return None

    @property
    def has_new_prefix(self) -> bool:
        """Return True if every name gets a prefix that the source does not have."""
        return False

    def keeps_state(self, source: Catalog) -> bool:
        """Return True if training state is written as well."""
        return False

    @abstractmethod
    def dropped_state(self, view: ModelView) -> DroppedState:
        """Return the training state that the report lists as dropped; called only if `keeps_state` is False."""

    @abstractmethod
    def default_naming(self, view: ModelView) -> str | None:
        """Return the naming scheme used without `--names`; None keeps names."""

    def restored(self, base: BaseCheckpoint, view: ModelView, ties: Ties) -> Restoration:
        """Return the original files of the source; `files` is None if this output does not restore them."""
        return Restoration()

    def combine(
        self, view: ModelView, named_target: NamedTarget, base: BaseCheckpoint, files: SourceFiles
    ) -> CombinedTarget:
        """Return the target tensors in the form in which the output stores them; unchanged by default.

        Args:
            view: Model in the source.
            named_target: Target tensors with their dtypes.
            base: Source and base, see `BaseCheckpoint`.
            files: Files of the source.
        """
        return CombinedTarget(named_target, files)

    def names(self, view: ModelView, named_target: NamedTarget) -> dict[str, str]:
        """Map target names of tensors and aliases to output names."""
        return {name: name for name in (*named_target.target.tensors, *named_target.target.aliases)}

    def aliases(self, view: ModelView, named_target: NamedTarget, names: Mapping[str, str]) -> dict[str, str]:
        """Map the second output name of each tensor that the source has under two names to the first one.

        Args:
            view: Model in the source.
            named_target: Target tensors.
            names: Result of `names`.
        """
        return {}

    @abstractmethod
    def allocate(self, dst: Path, contents: OutputContents, source: SourceFiles) -> Allocation:
        """Assign every block to a file and an offset.

        Args:
            dst: Directory to write.
            contents: Contents of the output.
            source: Files of the source, which some checks of the written files read.
        """

    @abstractmethod
    def edits(
        self,
        view: ModelView,
        named_target: NamedTarget,
        cast: CastTensors,
        base: BaseCheckpoint,
        ties: Ties,
        dtype: str,
    ) -> ConfigEdits:
        """Return the changes to config.json; `dtype` is the value of `--dtype`, or "base" with `--quantize`."""

    @abstractmethod
    def sidecars(self, base: BaseCheckpoint) -> list[str]:
        """List the names of the files that are copied from the base or the source."""

    @abstractmethod
    def manifest(self, contents: OutputContents, allocation: Allocation, digests: Mapping[str, str]) -> dict[str, Any]:
        """Return the contents of `ckptx.json`, without files and sidecars.

        Args:
            contents: Contents of the output.
            allocation: Files of the output.
            digests: Output name -> digest of the tensor or object in hex.
        """


def float_edits(
    view: ModelView, cast: CastTensors, base: BaseCheckpoint, changes: Sequence[dict[str, Any]]
) -> ConfigEdits:
    """Return `changes`, followed by those of `dequantization_edits_if_float`, with a note if there are any of these."""
    quantization = dequantization_edits_if_float(view, cast.target, base)
    note = "quantization settings removed from config.json: every weight is a float"
    return ConfigEdits((*changes, *quantization), (note,) if quantization else ())
