"""Training data of a run: reproducible samples by index, and batches of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ckptx.errors import InputError
from ckptx.runtime.training.encoding import IGNORE_INDEX, Encoder
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.samples import RawSample, make_question, open_raw_samples

EncodedSample = dict[str, Tensor]  # arguments of a model's forward and labels, by name


class Dataset:
    """Samples as arguments of a model, all of the same sequence length."""

    def __init__(self, raw_samples: Sequence[RawSample], encoder: Encoder) -> None:
        self._raw_samples, self._encoder = raw_samples, encoder

    def __len__(self) -> int:
        return len(self._raw_samples)

    def __getitem__(self, index: int) -> EncodedSample:
        """Return a sample: `input_ids`, `attention_mask` and `labels`, (1, sequence_length), and image arguments.

        The first dim of an image argument is 1, or the number of patches or tiles; `collate` concatenates along it.
        """
        return self._encoder(make_question(self._raw_samples[index]))


def open_dataset(recipe: Recipe, source: Path) -> Dataset:
    """Return the dataset of a recipe, encoded for the model in `source`.

    Args:
        recipe: Recipe that names the data.
        source: Directory from `prepare_source`.

    Raises:
        InputError: The dataset or the tokenizer is unavailable, or the first sample has no label.
        EnvironmentProblem: The package `datasets`, or one that the image processor requires, is missing.
        UsageError: The dataset has images and the model does not take them, an image does not fit the sequence length,
            or a path is given for a synthetic dataset.
        UnsupportedError: The model is an encoder-decoder.
    """
    encoder = Encoder(source, recipe.data.sequence_length, trust_remote_code=recipe.model.trust_remote_code)
    dataset = Dataset(open_raw_samples(recipe.data, recipe.training.seed), encoder)
    first_labels = dataset[0]["labels"]
    if not bool((first_labels[:, 1:] != IGNORE_INDEX).any()):
        raise InputError(
            f"{source}: the first sample of {recipe.data.dataset} has no label, because its answer is missing or "
            "truncated; check the chat template, or increase data.sequence_length"
        )
    return dataset


def collate(samples: Sequence[EncodedSample]) -> EncodedSample:
    """Concatenate samples to a batch, in their order.

    Args:
        samples: At least one sample.

    Raises:
        InputError: The samples have different arguments, or images that cannot be in one batch.
    """
    names = {frozenset(each) for each in samples}
    if len(names) != 1:
        differing = sorted(frozenset().union(*names) - next(iter(names)).intersection(*names))
        raise InputError(f"batch: only some samples have {', '.join(differing)}; use samples of one kind")
    try:
        return {name: torch.cat([each[name] for each in samples]) for name in samples[0]}
    except RuntimeError as error:
        shapes = {name: sorted({tuple(each[name].shape[1:]) for each in samples}) for name in samples[0]}
        differing_shapes = {name: each for name, each in shapes.items() if len(each) > 1}
        raise InputError(f"batch: samples have different shapes, {differing_shapes}; use images of one size") from error
