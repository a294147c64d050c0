"""The batch a model gets: tokens that stand for themselves, what is put between them, labels, what is missing."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptx.errors import UnsupportedError
from ckptx.runtime.parity.inputs import batch
from ckptx.runtime.parity.inputs.batch import Inputs, find_text_config, make_inputs
from ckptx.runtime.parity.inputs.multimodal import TEXT_LENGTH, MultimodalInput, make_random_tensor

TEXT: dict[str, Any] = {"model_type": "unheard-of", "vocab_size": 50}
LLAVA: dict[str, Any] = {
    "model_type": "llava", "text_config": {"vocab_size": 60}, "image_token_index": 40,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "model_type": "whisper", "is_encoder_decoder": True, "vocab_size": 30, "max_source_positions": 5, "num_mel_bins": 4,
}  # fmt: skip


def is_same(a: Inputs, b: Inputs) -> bool:
    tensors = a.batch.keys() == b.batch.keys() and all(torch.equal(a.batch[name], b.batch[name]) for name in a.batch)
    return tensors and torch.equal(a.labels, b.labels) and a[2:] == b[2:]


# ------------------------------------------------------------------------------------------- text


@settings(max_examples=50, deadline=None)
@given(
    words=st.integers(6, 200), rows=st.integers(1, 4), seed=st.integers(0, 99),
    special=st.dictionaries(st.sampled_from(["eos_token_id", "video_token_index"]), st.integers(0, 199)),
)  # fmt: skip
def test_tokens_are_of_the_vocabulary_and_none_is_special(
    words: int, rows: int, seed: int, special: dict[str, int]
) -> None:
    found = make_inputs({**TEXT, "vocab_size": words, "text_like": special}, batch_size=rows, seed=seed)
    ((name, ids),) = found.batch.items()
    assert (name, found.kinds, found.missing) == ("input_ids", ("text",), ())
    assert (ids.shape, ids.dtype) == ((rows, TEXT_LENGTH), torch.int64)
    assert int(ids.min()) >= 3 and int(ids.max()) < words
    assert not {*ids.flatten().tolist()} & {*special.values()}
    assert torch.equal(ids, found.labels)
    assert ids.data_ptr() != found.labels.data_ptr()


@settings(max_examples=20, deadline=None)
@given(
    words=st.integers(8, 200_000), shards=st.integers(1, 40), rows=st.integers(1, 3), seed=st.integers(0, 9),
    special=st.dictionaries(st.sampled_from(["eos_token_id", "video_token_index"]), st.integers(0, 199)),
)  # fmt: skip
def test_every_part_of_the_vocabulary_is_looked_up_at_both_ends(
    words: int, shards: int, rows: int, seed: int, special: dict[str, int]
) -> None:
    found = make_inputs({**TEXT, "vocab_size": words, "t": special}, batch_size=rows, seed=seed, shards=shards)
    ids = found.batch["input_ids"]
    assert len(ids) == rows and ids.shape[1] >= TEXT_LENGTH
    allowed = [token for token in range(3, words) if token not in special.values()]
    drawn = {*ids.flatten().tolist()}
    for part in torch.arange(words).chunk(shards):
        here = allowed[bisect_left(allowed, int(part[0])) : bisect_right(allowed, int(part[-1]))]
        assert {*here[:1], *here[-1:]} <= drawn


def test_tokens_come_from_everywhere() -> None:
    """Not from the first 65,536 alone."""
    ids = make_inputs({**TEXT, "vocab_size": 150_016}, shards=2).batch["input_ids"].flatten()
    assert [int(((ids >= begin) & (ids < begin + 37_504)).sum()) for begin in range(0, 150_016, 37_504)] >= [4] * 4


def test_all_other_tokens_are_drawn() -> None:
    config = {
        **TEXT,
        "vocab_size": 9,
        "eos_token_id": 5,
        "nested": {"image_token_id": 8, "audio_token_index": 7},
        "pad_token_id": None,
    }
    assert {*make_inputs(config, batch_size=50).batch["input_ids"].flatten().tolist()} == {3, 4, 6}
    other = {**TEXT, "vocab_size": 9, "layers": 5, "eos_token_ids": 6, "use_token_id": True, "token_id_count": 7}
    assert {*make_inputs(other, batch_size=50).batch["input_ids"].flatten().tolist()} == {3, 4, 5, 6, 7, 8}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 50), other=st.integers(0, 50), rows=st.integers(1, 3))
@pytest.mark.parametrize("config", [TEXT, LLAVA, WHISPER, {**TEXT, "is_encoder_decoder": True}], ids=str)
def test_a_seed_gives_the_same_and_another_seed_does_not(
    config: dict[str, Any], seed: int, other: int, rows: int
) -> None:
    torch.manual_seed(rows)  # what others drew does not matter
    found = make_inputs(config, batch_size=rows, seed=seed)
    torch.manual_seed(rows + 1)
    read = json.loads(json.dumps(config))
    assert is_same(found, make_inputs(dict(reversed(read.items())), batch_size=rows, seed=seed))
    assert is_same(found, make_inputs(config, batch_size=rows, seed=other)) is (seed == other)


@pytest.mark.parametrize("words", [None, "many", 12.5])
def test_a_model_that_reads_nothing_is_refused(words: Any) -> None:
    with pytest.raises(UnsupportedError) as error:
        make_inputs({"model_type": "vit", "vocab_size": words})
    assert all(word in str(error.value) for word in ("vit: ", "vocab_size", "--run"))


@pytest.mark.parametrize("config", [{"vocab_size": 3}, {"vocab_size": 0}, {"vocab_size": 4, "eos_token_id": 3}])
def test_a_model_of_special_tokens_alone_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as error:
        make_inputs({"model_type": "bits", **config})
    assert all(word in str(error.value) for word in ("bits: ", f"vocab_size {config['vocab_size']}", "--run"))


def test_an_encoder_decoder_is_held_against_what_its_decoder_reads() -> None:
    found = make_inputs({**TEXT, "is_encoder_decoder": True})
    assert {name: tuple(each.shape) for name, each in found.batch.items()} == {
        "input_ids": (2, TEXT_LENGTH), "decoder_input_ids": (2, TEXT_LENGTH),
    }  # fmt: skip
    assert torch.equal(found.labels, found.batch["decoder_input_ids"])
    assert not torch.equal(found.labels, found.batch["input_ids"])


def test_the_part_about_text_is_found() -> None:
    inner = {"vocab_size": 7}
    for key in ("text_config", "llm_config", "language_config"):
        assert find_text_config({"vocab_size": 5, "a": 1, key: inner})["vocab_size"] == 7
        assert find_text_config({"vocab_size": 5, "a": 1, key: inner})["a"] == 1
        assert find_text_config({"vocab_size": 5, key: None}) == {"vocab_size": 5, key: None}
    assert find_text_config({"thinker_config": {"text_config": inner}})["vocab_size"] == 7
    assert find_text_config({"vocab_size": 5}) == {"vocab_size": 5}


# ------------------------------------------------------------------------------------------- what is put in


def test_an_image_lies_behind_two_tokens_and_has_no_labels() -> None:
    """8 / 4 patches along a side make 4 tokens; the one of the class, which is a fifth, is left out."""
    found = make_inputs(LLAVA)
    ids = found.batch["input_ids"]
    assert ids.shape == found.labels.shape == (2, TEXT_LENGTH + 4)
    is_image = torch.zeros(TEXT_LENGTH + 4, dtype=torch.bool)
    is_image[2:6] = True
    for row in range(2):
        assert torch.equal(ids[row] == 40, is_image)
        assert torch.equal(found.labels[row] == -100, is_image)
        assert torch.equal(found.labels[row][~is_image], ids[row][~is_image])
    assert found.batch["pixel_values"].shape == (2, 3, 8, 8)
    assert not torch.equal(*found.batch["pixel_values"])
    assert (found.kinds, found.missing) == (("text", "images"), ())


def row_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"sum": ids.sum(1)}


def test_two_inserts_lie_one_behind_the_other() -> None:
    """Begin and end of an insert have labels, what the model replaces has none; types are of both."""
    ids = torch.arange(10, 22).reshape(2, 6)
    image = MultimodalInput([97, 99, 99, 98], 99, {"pixels": torch.ones(2)}, ("types", 1), row_of)
    sound = MultimodalInput([95], 95, {"sound": torch.zeros(2)}, ("types", 3))
    added = MultimodalInput([], -1, {"other": torch.zeros(2)})
    found, labels = batch._insert_placeholders([image, sound, added], ids)
    assert found["input_ids"][1].tolist() == [16, 17, 97, 99, 99, 98, 95, 18, 19, 20, 21]
    assert labels[1].tolist() == [16, 17, 97, -100, -100, 98, -100, 18, 19, 20, 21]
    assert found["types"][0].tolist() == [0, 0, 0, 1, 1, 0, 3, 0, 0, 0, 0]
    assert found["sum"].tolist() == found["input_ids"].sum(1).tolist()
    assert found.keys() == {"input_ids", "types", "sum", "pixels", "sound", "other"}
    assert torch.equal(ids, torch.arange(10, 22).reshape(2, 6))


def test_what_listens_while_its_decoder_writes_has_no_tokens_of_input() -> None:
    found = make_inputs(WHISPER, batch_size=3)
    assert {name: tuple(each.shape) for name, each in found.batch.items()} == {
        "input_features": (3, 4, 10), "decoder_input_ids": (3, TEXT_LENGTH),
    }  # fmt: skip
    assert torch.equal(found.labels, found.batch["decoder_input_ids"])
    assert (found.kinds, found.missing) == (("audio",), ())
    alone = make_inputs({**WHISPER, "is_encoder_decoder": False})
    assert (alone.kinds, alone.batch.keys()) == (("text",), {"input_ids"})


@pytest.mark.parametrize(
    ("towers", "missing"),
    [
        ({"vision_config": {}}, ("images",)),
        ({"audio_config": {"a": 1}, "vision_config": {}}, ("audio", "images")),
        ({"speech_config": {}, "encoder_config": {}}, ("audio",)),
        ({"vision_config": None, "audio_config": 3}, ()),
    ],
)
def test_what_the_model_has_a_tower_for_and_does_not_get_is_named(
    towers: dict[str, Any], missing: tuple[str, ...]
) -> None:
    assert make_inputs({**TEXT, **towers}).missing == missing
    assert make_inputs({**TEXT, **towers, "is_encoder_decoder": True}).missing == missing


def test_a_tower_that_gets_its_image_is_not_missing() -> None:
    assert make_inputs({**LLAVA, "audio_config": {}}).missing == ("audio",)


def test_pixels_are_around_zero() -> None:
    found = make_random_tensor(torch.Generator().manual_seed(0), 40, 50)
    assert (found.shape, found.dtype) == ((40, 50), torch.float32)
    assert abs(float(found.mean())) < 0.1 and 0.9 < float(found.std()) < 1.1
