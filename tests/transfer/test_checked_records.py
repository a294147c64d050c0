"""Records that several threads read in parts: exactly one of them checks the CRC-32 of each."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import ckptx
from ckptx.catalog.entry import Record
from ckptx.transfer.stream import CheckedRecords
from tests.support.megatron_models import config_of, save_model


def test_one_of_many_threads_claims_a_record() -> None:
    checked, claims = CheckedRecords(), []
    barrier = threading.Barrier(16)

    def claim() -> None:
        barrier.wait()
        claims.extend(number for number in range(200) if checked.claim("file", Record(number, 8, 0)))

    threads = [threading.Thread(target=claim) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claims) == list(range(200))


def test_records_of_different_files_are_different() -> None:
    checked = CheckedRecords()
    assert [checked.claim(file, Record(0, 8, 0)) for file in ("a", "b", "a")] == [True, True, False]


@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_bytes_read_does_not_depend_on_threads(tmp_path: Path, workers: int) -> None:
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    save_model(hf, config_of("Qwen3MoeForCausalLM"))
    ckptx.convert("to-megatron", hf, megatron)
    source = megatron / "release"
    expected = ckptx.verify(source, hf, workers=1)
    assert expected.exit == 0
    for _ in range(6):
        report = ckptx.verify(source, hf, workers=workers)
        assert (report.exit, report.bytes_read) == (0, expected.bytes_read)
    to_hf = [ckptx.convert("to-hf", source, tmp_path / f"back-{each}", workers=each) for each in (1, workers)]
    assert to_hf[0].bytes_read == to_hf[1].bytes_read
