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

from ckptx.errors import UsageError
from ckptx.layout.styles import STYLES, Kind
from ckptx.runtime.parallel.randomness import generator_of
from ckptx.runtime.parallel.tensor_parallel.collectives import TpRanks
from ckptx.runtime.parallel.tensor_parallel.plans import GATHER_STYLES, Plan
from ckptx.runtime.parallel.tensor_parallel.sequence import SequenceSharding, is_in
from ckptx.runtime.parallel.tensor_parallel.styles import EXPERTS
from ckptx.runtime.torch_private import DropoutNd

_DROPOUT_KEYS = re.compile("drop|stochastic_depth")


class RngStreams:
    """Switches the default generator between the stream that TP ranks share and the rank's own."""

    def __init__(self, ranks: TpRanks) -> None:
        self._rank = ranks.rank
        self._generator: torch.Generator | None = None  # the generator that is set to the own stream
        self._seed = -1  # seed of the own stream; a generator with another seed was reset from outside
        self._shared = torch.empty(0)

    @property
    def uses_own_stream(self) -> bool:
        """True if random numbers currently come from the rank's own stream."""
        return self._generator is not None and self._generator.initial_seed() == self._seed

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the state of a generator is no part of a graph
    def use_own(self, device: torch.device) -> None:
        """Switch to the rank's own stream; one number of the shared stream is skipped."""
        if self.uses_own_stream:
            return
        generator = generator_of(device)
        with torch.no_grad():
            torch.empty((), device=device).uniform_(generator=generator)
        self._generator, self._shared = generator, generator.get_state()
        digest = blake2b(self._shared.numpy().tobytes() + self._rank.to_bytes(4, "little"), digest_size=8)
        self._seed = int.from_bytes(digest.digest(), "little") >> 1
        generator.manual_seed(self._seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def use_shared(self) -> None:
        """Switch back to the stream that TP ranks share."""
        if self.uses_own_stream:
            assert self._generator is not None
            self._generator.set_state(self._shared)


def install(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    plan: Plan,
    is_sharded: Collection[str],
    gathered: Collection[str],
    sequence_sharding: SequenceSharding,
    ranks: TpRanks,
) -> None:
    """Install the switches on a model, after all other styles; none on a model without dropout.

    Args:
        model: Model that contains `modules`; its dropout probabilities as for training.
        modules: All modules of the model, by path.
        plan: Plan from `find_plan`.
        is_sharded: Modules with sharded parameters.
        gathered: Modules whose parameters are gathered around their forward pass: their results are whole.
        sequence_sharding: Sharding of the sequence.
        ranks: TP ranks.
    """
    if not has_dropout(model):
        return
    streams = RngStreams(ranks)
    colwise_paths, rowwise_paths = [], []
    for path in is_sharded:
        if any(is_in(path, scope) for scope in gathered):
            continue
        style, module = plan.style_of(path), modules[path]
        if style in EXPERTS:
            _own_within(module, streams)
        elif isinstance(module, nn.Linear) and STYLES[style] is Kind.COLWISE and style not in GATHER_STYLES:
            if path != plan.sharded_head:
                _own_after(module, streams)
                colwise_paths.append(path)
        elif isinstance(module, nn.Linear) and STYLES[style] is Kind.ROWWISE:
            if not sequence_sharding.is_summand(path):
                _shared_before(module, streams)
            rowwise_paths.append(path)
    for path in dict.fromkeys(scope for each in colwise_paths for scope in _scopes_of(each, modules, rowwise_paths)):
        _shared_at_exit(modules[path], streams)
    for module in _dropouts_on_slices(modules, sequence_sharding):
        _own_within(module, streams)
    _check_states_on_first_pass(model, ranks)


def has_dropout(model: nn.Module) -> bool:
    """Return True if a module, an attribute or a config key sets a nonzero dropout probability."""
    configs = [module.__dict__["config"] for module in model.modules() if "config" in module.__dict__]
    nested = [getattr(config, key, None) for config in configs for key in getattr(config, "sub_configs", ())]
    settings = (
        each if isinstance(each, Mapping) else vars(each)  # some classes keep a nested config as it was read
        for each in (*model.modules(), *configs, *nested)
        if isinstance(each, Mapping) or hasattr(each, "__dict__")
    )
    is_dropout = any(isinstance(each, DropoutNd) and each.p > 0 for each in model.modules())
    return is_dropout or any(
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
        and bool(_DROPOUT_KEYS.search(str(key)))
        for values in settings
        for key, value in values.items()
    )


def _own_after(module: nn.Module, streams: RngStreams) -> None:
    """Switch to the own stream after a module whose output is sharded."""
    stock = module.forward

    def forward(x: torch.Tensor) -> Any:
        y = stock(x)
        if module.training:
            streams.use_own(y.device)
        return y

    module.forward = forward


def _shared_before(module: nn.Module, streams: RngStreams) -> None:
    """Switch to the shared stream before a module whose output is whole."""
    stock = module.forward

    def forward(x: torch.Tensor) -> Any:
        if module.training:
            streams.use_shared()
        return stock(x)

    module.forward = forward


def _own_within(module: nn.Module, streams: RngStreams) -> None:
    """Use the own stream within a module whose results are sharded."""
    stock = module.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if not module.training or first is None or streams.uses_own_stream:
            return stock(*args, **kwargs)
        streams.use_own(first.device)
        try:
            return stock(*args, **kwargs)
        finally:
            streams.use_shared()

    module.forward = forward


def _shared_at_exit(module: nn.Module, streams: RngStreams) -> None:
    """Switch to the shared stream whenever a module ends.

    It may end early, by an error, or in a recomputation that has all that it needs. And a plan may shard outputs that
    no other module sums.
    """
    stock = module.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return stock(*args, **kwargs)
        try:
            return stock(*args, **kwargs)
        finally:
            streams.use_shared()

    module.forward = forward


def _scopes_of(path: str, modules: Mapping[str, nn.Module], ends: Iterable[str]) -> Iterator[str]:
    """Yield the smallest module around a colwise one that has a rowwise one, and the layer; else the model."""
    above = [path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)]
    smallest = next((each for each in above if any(is_in(end, each) for end in ends)), None)
    layer = next((each for each in above if each.rpartition(".")[2].isdecimal() and _has_forward(modules[each])), None)
    found = [each for each in (smallest, layer) if each is not None and _has_forward(modules[each])]
    yield from found or [""]


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _dropouts_on_slices(modules: Mapping[str, nn.Module], sharding: SequenceSharding) -> Iterator[nn.Module]:
    """Yield dropout modules of layers with a sharded sequence, outside of full-sequence modules."""
    for path, module in modules.items():
        in_layer = any(is_in(path, layer) for layer in sharding.layers)
        in_full_module = any(is_in(path, each.path) for each in sharding.full_modules)
        if in_layer and not in_full_module and isinstance(module, DropoutNd):
            yield module


def _check_states_on_first_pass(model: nn.Module, ranks: TpRanks) -> None:
    """Compare the generator states of the TP ranks before the first pass in training mode."""

    def compare(module: nn.Module, *_: Any) -> None:
        if not module.training:
            return
        handle.remove()
        if dist.get_backend(ranks.group) == "fake":
            return  # the other ranks are simulated, and draw nothing
        device = next(module.parameters()).device
        states: list[Any] = [None] * ranks.size
        own = blake2b(generator_of(device).get_state().numpy().tobytes(), digest_size=8).hexdigest()
        dist.all_gather_object(states, own, group=ranks.group)
        other = next((rank for rank, each in enumerate(states) if each != states[0]), None)
        if other is not None:
            raise UsageError(
                f"dropout: the RNG states of TP ranks 0 and {other} differ, must be equal for replicas to stay equal; "
                "call randomness.seed(number, mesh) on every rank before the first step"
            )

    handle = model.register_forward_pre_hook(compare)
