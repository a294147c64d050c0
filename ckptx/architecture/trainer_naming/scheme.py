"""The naming scheme of one trainer, as a value that `detect` and the step `naming` use without knowing the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptx.catalog.entry import TensorEntry
from ckptx.mapping.ops import Conversion


@dataclass(frozen=True, slots=True)
class TrainerScheme:
    """The names that one trainer gives to tensors.

    Attributes:
        trainer: Name of the trainer; a choice of `--names`.
        markers: Tensor names that its checkpoints have and files on the Hub never have; one of them is sufficient to
            detect the scheme.
        has_model: Takes the name of a transformers class; returns True if the trainer implements its model.
        conversions: Takes the name of a class and the contents of `config.json`; returns the conversions from the
            trainer's names to disk names, or raises UnsupportedError or InputError. In reverse, a tensor gets the
            name of the first conversion that fits.
        buffers: Patterns of buffers of the trainer's models. A class without a conversion of such a pattern has no
            such tensor on the Hub.
        buffers_to_add: Takes the tensors of a model under the names of the trainer; returns entries without chunks for
            the buffers that the trainer's model requires besides them. Their values in a new model are zero.
    """

    trainer: str
    markers: frozenset[str]
    has_model: Callable[[str], bool]
    conversions: Callable[[str, Mapping[str, Any]], tuple[Conversion, ...]]
    buffers: frozenset[str]
    buffers_to_add: Callable[[Mapping[str, TensorEntry]], Iterable[TensorEntry]]
