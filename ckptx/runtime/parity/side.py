"""The two checkpoints of `verify --run`, each as a model: on the meta device, in one piece, or parallel.

What differs between the two on purpose is only how they run. So where one of them ties two names and the other stores
both, both get two parameters; and windows that no short text would cross are made small in both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptx.comparison.stored_dtypes import dtype_differences
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.hf_metadata import directory_of_config
from ckptx.layout.stages import Stack
from ckptx.model_view.sharder import read_plan
from ckptx.options.verify import RunOptions
from ckptx.runtime.checkpointing.load import RegionsOf, differing, load_from, unread
from ckptx.runtime.checkpointing.load_report import LoadLedger
from ckptx.runtime.checkpointing.reading import OpenCheckpoint, open_source
from ckptx.runtime.model.build import build_model, materialize, read_config
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parallel.parallelize import ParallelizedModel, parallelize
from ckptx.runtime.parallel.tensor_parallel.plans import check_heads, find_plan
from ckptx.runtime.parity.execution import tokens_used
from ckptx.runtime.parity.inputs import windows
from ckptx.runtime.parity.inputs.batch import Inputs, inputs_for
from ckptx.runtime.parity.routing import Routing, routing_of, steer

_ROWS = 2  # of each batch
_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class ModelFacts(NamedTuple):
    """What is known of a side before anything has storage.

    Attributes:
        config: What the config class makes of the file.
        tokens_used: See `execution.tokens_used`.
        windows: Windows that are run smaller than the config says: key -> what it says.
        tied: Names that share the parameter of another name -> that name.
        names: Of all parameters.
        routing: Of its experts.
        takes_mask: Whether the class takes a mask of padding.
        trained: Names of the parameters that get gradients, one for each.
        nbytes: Of the parameters in the dtype that they are computed in.
        stored_nbytes: Of what is stored of the model.
    """

    config: dict[str, Any]
    tokens_used: frozenset[str]
    windows: Mapping[str, int]
    tied: Mapping[str, str]
    names: frozenset[str]
    routing: Routing
    takes_mask: bool
    trained: frozenset[str]
    nbytes: int
    stored_nbytes: int


class ShardedMetaModel(NamedTuple):
    """A model, parallel and without storage.

    Attributes:
        model: On the meta device.
        done: What was done to it.
        stored: The names on disk of each tensor of the whole model.
    """

    model: nn.Module
    done: ParallelizedModel
    stored: dict[str, tuple[str, ...]]

    @property
    def regions(self) -> RegionsOf | None:
        """What TP left of each parameter on this rank, where its DTensor does not say it."""
        layout = self.done.layout
        if layout is None:
            return None
        return lambda name: layout.local_regions(name) if layout.placements.get(name) is not None else None


@dataclass(frozen=True, slots=True)
class ModelSide:
    """One of the two checkpoints.

    Attributes:
        path: Of the checkpoint.
        fallback: Has the config of one without.
        options: How to run.
        apart: Names that get a parameter of their own although this side ties them, as the other side does not.
    """

    path: Path
    fallback: Path
    options: RunOptions
    apart: frozenset[str] = frozenset()

    @contextmanager
    def open_checkpoint(self) -> Iterator[OpenCheckpoint]:
        with self._source(self.path) as source:
            if source.config is not None or self.fallback == self.path:
                yield source
                return
        with self._source(self.fallback) as other:
            config = other.config
        with self._source(self.path, config) as source:
            yield source

    def _source(self, path: Path, config: Mapping[str, Any] | None = None) -> AbstractContextManager[OpenCheckpoint]:
        options = self.options
        return open_source(
            path,
            config=config,
            prefix=options.model_prefix,
            is_prefix_of_another=True,
            trust_remote_code=options.trust_remote_code,
        )

    def _home(self, source: OpenCheckpoint) -> Path:
        """The directory of the config."""
        if source.view.catalog.config is not None:
            return directory_of_config(source.view.catalog)
        with self._source(self.fallback) as other:
            if other.view.catalog.config is None:
                raise InputError(
                    f"{self.path}: found no config.json beside it or the reference, needed one to build it"
                )
            return directory_of_config(other.view.catalog)

    def look(self) -> ModelFacts:
        """Builds it on the meta device; refuses what cannot run on this mesh before anything has storage."""
        with self.open_checkpoint() as source:
            if source.architecture is None or source.config is None:
                raise UnsupportedError(f"{self.path}: its class is unknown, needed one of transformers to run it")
            name, _, config = read_config(self._home(source), trust_remote_code=self.options.trust_remote_code)
            check_heads(source.config, self.options.dims.tp, source.architecture)
            model = self.model(source)
            stored = sum(entry.nbytes for entry in source.tensors.values())
        parameters = dict(model.named_parameters())
        return ModelFacts(
            config={**config.to_dict(), "architectures": [name]},
            tokens_used=tokens_used(model),
            windows=windows.shrunk(config),
            tied=dict(getattr(model, "all_tied_weights_keys", None) or {}),
            names=frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)),
            routing=routing_of(model),
            takes_mask="attention_mask" in inspect.signature(type(model).forward).parameters,
            trained=frozenset(name for name, each in parameters.items() if each.requires_grad),
            nbytes=sum(each.numel() * each.element_size() for each in parameters.values()),
            stored_nbytes=stored,
        )

    def model(self, source: OpenCheckpoint) -> nn.Module:
        """On the meta device."""
        options = self.options
        model = build_model(
            self._home(source),
            dtype=_DTYPES[options.compute_dtype],
            stored=source.dtype,
            trust_remote_code=options.trust_remote_code,
            untied={*source.untied(), *self.apart},
            edit=windows.shrink,
        )
        steer(model, routing_of(model))
        return model

    def stacked(self) -> tuple[nn.Module, Sequence[Stack]]:
        """On the meta device, with its lists of layers."""
        with self.open_checkpoint() as source:
            assert source.architecture is not None and source.config is not None
            return self.model(source), source.architecture.stacks(source.config)

    def batches(self, seen: ModelFacts, microbatches: int = 1) -> list[Inputs]:
        """Batches for each data-parallel rank, those of the first rank first."""
        dims = self.options.dims
        with self.open_checkpoint() as source:
            config = self.model(source).config.to_dict()  # with the defaults of the class
        length = seen.routing.tokens_needed(config) * 2 // _ROWS  # half of all tokens are sent to experts in turn
        return [
            inputs_for(config, rows=_ROWS, seed=index, shards=dims.tp, at_least=length, is_padded=seen.takes_mask)
            for index in range(dims.dp * microbatches)
        ]

    def whole(self, process: RankContext) -> nn.Module:
        """Loaded, in one piece."""
        with self.open_checkpoint() as source:
            model = self.model(source)
            materialize(model, process.device)
            self.load(model, source, None)
        return model

    def build(
        self, mesh: DeviceMesh, make_stage_in_place: Callable[[nn.Module], None] | None = None
    ) -> ShardedMetaModel:
        """Parallel and without storage.

        Args:
            mesh: Of all ranks.
            make_stage_in_place: Makes a pipeline stage of the whole model, in place.
        """
        options = self.options
        with self.open_checkpoint() as source:
            assert source.config is not None
            model = self.model(source)
            user = None if options.tp_plan is None else dict(read_plan(str(options.tp_plan)))
            plan = find_plan(model, source.config, user) if options.dims.tp > 1 else None
            stored = dict(source.stored)
        if make_stage_in_place is not None:
            make_stage_in_place(model)
        done = parallelize(
            model,
            mesh,
            plan,
            activation_checkpointing=options.recomputed,
            scope=options.ac_scope,
            compile=options.compile,
        )
        return ShardedMetaModel(model, done, stored)

    def load(self, model: nn.Module, source: OpenCheckpoint, regions: RegionsOf | None) -> LoadLedger:
        """`load_from` with the ties of this side."""
        return load_from(model, source, regions=regions, tied=source.tied())

    def config_mismatches(
        self, model: nn.Module, source: OpenCheckpoint, regions: RegionsOf | None
    ) -> tuple[list[str], dict[str, str]]:
        """Names of what a model holds that is not what this side stores, and what of this side it has no place for."""
        tied = source.tied()
        return (
            differing(model, source, regions=regions, tied=tied),
            unread(model, source, regions=regions, tied=tied),
        )


def both_sides(
    reference: Path, checkpoint: Path, options: RunOptions
) -> tuple[ModelSide, ModelSide, ModelFacts, ModelFacts]:
    """The reference and the checkpoint with the same parameters, and what is known of each."""
    first, second = ModelSide(reference, reference, options), ModelSide(checkpoint, reference, options)
    seen, other = first.look(), second.look()
    ours, theirs = (seen.tied.keys() - other.tied.keys(), other.tied.keys() - seen.tied.keys())
    if ours & other.names:
        first = replace(first, apart=frozenset(ours & other.names))
        seen = first.look()
    if theirs & seen.names:
        second = replace(second, apart=frozenset(theirs & seen.names))
        other = second.look()
    return first, second, seen, other


def stored_dtypes_of(reference: ModelSide, checkpoint: ModelSide) -> list[dict[str, Any]]:
    """Compare the stored dtypes of both sides; see `dtype_differences`."""
    with reference.open_checkpoint() as first, checkpoint.open_checkpoint() as second:
        return dtype_differences(first.tensors, second.tensors, second.config, second.architecture)
