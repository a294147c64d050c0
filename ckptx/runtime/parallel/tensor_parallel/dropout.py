"""Dropout on activations that TP has cut, and on those that every rank has whole.

    whole    the default generator, in one state on all TP ranks: the same is dropped, or what they hold whole drifts
    cut      between a projection that cuts and the one that sums up, a stream of the rank's own: heads, features and
             slices of the sequence of other ranks are dropped in another way

(Megatron-LM, arXiv 1909.08053, has two streams that both go on.) Here nothing is kept beside the default generator: the
rank's own stream is seeded by its state and the rank, and lasts until the sum. So a layer that is computed a second
time with the state it began with finds its masks again, a checkpoint has one state to save, and that state means the
same for any number of TP ranks.
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
from ckptx.runtime.parallel.tensor_parallel.plans import GATHERING, Plan
from ckptx.runtime.parallel.tensor_parallel.sequence import SequenceSharding, is_in
from ckptx.runtime.parallel.tensor_parallel.styles import EXPERTS
from ckptx.runtime.torch_private import DropoutNd

_DROPS = re.compile("drop|stochastic_depth")


class RngStreams:
    """Switches the default generator between the stream that TP ranks share and the rank's own."""

    def __init__(self, ranks: TpRanks) -> None:
        self._rank = ranks.rank
        self._generator: torch.Generator | None = None  # which of them runs the own stream
        self._seed = -1  # of the own stream; another seed in the generator means that somebody put it back
        self._shared = torch.empty(0)

    @property
    def uses_own_stream(self) -> bool:
        """Whether random numbers come from the rank's own stream now."""
        return self._generator is not None and self._generator.initial_seed() == self._seed

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the state of a generator is no part of a graph
    def own(self, device: torch.device) -> None:
        """From here on the rank's own stream; the shared one will go on behind a number that nobody used."""
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
    def shared(self) -> None:
        """From here on the stream that TP ranks share."""
        if self.uses_own_stream:
            assert self._generator is not None
            self._generator.set_state(self._shared)


def install(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    plan: Plan,
    is_sharded: Collection[str],
    gathered: Collection[str],
    cut: SequenceSharding,
    ranks: TpRanks,
) -> None:
    """Puts the switches on a model, after all other styles; on one without dropout, none.

    Args:
        model: Of which `modules` are the modules, by path; its dropout as it will be trained.
        modules: See above.
        plan: See `find_plan`.
        is_sharded: Modules that hold shards.
        gathered: Modules around which parameters are gathered: what they compute is whole.
        cut: Where the sequence is cut.
        ranks: Who has the other shards.
    """
    if not drops(model):
        return
    streams = RngStreams(ranks)
    begins, ends = [], []
    for path in is_sharded:
        if any(is_in(path, scope) for scope in gathered):
            continue
        style, module = plan.style_of(path), modules[path]
        if style in EXPERTS:
            _inside(module, streams)
        elif isinstance(module, nn.Linear) and STYLES[style] is Kind.COLWISE and style not in GATHERING:
            if path != plan.sharded_head:
                _begins(module, streams)
                begins.append(path)
        elif isinstance(module, nn.Linear) and STYLES[style] is Kind.ROWWISE:
            if not cut.is_summand(path):
                _ends(module, streams)
            ends.append(path)
    for path in dict.fromkeys(scope for each in begins for scope in _scopes_of(each, modules, ends)):
        _scope(modules[path], streams)
    for module in _dropouts_on_slices(modules, cut):
        _inside(module, streams)
    _compare_first(model, ranks)


def drops(model: nn.Module) -> bool:
    """Whether anything in a model is dropped at random in training: by a module, an attribute or a key of a config."""
    configs = [module.__dict__["config"] for module in model.modules() if "config" in module.__dict__]
    nested = [getattr(config, key, None) for config in configs for key in getattr(config, "sub_configs", ())]
    settings = (
        each if isinstance(each, Mapping) else vars(each)  # some classes keep a nested config as it was read
        for each in (*model.modules(), *configs, *nested)
        if isinstance(each, Mapping) or hasattr(each, "__dict__")
    )
    is_dropout = any(isinstance(each, DropoutNd) and each.p > 0 for each in model.modules())
    return is_dropout or any(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and bool(_DROPS.search(str(key)))
        for values in settings
        for key, value in values.items()
    )


def _begins(module: nn.Module, streams: RngStreams) -> None:
    """What a module gives is cut."""
    stock = module.forward

    def forward(x: torch.Tensor) -> Any:
        y = stock(x)
        if module.training:
            streams.own(y.device)
        return y

    module.forward = forward


def _ends(module: nn.Module, streams: RngStreams) -> None:
    """What a module gives is whole."""
    stock = module.forward

    def forward(x: torch.Tensor) -> Any:
        if module.training:
            streams.shared()
        return stock(x)

    module.forward = forward


def _inside(module: nn.Module, streams: RngStreams) -> None:
    """What a module computes is cut, from its beginning to its end."""
    stock = module.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if not module.training or first is None or streams.uses_own_stream:
            return stock(*args, **kwargs)
        streams.own(first.device)
        try:
            return stock(*args, **kwargs)
        finally:
            streams.shared()

    module.forward = forward


def _scope(module: nn.Module, streams: RngStreams) -> None:
    """However a module ends, the shared stream goes on.

    It may end early: an error, or a second pass that has computed what it is wanted for. And a plan may cut what no
    other module sums up.
    """
    stock = module.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return stock(*args, **kwargs)
        try:
            return stock(*args, **kwargs)
        finally:
            streams.shared()

    module.forward = forward


def _scopes_of(path: str, modules: Mapping[str, nn.Module], ends: Iterable[str]) -> Iterator[str]:
    """Modules around one that cuts: the smallest in which something sums up, and its layer, or else the whole model."""
    above = [path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)]
    smallest = next((each for each in above if any(is_in(end, each) for end in ends)), None)
    layer = next((each for each in above if each.rpartition(".")[2].isdecimal() and _runs(modules[each])), None)
    found = [each for each in (smallest, layer) if each is not None and _runs(modules[each])]
    yield from found or [""]


def _runs(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _dropouts_on_slices(modules: Mapping[str, nn.Module], cut: SequenceSharding) -> Iterator[nn.Module]:
    """Dropout modules of layers whose sequence is cut, outside of the passages where it is whole."""
    for path, module in modules.items():
        in_layer = any(is_in(path, layer) for layer in cut.layers)
        in_passage = any(is_in(path, each.path) for each in cut.passages)
        if in_layer and not in_passage and isinstance(module, DropoutNd):
            yield module


def _compare_first(model: nn.Module, ranks: TpRanks) -> None:
    """Before its first pass in training mode, holds the states of the generators of the TP ranks against each other."""

    def compare(module: nn.Module, *_: Any) -> None:
        if not module.training:
            return
        handle.remove()
        if dist.get_backend(ranks.group) == "fake":
            return  # the other ranks are not there, and draw nothing
        device = next(module.parameters()).device
        states: list[Any] = [None] * ranks.size
        own = blake2b(generator_of(device).get_state().numpy().tobytes(), digest_size=8).hexdigest()
        dist.all_gather_object(states, own, group=ranks.group)
        other = next((rank for rank, each in enumerate(states) if each != states[0]), None)
        if other is not None:
            raise UsageError(
                f"dropout: TP ranks 0 and {other} would draw other random numbers, needed the same, or what they hold "
                "whole drifts apart; call randomness.seed(number, mesh) on every rank before the first step"
            )

    handle = model.register_forward_pre_hook(compare)
