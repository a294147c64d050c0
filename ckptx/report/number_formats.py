"""Format numbers that several reports show; each is computed in one place, and formatted by one function.

number                               computed by; formatted by

tensors stored, copies and aliases   `conversion.steps.ledger.build_ledger`; `stored_text`
bytes of the files of an output      `output_bytes` and `bytes_written` of `ConversionReport`; `written_text`
bytes read                           `TensorReader.bytes_read`, summed over readers and ranks; `bytes_read_text`
peak memory                          `peak_memory` of a process, `peak_of_processes` of several; `peak_memory_text`
speed                                `report.report.written_gb_per_s`; `speed_text`
state that is not compared           `comparison.uncompared.count_uncompared`; `uncompared_text`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

from ckptx.report.report import LARGEST_RANK, THIS_PROCESS, Report, human_bytes
from ckptx.wording import counted


class PeakOfProcesses(TypedDict):
    """Fields of a report for the peak memory of its largest process."""

    peak_rss: int
    peak_rss_of: str


def peak_of_processes(peaks_bytes: Iterable[int], *, are_ranks: bool) -> PeakOfProcesses:
    """Return the peak memory of the largest process of a run.

    Args:
        peaks_bytes: Peak resident set size of each process, in bytes.
        are_ranks: True if the processes are the ranks of one run; False if this process is the only one.
    """
    return {"peak_rss": max(peaks_bytes), "peak_rss_of": LARGEST_RANK if are_ranks else THIS_PROCESS}


def peak_memory_text(report: Report) -> tuple[str, str]:
    """Return label and value of the peak memory: `peak memory of the largest rank`, `1.20 GiB`."""
    label = "peak memory" if report.peak_rss_of == THIS_PROCESS else f"peak memory of the {report.peak_rss_of}"
    return label, human_bytes(report.peak_rss)


NOT_ENOUGH_SPACE = "not enough space"  # first words of the note of a dry run whose output does not fit
_FORMAT_NAMES = {
    "huggingface": "HF safetensors",
    "dcp": "DCP",
    "sharded": "sharded safetensors",
    "fsdp": "per-rank FSDP files",
    "deepspeed": "DeepSpeed ZeRO",
    "torch-checkpointing": "torch_checkpointing",
    "peft": "PEFT adapter",
    "bin": "pytorch_model.bin",
    "torch-save": "torch.save dict",
}


def checkpoint_format_name(name: str) -> str:
    """Return the name of a checkpoint format for summaries and HTML pages: `sharded safetensors` for "sharded"."""
    return _FORMAT_NAMES.get(name, name)


def bytes_read_text(report: Report) -> str:
    """Return the bytes of tensor data that a run read: `79.43 MiB read`."""
    return f"{human_bytes(report.bytes_read)} read"


def speed_text(report: Report) -> str:
    """Return the bytes written per second: `1.20 GiB/s`; empty for a run that wrote nothing."""
    return f"{human_bytes(report.written_gb_per_s * 1e9)}/s" if report.written_gb_per_s else ""


def written_text(output_bytes: int, written_bytes: int) -> str:
    """Return the size of all files of an output, and how much of it an earlier run wrote, if any.

    Example:
        79.43 MiB in files, 12.50 MiB of it by an earlier, interrupted run

    Args:
        output_bytes: Bytes of all files of the output.
        written_bytes: Bytes of these files that this run wrote; 0 if it wrote nothing.
    """
    earlier_bytes = output_bytes - written_bytes
    earlier_text = (
        f", {human_bytes(earlier_bytes)} of it by an earlier, interrupted run"
        if written_bytes and earlier_bytes
        else ""
    )
    return f"{human_bytes(output_bytes)} in files{earlier_text}"


def stored_text(stored: int, *, copies: int = 0, aliases: int = 0) -> str:
    """Return the number of tensors by kind of storage: `90 + 1 alias`; empty if none shares or repeats bytes.

    Args:
        stored: Tensors whose bytes are stored.
        copies: Tied tensors that are stored as copies.
        aliases: Tied tensors that share the bytes of another.
    """
    parts = [counted(count, noun) for count, noun in ((copies, "copy"), (aliases, "alias")) if count]
    return " + ".join([f"{stored:,}", *parts]) if parts else ""


def uncompared_text(not_compared: Mapping[str, int]) -> str:
    """Return what a comparison left out: `117 optimizer tensors, 1 pickled object`; "" for nothing.

    Args:
        not_compared: `not_compared` of the report of `diff` or `verify`.
    """
    nouns = {"optimizer": "optimizer tensor", "other": "other tensor", "objects": "pickled object"}
    return ", ".join(counted(not_compared[kind], noun) for kind, noun in nouns.items() if not_compared.get(kind))
