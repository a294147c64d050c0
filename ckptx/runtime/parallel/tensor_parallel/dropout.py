"""Dropout under TP: on sharded activations and on whole ones.

    whole    the default generator, in the same state on all TP ranks: the masks are equal, or replicas would diverge
    sharded  between a colwise projection and the rowwise one that sums, each rank has a stream of its own: the masks of
             heads, features and sequence slices differ between ranks

Megatron-LM (arXiv 1909.08053) keeps two streams. Here only the default generator has state: the rank's own stream is
seeded by that state and the rank, and lasts until the sum. So a recomputed layer that starts from its saved state gets
its masks again, a checkpoint has one state to save, and that state is valid for any number of TP ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptx.architecture.run_support import GATHER_STYLES
from ckptx.errors import UsageError
from ckptx.layout.styles import STYLES, StyleKind
from ckptx.runtime.parallel.randomness import default_generator
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks
from ckptx.runtime.parallel.tensor_parallel.plans import TpPlan
from ckptx.runtime.parallel.tensor_parallel.sequence import SequenceSharding, is_inside
from ckptx.runtime.parallel.tensor_parallel.styles import EXPERT_STYLES
from ckptx.runtime.torch_private import DropoutNd

_DROPOUT_KEYS = re.compile("drop|stochastic_depth")


class RngStreams:
    """Switches the default generator between the stream that TP ranks share and the rank's own."""

    def __init__(self, ranks: TpRanks) -> None:
        self._rank = ranks.rank
        self._generator: torch.Generator | None = None  # the generator that was last set to the own stream
        self._own_seed = -1  # seed of the own stream; a generator with another seed is not, or no longer, set to it
        self._shared_state = torch.empty(0)  # state of the shared stream, which is restored after the own one

    @property
    def uses_own_stream(self) -> bool:
        """True if random numbers currently come from the rank's own stream."""
        return self._generator is not None and self._generator.initial_seed() == self._own_seed

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the state of a generator is no part of a graph
    def use_own_stream(self, device: torch.device) -> None:
        """Switch to the rank's own stream; no effect if it is in use.

        Before, one number of the shared stream is drawn, so that the next own stream gets another seed.
        """
        if self.uses_own_stream:
            return
        generator = default_generator(device)
        with torch.no_grad():
            torch.empty((), device=device).uniform_(generator=generator)
        self._generator, self._shared_state = generator, generator.get_state()
        digest = blake2b(self._shared_state.numpy().tobytes() + self._rank.to_bytes(4, "little"), digest_size=8)
        self._own_seed = int.from_bytes(digest.digest(), "little") >> 1
        generator.manual_seed(self._own_seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def use_shared_stream(self) -> None:
        """Switch back to the stream that TP ranks share; no effect if it is in use."""
        if self.uses_own_stream:
            assert self._generator is not None
            self._generator.set_state(self._shared_state)


def install_rng_streams(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    plan: TpPlan,
    sharded_modules: Collection[str],
    gathered_modules: Collection[str],
    sequence_sharding: SequenceSharding,
    ranks: TpRanks,
) -> None:
    """Install the switches on a model, after all other styles; none on a model without dropout.

    Args:
        model: Model that contains `modules`, with the dropout probabilities of training.
        modules: All modules of the model, by path.
        plan: Plan from `find_plan`.
        sharded_modules: Paths of modules with sharded parameters.
        gathered_modules: Paths of modules whose parameters are gathered around their forward pass, so that outputs are
            whole.
        sequence_sharding: Sharding of the sequence.
        ranks: TP ranks.
    """
    if not has_dropout(model):
        return
    streams = RngStreams(ranks)
    colwise_paths, rowwise_paths = [], []
    for path in sharded_modules:
        if any(is_inside(path, each) for each in gathered_modules):
            continue
        style, module = plan.style_of(path), modules[path]
        if style in EXPERT_STYLES:
            _use_own_stream_within(module, streams)
        elif isinstance(module, nn.Linear) and STYLES[style] is StyleKind.COLWISE and style not in GATHER_STYLES:
            if path != plan.sharded_head:
                _use_own_stream_after(module, streams)
                colwise_paths.append(path)
        elif isinstance(module, nn.Linear) and STYLES[style] is StyleKind.ROWWISE:
            if not sequence_sharding.has_partial_output(path):
                _use_shared_stream_before(module, streams)
            rowwise_paths.append(path)
    for path in dict.fromkeys(
        path for each in colwise_paths for path in _find_stream_ends(each, modules, rowwise_paths)
    ):
        _use_shared_stream_after(modules[path], streams)
    for module in _dropouts_on_sequence_slices(modules, sequence_sharding):
        _use_own_stream_within(module, streams)
    _check_states_on_first_pass(model, ranks)


def has_dropout(model: nn.Module) -> bool:
    """Return True if a module, an attribute or a config key sets a nonzero dropout probability."""
    configs = [module.__dict__["config"] for module in model.modules() if "config" in module.__dict__]
    nested = [getattr(config, key, None) for config in configs for key in getattr(config, "sub_configs", ())]
    settings = (
        each if isinstance(each, Mapping) else vars(each)  # some classes keep a nested config as a dict
        for each in (*model.modules(), *configs, *nested)
        if isinstance(each, Mapping) or hasattr(each, "__dict__")
    )
    has_dropout_module = any(isinstance(each, DropoutNd) and each.p > 0 for each in model.modules())
    return has_dropout_module or any(
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
        and bool(_DROPOUT_KEYS.search(str(key)))
        for values in settings
        for key, value in values.items()
    )


def _use_own_stream_after(module: nn.Module, streams: RngStreams) -> None:
    """Switch to the own stream after a module whose output is sharded."""
    original_forward = module.forward

    def forward(x: torch.Tensor) -> Any:
        y = original_forward(x)
        if module.training:
            streams.use_own_stream(y.device)
        return y

    module.forward = forward


def _use_shared_stream_before(module: nn.Module, streams: RngStreams) -> None:
    """Switch to the shared stream before a module whose output is whole."""
    original_forward = module.forward

    def forward(x: torch.Tensor) -> Any:
        if module.training:
            streams.use_shared_stream()
        return original_forward(x)

    module.forward = forward


def _use_own_stream_within(module: nn.Module, streams: RngStreams) -> None:
    """Use the own stream within a module whose intermediate results are sharded."""
    original_forward = module.forward

    @functools.wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if not module.training or first is None or streams.uses_own_stream:
            return original_forward(*args, **kwargs)
        streams.use_own_stream(first.device)
        try:
            return original_forward(*args, **kwargs)
        finally:
            streams.use_shared_stream()

    module.forward = forward


def _use_shared_stream_after(module: nn.Module, streams: RngStreams) -> None:
    """Switch to the shared stream whenever the forward of a module ends.

    It may end before the rowwise module: by an error, or in a recomputation that stops once it has all saved tensors.
    And a plan may shard outputs that no other module sums.
    """
    original_forward = module.forward

    @functools.wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return original_forward(*args, **kwargs)
        try:
            return original_forward(*args, **kwargs)
        finally:
            streams.use_shared_stream()

    module.forward = forward


def _find_stream_ends(path: str, modules: Mapping[str, nn.Module], rowwise_paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths of the modules whose end switches back to the shared stream after a colwise module.

    These are the smallest module that contains both the colwise module and a rowwise one, and the layer of the colwise
    module; "" (the model) if there is neither.

    Args:
        path: Path of the colwise module.
        modules: All modules of the model, by path.
        rowwise_paths: Paths of rowwise modules that run on shards.
    """
    enclosing_paths = [path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)]
    smallest = next(
        (each for each in enclosing_paths if any(is_inside(rowwise_path, each) for rowwise_path in rowwise_paths)), None
    )
    layer = next(
        (each for each in enclosing_paths if each.rpartition(".")[2].isdecimal() and _has_forward(modules[each])), None
    )
    paths = [each for each in (smallest, layer) if each is not None and _has_forward(modules[each])]
    yield from paths or [""]


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _dropouts_on_sequence_slices(modules: Mapping[str, nn.Module], sharding: SequenceSharding) -> Iterator[nn.Module]:
    """Yield dropout modules of layers with a sharded sequence, outside of full-sequence modules."""
    for path, module in modules.items():
        in_layer = any(is_inside(path, layer) for layer in sharding.layers)
        in_full_module = any(is_inside(path, each.path) for each in sharding.full_modules)
        if in_layer and not in_full_module and isinstance(module, DropoutNd):
            yield module


def _check_states_on_first_pass(model: nn.Module, ranks: TpRanks) -> None:
    """Make the model compare the generator states of the TP ranks before its first pass in training mode.

    The pass raises a UsageError if they differ.
    """

    def compare(module: nn.Module, *_: Any) -> None:
        if not module.training:
            return
        handle.remove()
        if dist.get_backend(ranks.group) == "fake":
            return  # the other ranks are simulated, and draw nothing
        device = next(module.parameters()).device
        states: list[Any] = [None] * ranks.size
        own_digest = blake2b(default_generator(device).get_state().numpy().tobytes(), digest_size=8).hexdigest()
        dist.all_gather_object(states, own_digest, group=ranks.group)
        differing_rank = next((rank for rank, each in enumerate(states) if each != states[0]), None)
        if differing_rank is not None:
            raise UsageError(
                f"dropout: the RNG states of TP ranks 0 and {differing_rank} differ, must be equal for replicas to "
                "stay equal; call ckptx.runtime.seed(number, mesh) on every rank before the first step"
            )

    handle = model.register_forward_pre_hook(compare)
