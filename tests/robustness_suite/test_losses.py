"""Losses by step, from each place trainers leave them in, whole and damaged."""

from __future__ import annotations

import json
import struct
import sys
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from ckptx.errors import EnvironmentProblem, InputError, UsageError
from ckptx.robustness_suite.losses import read_losses
from ckptx.runtime.training.recipe import TrainerBlock


def block(kind: Any = "jsonl", **keys: Any) -> TrainerBlock:
    """How losses are written."""
    return TrainerBlock(command="x", losses_kind=kind, **keys)


def written(path: Path, text: str | bytes) -> Path:
    """A file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# ------------------------------------------------------------------------------------------------------- JSON lines


def test_json_lines(tmp_path: Path) -> None:
    text = '{"step": 2, "loss": 1.5}\n{"eval": 3}\n\n{"step": 1, "loss": 2}\n[1]\n{"step": 3.0, "loss": "nan"}\n'
    found = read_losses(written(tmp_path / "l", text), block())
    assert [*found.by_step] == [1, 2, 3] and found.by_step[2] == 1.5 and isnan(found.by_step[3]) and not found.notes


def test_keys_of_a_recipe_and_keys_below_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "l", '{"it": 1, "train": {"nll": 2.5}}\n')
    assert read_losses(path, block(step_key="it", loss_key="train.nll")).by_step == {1: 2.5}


def test_a_last_line_that_is_cut_off_is_said(tmp_path: Path) -> None:
    found = read_losses(written(tmp_path / "l", '{"step": 1, "loss": 2}\n{"step": 2, "lo'), block())
    assert found.by_step == {1: 2} and found.notes == ["l: the last line is incomplete and was ignored"]


def test_a_loss_twice_is_one_and_two_losses_are_refused(tmp_path: Path) -> None:
    same = '{"step": 1, "loss": 2}\n{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n{"step": 2, "loss": NaN}\n'
    assert [*read_losses(written(tmp_path / "l", same), block()).by_step] == [1, 2]
    other = '{"step": 1, "loss": 2}\n{"step": 1, "loss": 2.1}\n'
    with pytest.raises(InputError, match=r"step 1 has two different losses, 2.0 and 2.1; log from one rank only"):
        read_losses(written(tmp_path / "l", other), block())
    with pytest.raises(InputError, match=r"step 1 has two different losses, nan and 2\.0"):
        read_losses(written(tmp_path / "l", '{"step":1,"loss":NaN}\n{"step":1,"loss":2}\n'), block())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'contains no loss, searched for "step" and "loss"'),
        ('{"step": 1, "value": 2}\n', "contains no loss"),
        ('x\n{"step": 1, "loss": 2}\n', "line 1: not JSON"),
        ('{"step": 1.5, "loss": 2}\n', "line 1: the step is 1.5; expected an integer"),
        ('{"step": true, "loss": 2}\n', "the step is True"),
        ('{"step": -1, "loss": 2}\n', "the step is -1"),
        ('{"step": 1e300, "loss": 2}\n', "the step is 1e[+]300"),
        ('{"step": 1, "loss": [2]}\n', r"the loss is \[2\]; expected a number"),
        ('{"step": 1, "loss": "x\\u001b[31m"}\n', r"the loss is 'x\\x1b"),
        ('{"step": 1, "step": 2, "loss": 2}\n{}\n', "appears twice"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_losses(written(tmp_path / "l", text), block())


# ------------------------------------------------------------------------------------------------------------- text


def test_a_text_with_colours(tmp_path: Path) -> None:
    text = "start\n[rank0] \x1b[31mstep:  1  \x1b[32mloss:  8.13242 \x1b[39m\nstep:  2  loss:  nan\n"
    found = read_losses(
        written(tmp_path / "l", text), block("regex", pattern=r"step: +(?P<step>\d+) +loss: +(?P<loss>\S+)")
    )
    assert found.by_step[1] == 8.13242 and isnan(found.by_step[2])


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    path = written(tmp_path / "l", "step 1 loss 2\n")
    with pytest.raises(UsageError, match="is not a valid regular expression"):
        read_losses(path, block("regex", pattern="("))
    with pytest.raises(UsageError, match="has no groups named step and loss"):
        read_losses(path, block("regex", pattern=r"(?P<step>\d+)"))
    with pytest.raises(InputError, match=r"contains no loss, searched for x"):
        read_losses(path, block("regex", pattern=r"x(?P<step>\d+)(?P<loss>\d+)"))


# -------------------------------------------------------------------------------------------------------- the Trainer


def test_the_history_of_the_trainer(tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 2.0, "epoch": 0.1}, {"step": 2, "loss": 1.0}, {"step": 2, "train_runtime": 3.0}]
    path = written(tmp_path / "trainer_state.json", json.dumps({"global_step": 2, "log_history": history}))
    assert read_losses(path, block("trainer_state")).by_step == {1: 2.0, 2: 1.0}
    with pytest.raises(InputError, match="log_history"):
        read_losses(written(tmp_path / "x.json", "[]"), block("trainer_state"))


# ------------------------------------------------------------------------------------------------------ TensorBoard


def varint(value: int) -> bytes:
    """A number of protocol buffers."""
    value &= (1 << 64) - 1
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def of_bytes(number: int, data: bytes) -> bytes:
    """A field with bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def simple(value: float) -> bytes:
    """`simple_value`."""
    return varint(2 << 3 | 5) + struct.pack("<f", value)


def tensor(dtype: int, inside: bytes) -> bytes:
    """`tensor`."""
    return of_bytes(8, varint(1 << 3) + varint(dtype) + of_bytes(2, b"") + inside)


def event(step: int, tag: str, value: bytes) -> bytes:
    """An event with one value, and a wall time."""
    summary = of_bytes(1, of_bytes(1, tag.encode()) + value + of_bytes(9, b"\x0a\x00"))
    return varint(1 << 3 | 1) + struct.pack("<d", 1.7e9) + varint(2 << 3) + varint(step) + of_bytes(5, summary)


def record(data: bytes) -> bytes:
    """A record of a file."""
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc32c(head)) + data + struct.pack("<I", masked_crc32c(data))


HEAD = record(varint(1 << 3 | 1) + struct.pack("<d", 1.7e9) + of_bytes(3, b"brain.Event:2"))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (simple(0.1), struct.unpack("<f", struct.pack("<f", 0.1))[0]),
        (tensor(1, of_bytes(5, struct.pack("<f", 1.5))), 1.5),
        (tensor(1, of_bytes(4, struct.pack("<f", 2.5))), 2.5),
        (tensor(2, of_bytes(6, struct.pack("<d", 0.1))), 0.1),
        (tensor(2, of_bytes(4, struct.pack("<d", 0.2))), 0.2),
        (tensor(14, of_bytes(4, b"\xc0\x3f")), 1.5),
        (tensor(14, of_bytes(13, varint(0x3FC0))), 1.5),
        (tensor(19, of_bytes(13, varint(0x3E00))), 1.5),
        (tensor(9, of_bytes(4, struct.pack("<q", 7))), 7.0),
    ],
)
def test_scalars_in_every_form(tmp_path: Path, value: bytes, found: float) -> None:
    path = tmp_path / "tb" / "20260101" / "events.out.tfevents.1.host"
    written(path, HEAD + record(event(3, "loss", value)) + record(event(3, "other", simple(9.0))))
    assert read_losses(tmp_path / "tb", block("tensorboard")).by_step == {3: found}


@pytest.mark.parametrize("value", [tensor(7, of_bytes(8, b"text")), tensor(1, b""), tensor(99, b""), tensor(14, b"")])
def test_values_that_are_no_number_are_left_out(tmp_path: Path, value: bytes) -> None:
    written(
        tmp_path / "events.out.tfevents.1",
        HEAD + record(event(1, "loss", simple(1))) + record(event(2, "loss", value)) + record(event(2, "text", value)),
    )
    assert read_losses(tmp_path, block("tensorboard")).by_step == {1: 1.0}


@pytest.mark.parametrize("new_style", [False, True], ids=["simple values", "tensors"])
def test_a_file_of_torchs_writer(tmp_path: Path, new_style: bool) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step, loss in ((1, 2.5), (2, 0.1), (3, float("nan"))):
            writer.add_scalar("train/loss", loss, step, new_style=new_style)
            writer.add_scalar("train/lr", 1e-3, step, new_style=new_style)
            writer.add_text("note", "a text", step)
    found = read_losses(tmp_path / "tb", block("tensorboard", loss_key="train/loss")).by_step
    assert list(found) == [1, 2, 3] and isnan(found[3])
    assert [found[1], found[2]] == [2.5, struct.unpack("<f", struct.pack("<f", 0.1))[0]]


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "events.out.tfevents.1", HEAD)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'ckptx\[tensorboard\]'") as caught:
        read_losses(tmp_path, block("tensorboard"))
    assert caught.value.exit_code == 7


def test_files_of_several_writers_are_one_run(tmp_path: Path) -> None:
    for index in (1, 2):
        written(tmp_path / f"events.out.tfevents.{index}", HEAD + record(event(index, "loss", simple(index))))
    assert read_losses(tmp_path, block("tensorboard")).by_step == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize("left", [1, 11, 12, 30])
def test_a_record_that_is_cut_off_is_said(tmp_path: Path, left: int) -> None:
    first, second = record(event(1, "loss", simple(1))), record(event(2, "loss", simple(2)))
    written(tmp_path / "events.out.tfevents.1", HEAD + first + second[:left])
    found = read_losses(tmp_path, block("tensorboard"))
    assert found.by_step == {1: 1.0} and "ends in the middle of a record" in found.notes[0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff" * 40, "the length of the record at byte 0 does not match its checksum"),
        (record(b"x" * 20)[:-1] + b"\0", "the data of the record at byte 0 does not match its checksum"),
        (record(varint(5 << 3 | 2) + varint(1 << 40)), "damaged event"),
        (record(b"\xff" * 11), "damaged event"),
        (record(b"\x2b"), "damaged event"),
        (HEAD, 'no scalar "loss".*their tags are: none'),
        (record(event(1, "train\x1b/loss", simple(1))), r'their tags are: "train\\\\x1b/loss"'),
    ],
)
def test_what_is_no_event_file_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    written(tmp_path / "events.out.tfevents.1", data)
    with pytest.raises(InputError, match=said):
        read_losses(tmp_path, block("tensorboard"))


def test_a_folder_without_event_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no event files of TensorBoard"):
        read_losses(tmp_path, block("tensorboard"))


def test_a_record_that_claims_to_be_huge_is_not_read(tmp_path: Path) -> None:
    head = struct.pack("<Q", 1 << 60)
    data = record(event(1, "loss", simple(1))) + head + struct.pack("<I", masked_crc32c(head)) + b"x"
    written(tmp_path / "events.out.tfevents.1", data)
    assert read_losses(tmp_path, block("tensorboard")).notes
