"""Training data of a run: reproducible samples by index, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ckptx.errors import InputError
from ckptx.runtime.training.encoding import Encoder
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.samples import Row, open_rows, to_question

Sample = dict[str, Tensor]


class Dataset:
    """Samples of one length."""

    def __init__(self, rows: Sequence[Row], encoder: Encoder) -> None:
        self._rows, self._encoder = rows, encoder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Return a sample: `input_ids`, `attention_mask` and `labels`, (1, sequence_length), and image arguments.

        The first dim of every tensor, 1 or the parts of an image, is the one along which `collate` concatenates.
        """
        return self._encoder(to_question(self._rows[index]))


def open_dataset(recipe: Recipe, source: Path) -> Dataset:
    """Return the data of a recipe, for the model in `source`.

    Args:
        recipe: Recipe that names the data.
        source: Directory from `prepare_source`.

    Raises:
        InputError: The dataset or the tokenizer is unavailable.
        EnvironmentProblem: The package `datasets` is missing.
        UsageError: The data does not fit the model.
        UnsupportedError: The model is an encoder-decoder.
    """
    encoder = Encoder(source, recipe.data.sequence_length, trust_remote_code=recipe.model.trust_remote_code)
    dataset = Dataset(open_rows(recipe.data, recipe.training.seed), encoder)
    first = dataset[0]["labels"]
    if not bool((first[:, 1:] != -100).any()):
        raise InputError(
            f"{source}: the first sample of {recipe.data.dataset} has no label, because its answer is missing or "
            "truncated; check the chat template, or increase data.sequence_length"
        )
    return dataset


def collate(samples: Sequence[Sample]) -> Sample:
    """Concatenate samples to a batch, in their order.

    Raises:
        InputError: They have different arguments, or images that cannot be in one batch.
    """
    names = {frozenset(each) for each in samples}
    if len(names) != 1:
        differing = sorted(frozenset().union(*names) - next(iter(names)).intersection(*names))
        raise InputError(f"batch: only some samples have {', '.join(differing)}; use samples of one kind")
    try:
        return {name: torch.cat([each[name] for each in samples]) for name in samples[0]}
    except RuntimeError as error:
        shapes = {name: sorted({tuple(each[name].shape[1:]) for each in samples}) for name in samples[0]}
        differing_shapes = {name: found for name, found in shapes.items() if len(found) > 1}
        raise InputError(f"batch: samples have different shapes, {differing_shapes}; use images of one size") from error
