"""Samples: of one length, the answer alone is learned, and both are what transformers itself says they are."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from ckptx.errors import EnvironmentProblem, InputError, UsageError
from ckptx.runtime.model.build import read_config
from ckptx.runtime.training.data import collate, open_dataset
from ckptx.runtime.training.encoding import IGNORE_INDEX, Encoder
from ckptx.runtime.training.recipe import DataBlock
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.runtime.training.samples import QuestionExample, make_question, open_raw_samples
from ckptx.runtime.training.source import prepare_source

QUESTION = QuestionExample("x=12 y=34 y?", "34")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_source(read_recipe("llama_tiny"), tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_source(read_recipe("gemma4_vlm_tiny"), tmp_path_factory.mktemp("seeing"))


def learned(sample: dict[str, torch.Tensor]) -> list[int]:
    return [each for each in sample["labels"][0].tolist() if each != IGNORE_INDEX]


def test_labels_are_what_the_template_marks(text: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text)
    chat = [{"role": "user", "content": QUESTION.text}, {"role": "assistant", "content": QUESTION.answer}]
    found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    sample = Encoder(text, 32)(QUESTION)
    count = len(found["input_ids"])
    assert sample["input_ids"][0, :count].tolist() == found["input_ids"]
    assert sample["labels"][0, :count].tolist() == [
        token if marked else IGNORE_INDEX
        for token, marked in zip(found["input_ids"], found["assistant_masks"], strict=True)
    ]
    assert tokenizer.decode(learned(sample)) == "34<eos>"
    assert sample["attention_mask"][0].tolist() == [1] * count + [0] * (32 - count)
    assert set(sample["input_ids"][0, count:].tolist()) == {tokenizer.pad_token_id}
    assert set(sample["labels"][0, count:].tolist()) == {IGNORE_INDEX}


def test_a_template_without_marks_gives_the_same_labels(text: Path, tmp_path: Path) -> None:
    marked = Encoder(text, 32)(QUESTION)
    tokenizer = AutoTokenizer.from_pretrained(text)
    tokenizer.chat_template = re.sub(r"\{% (end)?generation %\}", "", tokenizer.chat_template)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((text / "config.json").read_bytes())
    plain = Encoder(tmp_path, 32)
    assert not plain._marks_answers
    assert all(torch.equal(plain(QUESTION)[name], tensor) for name, tensor in marked.items())


def test_without_a_template_the_answer_follows_the_question(text: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((text / "config.json").read_bytes())
    sample = Encoder(tmp_path, 32)(QUESTION)
    assert tokenizer.decode(learned(sample)) == "34<eos>"
    assert tokenizer.decode(sample["input_ids"][0]).startswith("x=12 y=34 y?\n34<eos><pad>")


@pytest.mark.parametrize("length", [4, 8, 17])
def test_what_is_too_long_loses_the_beginning_of_its_question(text: Path, length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text)
    sample = Encoder(text, length)(QuestionExample("abcdefgh" * 9, "42"))
    assert sample["input_ids"].shape == (1, length)
    assert tokenizer.decode(learned(sample)) == "42<eos>"
    assert sample["input_ids"][0, 0] == tokenizer.bos_token_id


def test_an_answer_that_is_too_long_loses_its_end(text: Path) -> None:
    sample = Encoder(text, 8)(QuestionExample("ab", "0123456789"))
    assert AutoTokenizer.from_pretrained(text).decode(learned(sample)) == "0123456"


def test_samples_depend_on_their_number_and_the_seed_alone(text: Path) -> None:
    first, again = (open_dataset(read_recipe("llama_tiny"), text) for _ in range(2))
    assert len(first) == 20
    assert all(torch.equal(again[7][name], tensor) for name, tensor in first[7].items())
    assert not torch.equal(first[7]["input_ids"], first[8]["input_ids"])
    other = open_dataset(read_recipe("llama_tiny", ["training.seed=2"]), text)
    assert not torch.equal(first[7]["input_ids"], other[7]["input_ids"])


def test_made_up_rows_have_the_columns_of_the_public_ones() -> None:
    row = open_raw_samples(DataBlock(), 1)[0]
    assert list(row) == ["id", "title", "context", "question", "answers"]
    (answer,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
    assert row["context"][start:].startswith(answer)
    seen = open_raw_samples(DataBlock(dataset="synthetic_images"), 1)[0]
    assert list(seen) == ["image_id", "mode", "case_id", "question", "answer"]
    assert make_question(seen).image.shape == (3, 24, 24)


def test_images_are_in_the_form_of_the_class_and_train(seeing: Path) -> None:
    dataset = open_dataset(read_recipe("gemma4_vlm_tiny"), seeing)
    batch = collate([dataset[each] for each in range(3)])
    config = read_config(seeing)[2]
    is_image = batch["input_ids"] == config.image_token_id
    assert is_image.sum(1).tolist() == [6, 6, 6]
    assert torch.equal(batch["mm_token_type_ids"], is_image.long())
    assert (batch["labels"][is_image] == IGNORE_INDEX).all()
    assert len(batch["pixel_values"]) == 3
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(seeing).train()
    loss = model(**batch).loss
    loss.backward()
    assert 4 < loss < 9
    assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


def test_the_same_picture_gives_the_same_pixels(seeing: Path) -> None:
    encoder = Encoder(seeing, 40)
    red, blue = (torch.full((3, 4, 4), each, dtype=torch.uint8) for each in (1, 2))
    pixels = [encoder(QuestionExample("a", "b", each))["pixel_values"] for each in (red, red.clone(), blue)]
    assert torch.equal(pixels[0], pixels[1])
    assert not torch.equal(pixels[0], pixels[2])


def test_a_long_question_leaves_its_image_whole(seeing: Path) -> None:
    sample = Encoder(seeing, 16)(QuestionExample("abc" * 30, "7", torch.zeros(3, 4, 4, dtype=torch.uint8)))
    decoded = AutoTokenizer.from_pretrained(seeing).decode(sample["input_ids"][0])
    assert decoded.startswith("<bos><boi>" + "<image>" * 6 + "<eoi>")
    assert decoded.endswith("c\n7<eos>")
    with pytest.raises(UsageError, match=r"data.sequence_length is 9, but an image has 9 tokens in this model"):
        Encoder(seeing, 9)(QuestionExample("a", "7", torch.zeros(3, 4, 4, dtype=torch.uint8)))


def test_a_text_says_that_it_has_no_image(seeing: Path) -> None:
    sample = Encoder(seeing, 32)(QUESTION)
    assert set(sample) == {"input_ids", "attention_mask", "labels", "mm_token_type_ids"}
    assert not sample["mm_token_type_ids"].any()


class Processor:
    """As one of transformers: three tokens for an image, between its begin and end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def apply_chat_template(self, chat: Any, add_generation_prompt: bool = False, **_: Any) -> dict[str, torch.Tensor]:
        text = "<bos>"
        for message in chat:
            parts = [
                "<boi><image><image><image><eoi>" if "image" in each else each["text"] for each in message["content"]
            ]
            text += f"{message['role']}:{''.join(parts)}<eos>"
        ids = torch.tensor([self._tokenizer(text + "assistant:" * add_generation_prompt)["input_ids"]])
        pixels = torch.full((1, 3, 2, 2), 7.0)
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": (ids == 4).long(),
            "pixel_values": pixels,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("length", "asked"), [(60, "<bos>user:<boi><image><image><image><eoi>what?<eos>"), (20, "<bos>")]
)
def test_with_a_processor_it_makes_the_images(
    seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, asked: str
) -> None:
    for each in seeing.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "processor_config.json").write_text("{}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_, **__: Processor(tokenizer))
    sample = Encoder(tmp_path, length)(QuestionExample("what?", "red", torch.zeros(3, 4, 4, dtype=torch.uint8)))
    assert tokenizer.decode(sample["input_ids"][0]).startswith(asked)
    assert tokenizer.decode(learned(sample)) == "red<eos>"
    assert sample["pixel_values"].shape == (1, 3, 2, 2)
    assert torch.equal(sample["token_type_ids"], (sample["input_ids"] == 4).long())
    assert sample["token_type_ids"].sum() == 3
    assert {each.shape for name, each in sample.items() if name != "pixel_values"} == {(1, length)}


def test_a_processor_that_cannot_be_read_is_named(seeing: Path, tmp_path: Path) -> None:
    for each in seeing.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises((InputError, EnvironmentProblem), match="its processor"):
        Encoder(tmp_path, 40)(QuestionExample("what?", "red", torch.zeros(3, 4, 4, dtype=torch.uint8)))


def test_images_for_a_model_that_is_blind_are_refused(text: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.dataset has images, and no image inputs are known"):
        open_dataset(read_recipe("llama_tiny", ["data.dataset=synthetic_images"]), text)


def test_a_batch_of_two_kinds_is_refused(seeing: Path) -> None:
    encoder = Encoder(seeing, 40)
    shown = encoder(QuestionExample("a", "b", torch.zeros(3, 4, 4, dtype=torch.uint8)))
    with pytest.raises(InputError, match="some samples have image_position_ids, pixel_values"):
        collate([shown, encoder(QUESTION)])
    with pytest.raises(InputError, match=r"pixel_values.*use images of one size"):
        collate([shown, {**shown, "pixel_values": torch.zeros(1, 5, 48)}])


# ---------------------------------------------------------------------------------------------------- public data sets


class Table(list[Any]):
    """Rows as `datasets` gives them."""

    column_names: tuple[str, ...] = ()

    def select(self, places: range) -> Table:
        found = Table(self[each] for each in places)
        found.column_names = self.column_names
        return found


SQUAD = {
    "id": "1",
    "title": "t",
    "context": "c",
    "question": "q?",
    "answers": {"text": ["a", "b"], "answer_start": [0]},
}


def with_datasets(monkeypatch: pytest.MonkeyPatch, rows: list[Any]) -> list[tuple[Any, ...]]:
    """A package `datasets` that has these rows, and what was asked of it."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, split: str) -> Table:
        asked.append((path, split))
        if not rows:
            raise ConnectionError("offline\nand more")
        found = Table(rows)
        found.column_names = tuple(rows[0])
        return found

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]  # a module
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def test_public_rows_are_those_of_their_id_or_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = with_datasets(monkeypatch, [SQUAD] * 3)
    assert len(open_raw_samples(DataBlock(dataset="squad", samples=2, split="train[:9]"), 1)) == 2
    assert make_question(open_raw_samples(DataBlock(dataset="squad", path="mine/squad"), 1)[0]) == QuestionExample(
        "c q?", "a"
    )
    assert asked == [("rajpurkar/squad", "train[:9]"), ("mine/squad", "train")]


def test_other_columns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_datasets(monkeypatch, [{"question": "q", "answer": "a"}])
    with pytest.raises(InputError, match="has columns question, answer, but lacks image_id, mode, case_id"):
        open_raw_samples(DataBlock(dataset="medpix"), 1)


def test_what_cannot_be_had_names_the_rows_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with_datasets(monkeypatch, [])
    with pytest.raises(InputError) as caught:
        open_raw_samples(DataBlock(dataset="medpix"), 1)
    assert str(caught.value).startswith("mmoukouba/MedPix-VQA: the dataset cannot be read: ConnectionError: offline; ")
    assert str(caught.value).endswith("--set data.dataset=synthetic_images")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'ckptx\[data\]'"):
        open_raw_samples(DataBlock(dataset="squad"), 1)


def test_made_up_rows_have_no_path() -> None:
    with pytest.raises(UsageError, match="is synthetic and has no path"):
        open_raw_samples(DataBlock(path="x"), 1)
