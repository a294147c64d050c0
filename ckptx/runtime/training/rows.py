"""Samples of questions with answers: public data sets by their ids, and synthetic ones with the same columns.

squad     id, title, context, question, answers {text, answer_start}       also made by synthetic_text
medpix    image_id, mode, case_id, question, answer                        also made by synthetic_images
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

Row = Mapping[str, Any]

_IDS = {"squad": "rajpurkar/squad", "medpix": "mmoukouba/MedPix-VQA"}
_MADE_UP = {"squad": "synthetic_text", "medpix": "synthetic_images"}
_COLUMNS = {
    "squad": ("id", "title", "context", "question", "answers"),
    "medpix": ("image_id", "mode", "case_id", "question", "answer"),
}
_SAMPLES = 64  # default number of synthetic samples
_SAVED = "state.json"  # in a directory that `Dataset.save_to_disk` wrote
_SIDE = 24  # pixels
_COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "grey": (120, 120, 120)}


class QuestionExample(NamedTuple):
    """A question to the model, with the expected answer.

    Attributes:
        text: Question with its context.
        answer: Answer to learn.
        image: PIL image, or uint8 tensor (3, height, width); None for a text-only question.
    """

    text: str
    answer: str
    image: Any = None


def open_rows(data: DataBlock, seed: int) -> Sequence[Row]:
    """Return the samples of a data set.

    Args:
        data: Data block of the recipe.
        seed: Seed of synthetic samples.

    Raises:
        InputError: The data set is unavailable, or has other columns.
        EnvironmentProblem: The package `datasets` is missing.
        UsageError: A path is given for synthetic samples.
    """
    if data.dataset in _IDS:
        return _public(data)
    if data.path is not None:
        raise UsageError(
            f"data.path is {one_line(data.path)}, but data.dataset {data.dataset} is synthetic and has no path; leave "
            "it out, or set another data set"
        )
    return SyntheticSequences(data.dataset == "synthetic_images", data.samples or _SAMPLES, seed)


def question_of(row: Row) -> QuestionExample:
    """Convert a sample of either kind to a question."""
    if "answers" in row:
        answers = row["answers"]["text"]
        return QuestionExample(f"{row['context']} {row['question']}", answers[0] if answers else "")
    return QuestionExample(str(row["question"]), str(row["answer"]).strip(), row["image_id"])


# -------------------------------------------------------------------------------------------------------------- public


def _public(data: DataBlock) -> Sequence[Row]:
    where = data.path or _IDS[data.dataset]
    try:
        import datasets
    except ImportError as error:
        raise missing_package(f"data.dataset {data.dataset}", error) from error
    try:
        if (Path(where) / _SAVED).is_file():
            found = datasets.load_from_disk(where)
        else:
            found = datasets.load_dataset(where, split=data.split)
    except Exception as error:  # its own kinds, those of pyarrow, of the Hub and of the network
        raise InputError(
            f"{one_line(where)}: the data set cannot be read: {type(error).__name__}: "
            f"{one_line((str(error).splitlines() or ['no reason'])[0], 300)}; set data.path, or use synthetic samples "
            f"with the same columns: --set data.dataset={_MADE_UP[data.dataset]}"
        ) from error
    lacking = [each for each in _COLUMNS[data.dataset] if each not in found.column_names]
    if lacking:
        raise InputError(
            f"{one_line(where)}: has columns {', '.join(map(one_line, found.column_names))}, but lacks "
            f"{', '.join(lacking)} of {_IDS[data.dataset]}; use another data set"
        )
    rows: Sequence[Row] = found if data.samples is None else found.select(range(min(data.samples, len(found))))
    if not len(rows):
        raise InputError(f"{one_line(where)}: split {data.split} is empty; set another data.split")
    return rows


# ------------------------------------------------------------------------------------------------------------- made up


class SyntheticSequences(Sequence[Row]):
    """Synthetic samples that depend on a seed and their index only; each fits into 32 bytes with its answer."""

    def __init__(self, has_images: bool, length: int, seed: int) -> None:
        self._has_images, self._length, self._seed = has_images, length, seed

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._length))]
        if not 0 <= index < self._length:
            raise IndexError(index)
        draw = random.Random(f"{self._seed} {index}")
        return _image_row(draw, index) if self._has_images else _text_row(draw, index)

    def __iter__(self) -> Iterator[Row]:
        return (self[each] for each in range(self._length))


def _text_row(draw: random.Random, index: int) -> Row:
    """Make a few names with numbers, and ask for one of the numbers."""
    names = draw.sample("abcdefghijklmnopqrstuvwxyz", 2 + index % 2)
    facts = [f"{name}={draw.randrange(100)}" for name in names]
    fact = draw.choice(facts)
    context = " ".join(facts)
    return {
        "id": f"{index:08x}", "title": "made up", "context": context, "question": f"{fact[0]}?",
        "answers": {"text": [fact[2:]], "answer_start": [context.index(fact) + 2]},
    }  # fmt: skip


def _image_row(draw: random.Random, index: int) -> Row:
    """Make a picture of one color with a lighter corner, and ask for the color."""
    color = draw.choice(sorted(_COLORS))
    image = torch.tensor(_COLORS[color], dtype=torch.uint8)[:, None, None].repeat(1, _SIDE, _SIDE)
    size = draw.randrange(2, _SIDE // 2)
    image[:, :size, :size] = draw.randrange(235, 256)
    return {
        "image_id": image, "mode": "train", "case_id": f"{index:08x}", "question": "colour?", "answer": color,
    }  # fmt: skip
