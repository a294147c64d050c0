"""Stored dtypes that differ from the reference or from the config.

Both models of `verify --run` compute in one dtype, so its result does not depend on stored dtypes. A loader that uses
the dtype of the config, or of the files, does depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ckptx.architecture.spec import Architecture
from ckptx.catalog.dtype import DTYPES_BY_TORCH_NAME, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.report.report import counted
from ckptx.wording import first_of

_NAMED = 3  # tensors listed per row
_KEPT: dict[str, Literal["fp16", "bf16"]] = {"F16": "fp16", "BF16": "bf16"}


def dtype_differences(
    reference: Mapping[str, TensorEntry],
    checkpoint: Mapping[str, TensorEntry],
    config: Mapping[str, Any] | None,
    architecture: Architecture | None,
) -> list[dict[str, Any]]:
    """Count the tensors of a checkpoint whose stored dtype is not the expected one.

    Args:
        reference: Tensors of the reference by model name.
        checkpoint: Tensors of the checkpoint by model name.
        config: Contents of the `config.json` of the checkpoint.
        architecture: Class of the checkpoint; tensors that it does not have are skipped.

    Returns:
        A row for each pair of dtypes: `against` ("reference" or "config"), `stored`, `expected`, `tensors`, and the
        first `names` in the model.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    declared = _declared(config or {})
    for name, entry in checkpoint.items():
        if architecture is not None and not architecture.owns(name):
            continue
        other = reference.get(name)
        if other is not None and other.dtype is not entry.dtype:
            found.setdefault(("reference", entry.dtype.name, other.dtype.name), []).append(name)
        is_cast = declared is not None and entry.dtype.is_castable and entry.dtype is not declared
        if declared is not None and is_cast and not _is_kept(name, entry.dtype, declared, architecture):
            found.setdefault(("config", entry.dtype.name, declared.name), []).append(name)
    return [
        {"against": against, "stored": stored, "expected": expected, "tensors": len(names), "names": names[:_NAMED]}
        for (against, stored, expected), names in found.items()
    ]


def dtype_notes(rows: list[dict[str, Any]], compute_dtype: str) -> Iterator[str]:
    """Yield one line for each row of `dtype_differences`.

    Args:
        rows: Rows of `dtype_differences`.
        compute_dtype: Dtype in which both models ran.
    """
    for row in rows:
        tensors, names = counted(row["tensors"], "tensor"), first_of(row["names"])
        verb = "is" if row["tensors"] == 1 else "are"
        if row["against"] == "reference":
            yield (
                f"{tensors} of the checkpoint {verb} stored as {row['stored']} but as {row['expected']} in the "
                f"reference: {names}; both models ran in {compute_dtype}, verify without --run compares stored dtypes"
            )
        else:
            yield (
                f"{tensors} of the checkpoint {verb} stored as {row['stored']}, but its config.json sets "
                f"{row['expected']}: {names}; a loader that uses the dtype of the config casts them"
            )


def _declared(config: Mapping[str, Any]) -> DType | None:
    """Return the dtype that a config sets; None if it sets none."""
    nested = config.get("text_config")
    for place in (config, nested):
        for key in ("dtype", "torch_dtype"):
            value = place.get(key) if isinstance(place, Mapping) else None
            if isinstance(value, str):
                return DTYPES_BY_TORCH_NAME.get(value.removeprefix("torch."))
    return None


def _is_kept(name: str, stored: DType, declared: DType, architecture: Architecture | None) -> bool:
    """Return True if the class keeps the tensor in float32 under any config."""
    target = _KEPT.get(declared.name)
    return (
        stored.name == "F32"
        and target is not None
        and architecture is not None
        and architecture.keeps_fp32(name, target)
    )
