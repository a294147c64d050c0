"""Stored dtypes that differ from the reference or from the config.

Both models of `verify --run` compute in one dtype, so its result does not depend on stored dtypes. A loader that uses
the dtype of the config, or of the files, does depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ckptx.architecture.architecture import Architecture
from ckptx.catalog.dtype import DTYPES_BY_TORCH_NAME, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.wording import counted, first_of

_MAX_LISTED = 3  # names listed per pair of dtypes
_HALF_DTYPES: dict[str, Literal["fp16", "bf16"]] = {"F16": "fp16", "BF16": "bf16"}


def find_dtype_differences(
    reference: Mapping[str, TensorEntry],
    checkpoint: Mapping[str, TensorEntry],
    config: Mapping[str, Any] | None,
    architecture: Architecture | None,
    *,
    reference_config: str | None = None,
) -> list[dict[str, Any]]:
    """Find the tensors of a checkpoint whose stored dtype is not that of the reference, or not that of the config.

    Args:
        reference: Tensors of the reference by model name.
        checkpoint: Tensors of the checkpoint by model name.
        config: Contents of the `config.json` of the checkpoint, or of that of the reference.
        architecture: Class of the checkpoint, tensors that it does not have are skipped; None for an unknown class.
        reference_config: Path of the `config.json` of the reference, if `config` is from there; else None.

    Returns:
        An entry for each pair of dtypes: `against` ("reference" or "config"), `stored` and `expected` (safetensors
        names), `tensors` (their number), `names` (the first three model names), and `reference_config`.
    """
    names_by_dtypes: dict[tuple[str, str, str], list[str]] = {}
    declared = _read_config_dtype(config or {})
    for name, entry in checkpoint.items():
        if architecture is not None and not architecture.owns(name):
            continue
        reference_entry = reference.get(name)
        if reference_entry is not None and reference_entry.dtype is not entry.dtype:
            names_by_dtypes.setdefault(("reference", entry.dtype.name, reference_entry.dtype.name), []).append(name)
        would_be_cast = declared is not None and entry.dtype.is_castable and entry.dtype is not declared
        if declared is not None and would_be_cast and not _keeps_fp32(name, entry.dtype, declared, architecture):
            names_by_dtypes.setdefault(("config", entry.dtype.name, declared.name), []).append(name)
    return [
        {
            "against": against,
            "stored": stored,
            "expected": expected,
            "tensors": len(names),
            "names": names[:_MAX_LISTED],
            "reference_config": reference_config if against == "config" else None,
        }
        for (against, stored, expected), names in names_by_dtypes.items()
    ]


def describe_dtype_differences(differences: list[dict[str, Any]], compute_dtype: str) -> Iterator[str]:
    """Yield one line for each entry of `find_dtype_differences`.

    Args:
        differences: Result of `find_dtype_differences`.
        compute_dtype: Dtype in which both models ran.
    """
    for difference in differences:
        tensors, names = counted(difference["tensors"], "tensor"), first_of(difference["names"])
        verb = "is" if difference["tensors"] == 1 else "are"
        if difference["against"] == "reference":
            yield (
                f"{tensors} of the checkpoint {verb} stored as {difference['stored']} but as "
                f"{difference['expected']} in the reference: {names}; both models ran in {compute_dtype}, verify "
                "without --run compares stored dtypes"
            )
        else:
            path = difference.get("reference_config")
            config = "its config.json" if path is None else f"{path}, the config of the reference,"
            yield (
                f"{tensors} of the checkpoint {verb} stored as {difference['stored']}, but {config} sets "
                f"{difference['expected']}: {names}; a loader that uses the dtype of the config casts them"
            )


def _read_config_dtype(config: Mapping[str, Any]) -> DType | None:
    """Return the dtype that a config sets; None if it sets none, or an unknown one."""
    nested = config.get("text_config")
    for section in (config, nested):
        for key in ("dtype", "torch_dtype"):
            value = section.get(key) if isinstance(section, Mapping) else None
            if isinstance(value, str):
                return DTYPES_BY_TORCH_NAME.get(value.removeprefix("torch."))
    return None


def _keeps_fp32(name: str, stored: DType, declared: DType, architecture: Architecture | None) -> bool:
    """Return True if the class keeps the tensor in float32 under any config."""
    target = _HALF_DTYPES.get(declared.name)
    return (
        stored.name == "F32"
        and target is not None
        and architecture is not None
        and architecture.keeps_fp32(name, target)
    )
