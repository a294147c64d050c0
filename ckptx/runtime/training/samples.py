"""Samples of questions with answers: public datasets by their ids, and synthetic samples with the same columns.

squad     id, title, context, question, answers {text, answer_start}       synthetic samples: synthetic_text
medpix    image_id, mode, case_id, question, answer                        synthetic samples: synthetic_images
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch

from ckptx.errors import InputError, UsageError, missing_package
from ckptx.runtime.training.recipe import DataBlock
from ckptx.untrusted.printable import one_line

RawSample = Mapping[str, Any]  # a row of a dataset: values by column

_HUB_IDS = {"squad": "rajpurkar/squad", "medpix": "mmoukouba/MedPix-VQA"}
_SYNTHETIC_NAMES = {"squad": "synthetic_text", "medpix": "synthetic_images"}
_COLUMNS = {
    "squad": ("id", "title", "context", "question", "answers"),
    "medpix": ("image_id", "mode", "case_id", "question", "answer"),
}
_DEFAULT_SAMPLES = 64  # default number of synthetic samples
_SAVED_DATASET_FILE = "state.json"  # in a directory that `Dataset.save_to_disk` wrote
_IMAGE_SIZE = 24  # pixels
_COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "grey": (120, 120, 120)}


class QuestionExample(NamedTuple):
    """A question to the model, with the expected answer.

    Attributes:
        text: Question with its context.
        answer: Answer to learn; "" if the dataset has none.
        image: PIL image, uint8 tensor (3, height, width), or mapping with the encoded `bytes` of an image; None for a
            text-only question.
    """

    text: str
    answer: str
    image: Any = None


def open_raw_samples(data: DataBlock, seed: int) -> Sequence[RawSample]:
    """Return the samples of a public or synthetic dataset, which are read or made when they are indexed.

    Args:
        data: Data block of the recipe.
        seed: Seed of synthetic samples.

    Raises:
        InputError: The dataset is unavailable or empty, or has other columns.
        EnvironmentProblem: The package `datasets` is missing.
        UsageError: A path is given for synthetic samples.
    """
    if data.dataset in _HUB_IDS:
        return _open_public(data)
    if data.path is not None:
        raise UsageError(
            f"data.path is {one_line(data.path)}, but data.dataset {data.dataset} is synthetic and has no path; leave "
            "it out, or set another data.dataset"
        )
    return SyntheticSamples(data.dataset == "synthetic_images", data.samples or _DEFAULT_SAMPLES, seed)


def make_question(sample: RawSample) -> QuestionExample:
    """Return the question of a sample with the columns of squad or medpix; squad's first answer, "" if it has none."""
    if "answers" in sample:
        answers = sample["answers"]["text"]
        return QuestionExample(f"{sample['context']} {sample['question']}", answers[0] if answers else "")
    return QuestionExample(str(sample["question"]), str(sample["answer"]).strip(), sample["image_id"])


# --------------------------------------------------------------------------------------------------------------- public


def _open_public(data: DataBlock) -> Sequence[RawSample]:
    location = data.path or _HUB_IDS[data.dataset]
    try:
        import datasets
    except ImportError as error:
        raise missing_package(f"data.dataset {data.dataset}", error) from error
    try:
        if (Path(location) / _SAVED_DATASET_FILE).is_file():
            dataset = datasets.load_from_disk(location)
        else:
            dataset = datasets.load_dataset(location, split=data.split)
    except Exception as error:  # errors of datasets, pyarrow, the Hub or the network
        raise InputError(
            f"{one_line(location)}: the dataset cannot be read: {type(error).__name__}: "
            f"{one_line((str(error).splitlines() or ['no reason'])[0], 300)}; set data.path, or use synthetic samples "
            f"with the same columns: --set data.dataset={_SYNTHETIC_NAMES[data.dataset]}"
        ) from error
    missing_columns = [each for each in _COLUMNS[data.dataset] if each not in dataset.column_names]
    if missing_columns:
        raise InputError(
            f"{one_line(location)}: has columns {', '.join(map(one_line, dataset.column_names))}, but lacks "
            f"{', '.join(missing_columns)} of {_HUB_IDS[data.dataset]}; use another dataset"
        )
    samples: Sequence[RawSample] = dataset
    if data.samples is not None:
        samples = dataset.select(range(min(data.samples, len(dataset))))
    if not len(samples):
        raise InputError(f"{one_line(location)}: split {data.split} is empty; set another data.split")
    return samples


# ------------------------------------------------------------------------------------------------------------ synthetic


class SyntheticSamples(Sequence[RawSample]):
    """Synthetic samples that depend on a seed and their index only.

    Question and answer of each fit into 32 bytes, the default `sequence_length` for a tokenizer of bytes.
    """

    def __init__(self, has_images: bool, length: int, seed: int) -> None:
        self._has_images, self._length, self._seed = has_images, length, seed

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> RawSample: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[RawSample]: ...

    def __getitem__(self, index: int | slice) -> RawSample | Sequence[RawSample]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._length))]
        if not 0 <= index < self._length:
            raise IndexError(index)
        rng = random.Random(f"{self._seed} {index}")
        return _make_image_sample(rng, index) if self._has_images else _make_text_sample(rng, index)

    def __iter__(self) -> Iterator[RawSample]:
        return (self[each] for each in range(self._length))


def _make_text_sample(rng: random.Random, index: int) -> RawSample:
    """Return a sample with a few names and numbers, and a question for one of the numbers."""
    names = rng.sample("abcdefghijklmnopqrstuvwxyz", 2 + index % 2)
    facts = [f"{name}={rng.randrange(100)}" for name in names]
    fact = rng.choice(facts)
    context = " ".join(facts)
    return {
        "id": f"{index:08x}", "title": "made up", "context": context, "question": f"{fact[0]}?",
        "answers": {"text": [fact[2:]], "answer_start": [context.index(fact) + 2]},
    }  # fmt: skip


def _make_image_sample(rng: random.Random, index: int) -> RawSample:
    """Return a sample with an image of one color with a lighter corner, and a question for the color."""
    color = rng.choice(sorted(_COLORS))
    image = torch.tensor(_COLORS[color], dtype=torch.uint8)[:, None, None].repeat(1, _IMAGE_SIZE, _IMAGE_SIZE)
    size = rng.randrange(2, _IMAGE_SIZE // 2)
    image[:, :size, :size] = rng.randrange(235, 256)
    return {
        "image_id": image, "mode": "train", "case_id": f"{index:08x}", "question": "colour?", "answer": color,
    }  # fmt: skip
