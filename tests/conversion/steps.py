"""What the steps of a conversion begin with, made of tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ckptx.conversion.steps import base_checkpoint
from ckptx.conversion.steps.open_source import SourceCheckpoint, open_source
from ckptx.conversion.steps.source_model import find_model, resolve_ties
from ckptx.model_view.view import ModelView
from ckptx.options.conversion import ConversionOptions, ReshardOptions, ToDcpOptions, ToHfOptions
from tests.support.checkpoint_writers import LLAMA

CONFIG: dict[str, Any] = {
    **LLAMA, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 2, "vocab_size": 16,
}  # fmt: skip
TIED = {**CONFIG, "tie_word_embeddings": True}


@contextmanager
def source(src: Path, command: str = "reshard", **options: Any) -> Iterator[SourceCheckpoint]:
    """A checkpoint, opened to be converted into `out` beside it."""
    paths = src, src.parent / "out"
    made: dict[str, Callable[..., ConversionOptions]] = {
        "reshard": ReshardOptions,
        "hf2dcp": partial(ToDcpOptions, "hf2dcp"),
        "dcp2hf": partial(ToHfOptions, "dcp2hf"),
    }
    with open_source(*paths, made[command](*paths, **options)) as ready:
        yield ready


def find_base(ready: SourceCheckpoint, need: base_checkpoint.ConfigNeed) -> base_checkpoint.BaseCheckpoint:
    """Its config."""
    return base_checkpoint.find_base(ready.source, ready.dst, ready.options, need)


def viewed(ready: SourceCheckpoint, need: base_checkpoint.ConfigNeed = "config", **fields: Any) -> ModelView:
    """The model in it."""
    return find_model(find_base(ready, need), ready.files, ready.options, **{"with_state": False, **fields}).view


def decided(ready: SourceCheckpoint) -> tuple[ModelView, Any]:
    """The model in it, and its ties."""
    view = viewed(ready)
    return view, resolve_ties(view, ready.files, ready.options)


def frozen(value: Any) -> Any:
    """A copy of what mappings hold, to be compared with later."""
    return {name: frozen(each) for name, each in value.items()} if isinstance(value, Mapping) else value
