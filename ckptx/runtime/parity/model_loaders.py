"""The two checkpoints of `verify --run` as models: on the meta device, loaded as a whole, or parallelized.

The two models differ only in how they run. If one checkpoint ties two names and the other stores both, both models get
two parameters; and attention windows are shrunk in both, see `inputs.windows`.
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

from ckptx.architecture.run_support import check_run_support
from ckptx.catalog.catalog import Catalog
from ckptx.comparison.stored_dtypes import find_dtype_differences
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.hf_metadata import config_source, local_config_directory
from ckptx.layout.stages import Stack
from ckptx.model_view.sharder import read_plan
from ckptx.options.verify import RunOptions
from ckptx.runtime.checkpointing.load import FindLocalRegions, find_differing_names, find_unread, load_from
from ckptx.runtime.checkpointing.load_report import LoadReport
from ckptx.runtime.checkpointing.reading import OpenCheckpoint, open_source
from ckptx.runtime.model.build import build_model, materialize, read_config
from ckptx.runtime.parallel.distributed import RankContext
from ckptx.runtime.parallel.parallelize import ParallelizedModel, parallelize
from ckptx.runtime.parallel.tensor_parallel.plans import find_plan
from ckptx.runtime.parity.execution import find_used_token_keys
from ckptx.runtime.parity.inputs import windows
from ckptx.runtime.parity.inputs.batch import Inputs, make_inputs
from ckptx.runtime.parity.routing import Routing, find_routing, install_even_routing

_BATCH_SIZE = 2  # sequences per microbatch
_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class ModelFacts(NamedTuple):
    """Properties of a model that are known before it has storage.

    Attributes:
        config: Config as its class reads it.
        used_token_keys: Config keys of special tokens that affect the computation; see
            `execution.find_used_token_keys`.
        windows: Attention windows that are shrunk: config key -> size in the config.
        tied_names: Names that share the parameter of another name -> that name.
        names: Names of all parameters, with all names of tied ones.
        routing: Experts and routers of the model.
        takes_mask: True if `forward` has an `attention_mask`.
        trained_names: Names of the parameters that require gradients; a tied one has its first name only.
        compute_nbytes: Bytes of the parameters in the dtype of the computation.
        stored_nbytes: Bytes of the tensors that the checkpoint stores for the model.
    """

    config: dict[str, Any]
    used_token_keys: frozenset[str]
    windows: Mapping[str, int]
    tied_names: Mapping[str, str]
    names: frozenset[str]
    routing: Routing
    takes_mask: bool
    trained_names: frozenset[str]
    compute_nbytes: int
    stored_nbytes: int


class ShardedMetaModel(NamedTuple):
    """A parallelized model without storage.

    Attributes:
        model: Model on the meta device.
        parallelized: Result of `parallelize`.
        stored_names: Name of each tensor of the whole model -> its names on disk.
    """

    model: nn.Module
    parallelized: ParallelizedModel
    stored_names: dict[str, tuple[str, ...]]

    @property
    def find_local_regions(self) -> FindLocalRegions | None:
        """A function from a parameter name to the regions that TP assigned to this rank; None without TP.

        It returns None for a parameter that TP does not shard.
        """
        layout = self.parallelized.layout
        if layout is None:
            return None
        return lambda name: layout.local_regions(name) if layout.placements.get(name) is not None else None


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """One of the two checkpoints, and how its model is run.

    Attributes:
        path: Path of the checkpoint.
        fallback: Checkpoint whose config is used if `path` has none.
        options: Options of the run.
        separate_names: Names tied on this side that get a parameter of their own, because they have one on the other
            side.
    """

    path: Path
    fallback: Path
    options: RunOptions
    separate_names: frozenset[str] = frozenset()

    @contextmanager
    def open_checkpoint(self) -> Iterator[OpenCheckpoint]:
        """Open the checkpoint, with the config of `fallback` if it has none."""
        with self._open(self.path) as source:
            if source.config is not None or self.fallback == self.path:
                yield source
                return
        with self._open(self.fallback) as other:
            config, config_checkpoint = other.config, other.view.catalog
        with self._open(self.path, config, config_checkpoint) as source:
            yield source

    def _open(
        self, path: Path, config: Mapping[str, Any] | None = None, config_checkpoint: Catalog | None = None
    ) -> AbstractContextManager[OpenCheckpoint]:
        options = self.options
        return open_source(
            path,
            config=config,
            config_checkpoint=config_checkpoint,
            prefix=options.source_prefix_or_none,
            is_prefix_optional=True,
            trust_remote_code=options.trust_remote_code,
            dequantize=options.dequantize,
        )

    def _find_config_directory(self, source: OpenCheckpoint) -> Path:
        """Return the directory of the config.

        Raises:
            InputError: Neither this checkpoint nor the fallback has a config.
        """
        if source.view.catalog.config is not None:
            return local_config_directory(source.view.catalog)
        with self._open(self.fallback) as other:
            if other.view.catalog.config is None:
                raise InputError(
                    f"{self.path}: neither this checkpoint nor {self.fallback} has a config.json; add one to build "
                    "the model"
                )
            return local_config_directory(other.view.catalog)

    def inspect_model(self) -> ModelFacts:
        """Return facts about the model, which is built on the meta device.

        Raises:
            InputError: There is no config.json.
            UnsupportedError: The class is unknown, or cannot run on this mesh.
        """
        with self.open_checkpoint() as source:
            if source.architecture is None or source.config is None:
                raise UnsupportedError(
                    f"{self.path}: no class of transformers is known for this checkpoint, and --run requires one; "
                    "compare the bytes without --run"
                )
            name, _, config = read_config(
                self._find_config_directory(source),
                trust_remote_code=self.options.trust_remote_code,
                dequantize=self.options.dequantize,
            )
            check_run_support(source.config, source.architecture, self.options.dims.tp, self.options.dims.pp)
            model = self.build_meta_model(source)
            stored_bytes = sum(entry.nbytes for entry in source.tensors.values())
        parameters = dict(model.named_parameters())
        return ModelFacts(
            config={**config.to_dict(), "architectures": [name]},
            used_token_keys=find_used_token_keys(model),
            windows=windows.find_windows(config),
            tied_names=dict(getattr(model, "all_tied_weights_keys", None) or {}),
            names=frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)),
            routing=find_routing(model),
            takes_mask="attention_mask" in inspect.signature(type(model).forward).parameters,
            trained_names=frozenset(name for name, each in parameters.items() if each.requires_grad),
            compute_nbytes=sum(each.numel() * each.element_size() for each in parameters.values()),
            stored_nbytes=stored_bytes,
        )

    def build_meta_model(self, source: OpenCheckpoint) -> nn.Module:
        """Build the model on the meta device."""
        options = self.options
        model = build_model(
            self._find_config_directory(source),
            dtype=_DTYPES[options.compute_dtype],
            default_dtype=source.dtype,
            trust_remote_code=options.trust_remote_code,
            untied={*source.find_untied_names(), *self.separate_names},
            dequantize=options.dequantize,
            edit_config=windows.shrink_windows,
        )
        install_even_routing(model, find_routing(model))
        return model

    def build_with_stacks(self) -> tuple[nn.Module, Sequence[Stack]]:
        """Build the model on the meta device, and return it with its lists of layers."""
        with self.open_checkpoint() as source:
            assert source.architecture is not None and source.config is not None
            return self.build_meta_model(source), source.architecture.stacks(source.config)

    def make_batches(self, facts: ModelFacts, microbatches: int = 1) -> list[Inputs]:
        """Return the batches of all data-parallel ranks, `microbatches` of each, those of the first rank first."""
        dims = self.options.dims
        with self.open_checkpoint() as source:
            config = self.build_meta_model(source).config.to_dict()  # with the defaults of the class
        length = facts.routing.min_tokens(config) * 2 // _BATCH_SIZE  # half of all tokens are sent to experts in turn
        return [
            make_inputs(
                config,
                batch_size=_BATCH_SIZE,
                seed=index,
                shards=dims.tp,
                min_tokens=length,
                is_padded=facts.takes_mask,
            )
            for index in range(dims.dp * microbatches)
        ]

    def load_whole(self, rank_context: RankContext) -> nn.Module:
        """Load the whole model on the device of this process."""
        with self.open_checkpoint() as source:
            model = self.build_meta_model(source)
            materialize(model, rank_context.device)
            self.load(model, source, None)
        return model

    def build_parallel(
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
            model = self.build_meta_model(source)
            user_plan = None if options.tp_plan is None else dict(read_plan(str(options.tp_plan)))
            plan = find_plan(model, source.config, user_plan) if options.dims.tp > 1 else None
            stored = dict(source.stored_names)
        if make_stage_in_place is not None:
            make_stage_in_place(model)
        parallelized = parallelize(
            model,
            mesh,
            plan,
            activation_checkpointing=options.checkpointing_mode,
            scope=options.ac_scope,
            compile=options.compile,
        )
        return ShardedMetaModel(model, parallelized, stored)

    def load(self, model: nn.Module, source: OpenCheckpoint, regions: FindLocalRegions | None) -> LoadReport:
        """Load values with `load_from`.

        A parameter that the checkpoint stores only under a name that its config ties to it gets the value of that name.

        Args:
            model: Model or stage with storage.
            source: The open checkpoint of this side.
            regions: Function from a parameter name to the regions of this rank, see `ShardedMetaModel`; None without
                TP.
        """
        return load_from(model, source, regions=regions, tied=source.find_tied_names())

    def find_differences(
        self, model: nn.Module, source: OpenCheckpoint, regions: FindLocalRegions | None
    ) -> tuple[list[str], dict[str, str]]:
        """Compare a model that was loaded from the other side with this side.

        Args:
            model: Model or stage with the values of the other side.
            source: The open checkpoint of this side.
            regions: See `load`.

        Returns:
            Names of the parameters that are not byte for byte what `load` would read from this side, and name on disk
            of each tensor of this side that the model does not read -> reason.
        """
        tied = source.find_tied_names()
        return (
            find_differing_names(model, source, regions=regions, tied=tied),
            find_unread(model, source, regions=regions, tied=tied),
        )


def make_loaders(
    reference: Path, checkpoint: Path, options: RunOptions
) -> tuple[ModelLoader, ModelLoader, ModelFacts, ModelFacts]:
    """Return the loaders of both checkpoints, whose models have the same parameters, and the facts of each.

    The reference is first in both pairs.
    """
    reference_loader, checkpoint_loader = (
        ModelLoader(reference, checkpoint, options),
        ModelLoader(checkpoint, reference, options),
    )
    reference_facts, checkpoint_facts = reference_loader.inspect_model(), checkpoint_loader.inspect_model()
    reference_only, checkpoint_only = (
        reference_facts.tied_names.keys() - checkpoint_facts.tied_names.keys(),
        checkpoint_facts.tied_names.keys() - reference_facts.tied_names.keys(),
    )
    if reference_only & checkpoint_facts.names:
        reference_loader = replace(reference_loader, separate_names=frozenset(reference_only & checkpoint_facts.names))
        reference_facts = reference_loader.inspect_model()
    if checkpoint_only & reference_facts.names:
        checkpoint_loader = replace(
            checkpoint_loader, separate_names=frozenset(checkpoint_only & reference_facts.names)
        )
        checkpoint_facts = checkpoint_loader.inspect_model()
    return reference_loader, checkpoint_loader, reference_facts, checkpoint_facts


def compare_stored_dtypes(reference: ModelLoader, checkpoint: ModelLoader) -> list[dict[str, Any]]:
    """Compare the stored dtypes of both sides; see `find_dtype_differences`.

    A tied name that the reference does not store is compared with the tensor that it is tied to. Names are those of the
    model, even for a checkpoint with the names of a trainer; so `disk_architecture`, which has them, decides which
    dtypes may differ.
    """
    with reference.open_checkpoint() as first, checkpoint.open_checkpoint() as second:
        stored_as = first.find_tied_names().items()
        tied_tensors = {name: first.tensors[source] for name, source in stored_as if source in first.tensors}
        has_own_config = second.view.catalog.config is not None
        return find_dtype_differences(
            {**tied_tensors, **first.tensors},
            second.tensors,
            second.config,
            second.view.disk_architecture,
            reference_config=None
            if has_own_config
            else str(config_source(first.view.catalog).location / "config.json"),
        )
