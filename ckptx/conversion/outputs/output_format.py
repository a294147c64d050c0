"""What every output format says of itself, so that one pipeline writes them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.manifest import OriginalFiles
from ckptx.conversion.steps.base import BaseCheckpoint
from ckptx.conversion.steps.dtypes import CastTarget, quantization_edits
from ckptx.conversion.steps.model import DroppedState, Ties
from ckptx.conversion.steps.naming import NamedTarget, NameMap
from ckptx.conversion.steps.restoration import Restoration, RestoredFiles
from ckptx.conversion.steps.sharding import ShardedTarget
from ckptx.conversion.steps.training_state import TrainingState
from ckptx.model_view.view import ModelView
from ckptx.options.mesh import ShardingOptions
from ckptx.storage.interface import Source, SourceFiles
from ckptx.transfer.executor import CopyResult
from ckptx.transfer.plan import FrameOf


@dataclass(frozen=True, slots=True)
class OutputContents:
    """Everything that goes into an output, under the names that it has there.

    Attributes:
        sharded: The tensors of the model, and how they are cut.
        state: What a trainer keeps beside it.
        names: From the names that were chosen to those in the output.
        naming: From the names that were chosen to those of the model.
        base: Whose files travel along.
        restored: The files that the source began as, if they are written again.
        original: The files that the output remembers.
    """

    sharded: ShardedTarget
    state: TrainingState
    names: Mapping[str, str]
    naming: NameMap
    base: BaseCheckpoint
    restored: RestoredFiles | None = None
    original: OriginalFiles | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where everything will lie.

    Attributes:
        catalog: Every tensor and object of the output.
        check: Looks at the finished files before anything marks them as complete.
        groups: Files that are written together; None writes each alone.
        prologues: First bytes of a file, by its name.
        markers: Files that are written last, in this order: name and bytes.
        frame_of: Frame around a block, for formats that have one.
        ranks: Rank of each file, where files belong to ranks.
        notes: What the user should know.
    """

    catalog: Catalog
    check: Callable[[Source, CopyResult], None]
    groups: Sequence[Sequence[str]] | None = None
    prologues: Mapping[str, bytes] | None = None
    markers: tuple[tuple[str, bytes], ...] = ()
    frame_of: FrameOf | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigEdits:
    """Changes to config.json.

    Attributes:
        rows: `key`, `before` and `after` of each.
        notes: What the user should know.
    """

    rows: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


class OutputFormat(ABC):
    """One format of output.

    Attributes:
        layout: Mesh and rules when each rank of a mesh gets files of its own; None when tensors stay whole.
        can_alias: Two names can point at the same bytes.
        keeps_wrappers: Names keep what torch put around them, as the trainer that wrote them looks for it.
        needs_model: It is of no use without tensors of a model.
        every_rank_alone: Each rank reads its own files and no other.
        remembers: Its manifest keeps what it takes to write the files of the source again.
    """

    layout: ShardingOptions | None
    can_alias: ClassVar[bool] = False
    keeps_wrappers: ClassVar[bool] = False
    needs_model: ClassVar[bool] = True
    every_rank_alone: ClassVar[bool] = False
    remembers: ClassVar[bool] = True

    @property
    def has_new_prefix(self) -> bool:
        """True when every name gets a prefix."""
        return False

    def keeps_state(self, source: Catalog) -> bool:
        """Return True if training state is written, too."""
        return False

    @abstractmethod
    def dropped_state(self, view: ModelView) -> DroppedState:
        """What goes into the ledger as dropped when training state does not go along."""

    @abstractmethod
    def default_naming(self, view: ModelView) -> str | None:
        """What to do without `--names`; None leaves names as they are."""

    def restored(self, base: BaseCheckpoint, view: ModelView, ties: Ties) -> Restoration:
        """The files that the source began as, where this output can be these files again."""
        return Restoration()

    def names(self, view: ModelView, named: NamedTarget) -> dict[str, str]:
        """Map the names of a target to those in the output."""
        return {name: name for name in (*named.target.tensors, *named.target.aliases)}

    def second_names(self, view: ModelView, named: NamedTarget, names: Mapping[str, str]) -> dict[str, str]:
        """Names in the output for tensors that the source has under two names -> the other name there."""
        return {}

    @abstractmethod
    def allocate(self, dst: Path, contents: OutputContents, source: SourceFiles) -> Allocation:
        """Give every block its place.

        Args:
            dst: The directory to write.
            contents: All that goes into it.
            source: The files of the source, for checks of what was written.
        """

    @abstractmethod
    def edits(
        self, view: ModelView, named: NamedTarget, cast: CastTarget, base: BaseCheckpoint, ties: Ties, dtype: str
    ) -> ConfigEdits:
        """List the changes to config.json; `dtype` is that of `--dtype`."""

    @abstractmethod
    def sidecars(self, base: BaseCheckpoint) -> list[str]:
        """List the files beside the base or the source that are copied."""

    @abstractmethod
    def manifest(self, contents: OutputContents, allocation: Allocation, digests: Mapping[str, str]) -> dict[str, Any]:
        """What `ckptx.json` says, without files and sidecars."""


def float_edits(view: ModelView, cast: CastTarget, base: BaseCheckpoint, rows: Sequence[dict[str, Any]]) -> ConfigEdits:
    """Edits to dtypes, and those that take quantisation out of the config of a step in floats."""
    quantization = quantization_edits(view, cast.target, base)
    note = "config.json speaks of quantisation, and every weight is a float: taken out of it"
    return ConfigEdits((*rows, *quantization), (note,) if quantization else ())
