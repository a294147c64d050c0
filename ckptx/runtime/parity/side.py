"""The two checkpoints of `verify --run` as models: on the meta device, loaded as a whole, or parallelized.

The two models differ only in how they run. If one checkpoint ties two names and the other stores both, both models get
two parameters; and attention windows longer than the inputs are shrunk in both.
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
from ckptx.formats.hf.hf_metadata import local_config_directory
from ckptx.layout.stages import Stack
from ckptx.model_view.sharder import read_plan
from ckptx.options.verify import RunOptions
from ckptx.runtime.checkpointing.load import RegionsOf, find_differing, find_unread, load_from
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

_ROWS = 2  # batch size
_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class ModelFacts(NamedTuple):
    """Properties of a model that are known before it has storage.

    Attributes:
        config: Config as its class reads it.
        tokens_used: Config keys of special tokens that affect the computation; see `execution.tokens_used`.
        windows: Attention windows that are shrunk: config key -> size in the config.
        tied: Names that share the parameter of another name -> that name.
        names: Names of all parameters, with all names of tied ones.
        routing: Experts and routers of the model.
        takes_mask: True if `forward` has an `attention_mask`.
        trained: Names of the parameters that get gradients, one for each.
        nbytes: Bytes of the parameters in the dtype of the computation.
        stored_nbytes: Bytes of the tensors that the checkpoint stores for the model.
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
    """A parallelized model without storage.

    Attributes:
        model: Model on the meta device.
        parallelized: Result of `parallelize`.
        stored: The names on disk of each tensor of the whole model.
    """

    model: nn.Module
    parallelized: ParallelizedModel
    stored: dict[str, tuple[str, ...]]

    @property
    def regions(self) -> RegionsOf | None:
        """A function from a parameter name to the regions that TP assigned to this rank; None without TP.

        It returns None for a parameter that TP does not shard.
        """
        layout = self.parallelized.layout
        if layout is None:
            return None
        return lambda name: layout.local_regions(name) if layout.placements.get(name) is not None else None


@dataclass(frozen=True, slots=True)
class ModelSide:
    """One of the two checkpoints, and how its model is run.

    Attributes:
        path: Path of the checkpoint.
        fallback: Checkpoint whose config is used if `path` has none.
        options: Options of the run.
        separate_names: Names tied on this side that get a parameter of their own, because the other side stores them.
    """

    path: Path
    fallback: Path
    options: RunOptions
    separate_names: frozenset[str] = frozenset()

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
        """Return the directory of the config.

        Raises:
            InputError: Neither this checkpoint nor the fallback has a config.
        """
        if source.view.catalog.config is not None:
            return local_config_directory(source.view.catalog)
        with self._source(self.fallback) as other:
            if other.view.catalog.config is None:
                raise InputError(
                    f"{self.path}: neither this checkpoint nor the reference has a config.json; add one to build the "
                    "model"
                )
            return local_config_directory(other.view.catalog)

    def inspect_model(self) -> ModelFacts:
        """Build the model on the meta device, and refuse what cannot run on this mesh before anything has storage."""
        with self.open_checkpoint() as source:
            if source.architecture is None or source.config is None:
                raise UnsupportedError(
                    f"{self.path}: no class of transformers is known for this checkpoint, and --run requires one; "
                    "compare the bytes without --run"
                )
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
        """Build the model on the meta device."""
        options = self.options
        model = build_model(
            self._home(source),
            dtype=_DTYPES[options.compute_dtype],
            stored=source.dtype,
            trust_remote_code=options.trust_remote_code,
            untied={*source.untied(), *self.separate_names},
            edit=windows.shrink,
        )
        steer(model, routing_of(model))
        return model

    def stacked(self) -> tuple[nn.Module, Sequence[Stack]]:
        """Build the model on the meta device; returns it with its lists of layers."""
        with self.open_checkpoint() as source:
            assert source.architecture is not None and source.config is not None
            return self.model(source), source.architecture.stacks(source.config)

    def batches(self, facts: ModelFacts, microbatches: int = 1) -> list[Inputs]:
        """Return the batches of all data-parallel ranks, those of the first rank first."""
        dims = self.options.dims
        with self.open_checkpoint() as source:
            config = self.model(source).config.to_dict()  # with the defaults of the class
        length = facts.routing.tokens_needed(config) * 2 // _ROWS  # half of all tokens are sent to experts in turn
        return [
            inputs_for(config, rows=_ROWS, seed=index, shards=dims.tp, at_least=length, is_padded=facts.takes_mask)
            for index in range(dims.dp * microbatches)
        ]

    def whole(self, process: RankContext) -> nn.Module:
        """Load the whole model on the device of this process."""
        with self.open_checkpoint() as source:
            model = self.model(source)
            materialize(model, process.device)
            self.load(model, source, None)
        return model

    def build(
        self, mesh: DeviceMesh, make_stage_in_place: Callable[[nn.Module], None] | None = None
    ) -> ShardedMetaModel:
        """Build and parallelize the model, without storage.

        Args:
            mesh: Mesh of all ranks.
            make_stage_in_place: Turns the whole model into a pipeline stage, in place; None keeps it whole.
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
        parallelized = parallelize(
            model,
            mesh,
            plan,
            activation_checkpointing=options.recomputed,
            scope=options.ac_scope,
            compile=options.compile,
        )
        return ShardedMetaModel(model, parallelized, stored)

    def load(self, model: nn.Module, source: OpenCheckpoint, regions: RegionsOf | None) -> LoadLedger:
        """Load values with `load_from` and the ties of this side."""
        return load_from(model, source, regions=regions, tied=source.tied())

    def config_mismatches(
        self, model: nn.Module, source: OpenCheckpoint, regions: RegionsOf | None
    ) -> tuple[list[str], dict[str, str]]:
        """Return names of loaded parameters that differ from this side, and stored names that the model lacks.

        The second value maps each stored name to the reason.
        """
        tied = source.tied()
        return (
            find_differing(model, source, regions=regions, tied=tied),
            find_unread(model, source, regions=regions, tied=tied),
        )


def both_sides(
    reference: Path, checkpoint: Path, options: RunOptions
) -> tuple[ModelSide, ModelSide, ModelFacts, ModelFacts]:
    """Return both sides with the same set of parameters, and the facts of each."""
    first, second = ModelSide(reference, reference, options), ModelSide(checkpoint, reference, options)
    seen, other = first.inspect_model(), second.inspect_model()
    ours, theirs = (seen.tied.keys() - other.tied.keys(), other.tied.keys() - seen.tied.keys())
    if ours & other.names:
        first = replace(first, separate_names=frozenset(ours & other.names))
        seen = first.inspect_model()
    if theirs & seen.names:
        second = replace(second, separate_names=frozenset(theirs & seen.names))
        other = second.inspect_model()
    return first, second, seen, other


def stored_dtypes_of(reference: ModelSide, checkpoint: ModelSide) -> list[dict[str, Any]]:
    """Compare the stored dtypes of both sides; see `dtype_differences`."""
    with reference.open_checkpoint() as first, checkpoint.open_checkpoint() as second:
        return dtype_differences(first.tensors, second.tensors, second.config, second.architecture)
