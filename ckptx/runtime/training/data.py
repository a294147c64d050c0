"""What a run is trained on: samples by number, each the same whenever it is asked for, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ckptx.errors import InputError
from ckptx.runtime.training.encoding import Encoder
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.rows import Row, open_rows, question_of

Sample = dict[str, Tensor]


class Dataset:
    """Samples of one length."""

    def __init__(self, rows: Sequence[Row], encoder: Encoder) -> None:
        self._rows, self._encoder = rows, encoder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """A sample: `input_ids`, `attention_mask` and `labels`, (1, sequence_length), and what an image needs.

        Every tensor has a first dim, of 1 or of the parts of an image, along which `collate` puts samples together.
        """
        return self._encoder(question_of(self._rows[index]))


def open_dataset(recipe: Recipe, source: Path) -> Dataset:
    """The data of a recipe, for the model in `source`.

    Args:
        recipe: Says which data.
        source: What `prepare_source` gave.

    Raises:
        InputError: The data set or the tokenizer cannot be had.
        EnvironmentProblem: The package `datasets` is missing.
        UsageError: The data does not go with the model.
        UnsupportedError: The model is of a kind that cannot go on with a text.
    """
    encoder = Encoder(source, recipe.data.sequence_length, trust_remote_code=recipe.model.trust_remote_code)
    dataset = Dataset(open_rows(recipe.data, recipe.training.seed), encoder)
    first = dataset[0]["labels"]
    if not bool((first[:, 1:] != -100).any()):
        raise InputError(
            f"{source}: the first sample of {recipe.data.dataset} has no label, needed an answer behind its question; "
            "look at the chat template, or give a longer data.sequence_length"
        )
    return dataset


def collate(samples: Sequence[Sample]) -> Sample:
    """A batch of samples, in their order.

    Raises:
        InputError: They do not have the same arguments, or images that cannot be in one batch.
    """
    names = {frozenset(each) for each in samples}
    if len(names) != 1:
        differing = sorted(frozenset().union(*names) - next(iter(names)).intersection(*names))
        raise InputError(
            f"batch: some samples have {', '.join(differing)}, needed all of them to; give rows of one kind"
        )
    try:
        return {name: torch.cat([each[name] for each in samples]) for name in samples[0]}
    except RuntimeError as error:
        shapes = {name: sorted({tuple(each[name].shape[1:]) for each in samples}) for name in samples[0]}
        uneven = {name: found for name, found in shapes.items() if len(found) > 1}
        raise InputError(f"batch: samples have shapes {uneven}, needed one; give images of one size") from error
