"""`--dtype`: which dtype each tensor of a target gets, and what config.json has to say about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptx.catalog.dtype import CAST_TARGETS, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.steps.base import BaseCheckpoint
from ckptx.conversion.steps.naming import NamedTarget, NameMap
from ckptx.conversion.steps.restoration import kept_manifest
from ckptx.conversion.steps.target import TargetTensors
from ckptx.errors import UsageError
from ckptx.mapping.config import dequantized, dtype_edits, dtypes_in, is_held, widened
from ckptx.mapping.dtypes import base_targets, cast_targets
from ckptx.model_view.view import ModelView, rules_of
from ckptx.report.report import counted
from ckptx.wording import first_of


@dataclass(frozen=True, slots=True)
class CastTarget:
    """A target in the dtypes that it will have.

    Attributes:
        target: The tensors.
        was_cast: Whether any has another dtype than in the source.
        kept: Names that `--dtype` asks to cast, and that stay as they are; None without it.
        base_dtypes: Of `--dtype base`: how many are as the base has them, which it lacks, which stay otherwise.
        notes: What the user should know.
    """

    target: TargetTensors
    was_cast: bool = False
    kept: list[str] | None = None
    base_dtypes: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


def cast_tensors(view: ModelView, named: NamedTarget, base: BaseCheckpoint, wanted: Any) -> CastTarget:
    """Gives each target tensor its dtype.

    Args:
        view: The model.
        named: The target.
        base: Its dtypes count for "auto" and "base".
        wanted: `--dtype`.

    Raises:
        UsageError: Dtypes are to be those of a base, and there is none.
    """
    target, architecture = named.target, view.architecture
    in_base: dict[str, DType] = {}
    if wanted != "auto" and base.dtypes:
        in_base = _by_target_name(base.dtypes, view, target.tensors, named.naming)
    if wanted == "base":
        if not base.dtypes:
            raise UsageError(
                "--dtype base: nothing says which dtypes the base had; pass --base HF with its weights to convert "
                "dcp2hf or reshard, or name a dtype"
            )
        dtypes = base_targets(target.tensors, in_base)
    else:
        dtypes = cast_targets(
            target.tensors,
            CAST_TARGETS.get(wanted),
            lambda name: architecture is not None and wanted != "fp32" and architecture.keeps_fp32(name, wanted),
            _kept_by(base.dtypes, in_base),
        )
    changed = {name for name, dtype in dtypes.items() if target.tensors[name].dtype is not dtype}
    if changed:
        tensors = {
            name: entry._replace(dtype=dtypes[name]) if name in changed else entry
            for name, entry in target.tensors.items()
        }
        target = replace(target, tensors=tensors)
    if wanted == "base":
        return _as_in_base(target, in_base, was_cast=bool(changed))
    if wanted == "auto":
        return CastTarget(target, was_cast=bool(changed))
    asked = CAST_TARGETS[wanted]
    kept = [
        name
        for name, entry in target.tensors.items()
        if entry.dtype.cast and name not in changed and entry.dtype is not asked
    ]
    return CastTarget(target, bool(changed), kept)


def _kept_by(base: Mapping[str, DType], in_base: Mapping[str, DType]) -> frozenset[str]:
    """Names a base keeps in float32; a base wholly in float32 says nothing about what must stay so."""
    if all(dtype.name == "F32" for dtype in base.values()):
        return frozenset()
    return frozenset(name for name, dtype in in_base.items() if dtype.name == "F32")


def _by_target_name(
    base: Mapping[str, DType], view: ModelView, names: Iterable[str], naming: NameMap
) -> dict[str, DType]:
    """Dtypes of a base by the names of the target, which may be spelled otherwise; what the base lacks is left out.

    A tensor that is made of several of the base has a dtype there when they all have the same.
    """
    names = list(names)
    if all(name in base for name in names):
        return {name: base[name] for name in names}
    rules = rules_of(view)
    by_model: dict[str, set[DType]] = {}
    for name, dtype in base.items():
        by_model.setdefault((rules and rules.model_name(name)) or name, set()).add(dtype)
    found = {}
    for name in names:
        # A trainer's dialect is one step away from the published names, which are another from those of the model.
        spoken = naming.model_name(name) or name
        known = next((base[each] for each in (name, spoken) if each in base), None)
        if known is None:
            alike = by_model.get((rules and rules.model_name(spoken)) or spoken, set())
            known = next(iter(alike)) if len(alike) == 1 else None
        if known is not None:
            found[name] = known
    return found


def _as_in_base(target: TargetTensors, in_base: Mapping[str, DType], *, was_cast: bool) -> CastTarget:
    floats = {name: entry for name, entry in target.tensors.items() if entry.dtype.cast}
    lacking = [name for name in floats if name not in in_base]
    otherwise = [name for name, entry in floats.items() if name in in_base and in_base[name] is not entry.dtype]
    notes = []
    if lacking:
        said = counted(len(lacking), "tensor")
        notes.append(f"--dtype base: {said} the base lacks keep their own dtype: {first_of(lacking)}")
    if otherwise:
        first = otherwise[0]
        notes.append(
            f"--dtype base: {counted(len(otherwise), 'tensor')} cannot be as in the base, which is quantised, and stay "
            f'as they are: "{first}" is {in_base[first]} there, {floats[first].dtype} here'
        )
    as_base = len(floats) - len(lacking) - len(otherwise)
    counts = {"as_base": as_base, "lacking": lacking, "otherwise": otherwise}
    return CastTarget(target, was_cast, [*lacking, *otherwise], counts, tuple(notes))


def lossless_edits(
    view: ModelView, done: CastTarget, base: BaseCheckpoint, naming: NameMap, wanted: str
) -> list[dict[str, Any]]:
    """Edits to the dtypes that config.json names, so that loading by it loses nothing that the files hold.

    A cast to one dtype makes the config say so. Otherwise the config is right until shown wrong: it is edited when
    tensors are in a dtype that its own cannot hold, and they came to be so after the config was written. They did when
    the base has them in another dtype; where no dtypes of a base are known, when at least half of all floats are such,
    unless the config is that of the checkpoint itself and this is an HF one or still what ckptx made of one. Tensors
    that the model keeps in float32 whatever the config says do not count. The format of source and output is of no
    account.

    Args:
        view: The model in the source.
        done: Its tensors have the dtypes that are written.
        base: Whose config it is.
        naming: Of the names in the target.
        wanted: `--dtype`.
    """
    config, target = view.config, done.target
    if config is None:
        return []
    said = dtypes_in(config).values()
    floats = {name: entry for name, entry in target.tensors.items() if entry.dtype.cast and not _is_kept(view, name)}
    lost = {name: entry for name, entry in floats.items() if not all(is_held(entry.dtype.name, each) for each in said)}
    if wanted in CAST_TARGETS:
        return dtype_edits(config, wanted) if done.was_cast or lost else []
    if not lost or _is_as_published(view, base):
        return []
    in_base = _by_target_name(base.dtypes, view, lost, naming) if base.dtypes else {}
    changed = {name: entry for name, entry in lost.items() if name in in_base and in_base[name] is not entry.dtype}
    added = {name: entry for name, entry in lost.items() if name not in in_base}
    if 2 * _numel(added.values()) < _numel(floats.values()):
        added = {}
    if not changed and not added:
        return []
    settled = {name: entry for name, entry in floats.items() if name not in lost}
    return widened(config, {entry.dtype.name for entry in (*changed.values(), *added.values(), *settled.values())})


def quantization_edits(view: ModelView, target: TargetTensors, base: BaseCheckpoint) -> list[dict[str, Any]]:
    """Edits that take the quantisation out of config.json when a step in floats is written under a quantised base.

    Loaders look for scales where a config speaks of quantisation, find none, and leave the weights as they were made at
    random. The config of a checkpoint that nobody trained since is right, whatever it says.
    """
    if view.config is None or _is_as_published(view, base):
        return []
    if any(not entry.dtype.cast for entry in target.tensors.values() if len(entry.shape) > 1):
        return []
    return dequantized(view.config)


def _numel(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.numel for entry in entries)


def _is_kept(view: ModelView, name: str) -> bool:
    """True for what transformers loads in float32 under a config of either half precision."""
    return view.architecture is not None and view.architecture.keeps_fp32(name, "bf16")


def _is_as_published(view: ModelView, base: BaseCheckpoint) -> bool:
    """True when the config is the checkpoint's own and nobody has trained since it was written.

    That is so for an HF checkpoint and for what ckptx made of one. A config that `--base` gives was written for other
    files, whatever the format of these, and a state dict of another name than `pytorch_model.bin` is a trainer's.
    """
    if base.catalog is not None:
        return False
    return view.catalog.is_published or kept_manifest(view, []) is not None
