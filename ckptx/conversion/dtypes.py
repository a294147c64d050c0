"""`--dtype`: which dtype each tensor of a target gets, and what config.json has to say about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptx.catalog.dtype import CAST_TARGETS, DType
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.config import Home
from ckptx.conversion.memory import kept_manifest
from ckptx.conversion.names import Spelling
from ckptx.conversion.run import Conversion
from ckptx.conversion.target import Target
from ckptx.errors import UsageError
from ckptx.mapping.config import dequantized, dtype_edits, dtypes_in, is_held, widened
from ckptx.mapping.dtypes import base_targets, cast_targets
from ckptx.report.report import counted
from ckptx.view import ModelView, rules_of


def cast(run: Conversion, view: ModelView, target: Target, home: Home, spelling: Spelling) -> bool:
    """Gives each target tensor its dtype; True when any is cast.

    Raises:
        UsageError: Dtypes are to be those of a base, and there is none.
    """
    wanted: Any = run.options.dtype
    architecture = view.architecture
    in_base: dict[str, DType] = {}
    if wanted != "auto" and home.dtypes:
        in_base = _by_target_name(home.dtypes, view, target.tensors, spelling)
    if wanted == "base":
        if not home.dtypes:
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
            _kept_by(home.dtypes, in_base),
        )
    changed = [name for name, dtype in dtypes.items() if target.tensors[name].dtype is not dtype]
    for name in changed:
        target.tensors[name] = target.tensors[name]._replace(dtype=dtypes[name])
    if wanted == "base":
        _report_base(run, target, in_base)
    elif wanted != "auto":
        kept = [name for name, entry in target.tensors.items() if entry.dtype.cast and name not in changed]
        asked = CAST_TARGETS[wanted]
        run.report.details["kept_dtype"] = [name for name in kept if target.tensors[name].dtype is not asked]
    return bool(changed)


def _kept_by(base: Mapping[str, DType], in_base: Mapping[str, DType]) -> frozenset[str]:
    """Names a base keeps in float32; a base wholly in float32 says nothing about what must stay so."""
    if all(dtype.name == "F32" for dtype in base.values()):
        return frozenset()
    return frozenset(name for name, dtype in in_base.items() if dtype.name == "F32")


def _by_target_name(
    base: Mapping[str, DType], view: ModelView, names: Iterable[str], spelling: Spelling
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
        spoken = (spelling.rules and spelling.rules.model_name(name)) or name
        known = next((base[each] for each in (name, spoken) if each in base), None)
        if known is None:
            alike = by_model.get((rules and rules.model_name(spoken)) or spoken, set())
            known = next(iter(alike)) if len(alike) == 1 else None
        if known is not None:
            found[name] = known
    return found


def _report_base(run: Conversion, target: Target, in_base: Mapping[str, DType]) -> None:
    floats = {name: entry for name, entry in target.tensors.items() if entry.dtype.cast}
    lacking = [name for name in floats if name not in in_base]
    otherwise = [name for name, entry in floats.items() if name in in_base and in_base[name] is not entry.dtype]
    report = run.report
    report.details["kept_dtype"] = [*lacking, *otherwise]
    report.details["base_dtypes"] = {
        "as_base": len(floats) - len(lacking) - len(otherwise),
        "lacking": lacking,
        "otherwise": otherwise,
    }
    if lacking:
        report.warnings.append(
            f"--dtype base: {counted(len(lacking), 'tensor')} the base lacks keep their own dtype: "
            f'"{lacking[0]}"{" and more" if len(lacking) > 1 else ""}'
        )
    if otherwise:
        first = otherwise[0]
        report.warnings.append(
            f"--dtype base: {counted(len(otherwise), 'tensor')} cannot be as in the base, which is quantised, and stay "
            f'as they are: "{first}" is {in_base[first]} there, {floats[first].dtype} here'
        )


def lossless_edits(
    run: Conversion, view: ModelView, target: Target, home: Home, spelling: Spelling, *, was_cast: bool
) -> list[dict[str, Any]]:
    """Edits to the dtypes that config.json names, so that loading by it loses nothing that the files hold.

    A cast to one dtype makes the config say so. Otherwise the config is right until shown wrong: it is edited when
    tensors are in a dtype that its own cannot hold, and they came to be so after the config was written. They did when
    the base has them in another dtype; where no base is known, when at least half of all floats are such, unless the
    checkpoint is an HF one or still what ckptx made of one. Tensors that the model keeps in float32 whatever the config
    says do not count.

    Args:
        run: The conversion.
        view: The model in the source.
        target: Its tensors have the dtypes that are written.
        home: Whose config it is.
        spelling: Of the names in the target.
        was_cast: Whether `cast` cast anything.
    """
    config, wanted = view.config, run.options.dtype
    if config is None:
        return []
    said = dtypes_in(config).values()
    floats = {name: entry for name, entry in target.tensors.items() if entry.dtype.cast and not _is_kept(view, name)}
    lost = {name: entry for name, entry in floats.items() if not all(is_held(entry.dtype.name, each) for each in said)}
    if wanted in CAST_TARGETS:
        return dtype_edits(config, wanted) if was_cast or lost else []
    if not lost or _is_as_published(view):
        return []
    in_base = _by_target_name(home.dtypes, view, lost, spelling) if home.dtypes else {}
    changed = {name: entry for name, entry in lost.items() if name in in_base and in_base[name] is not entry.dtype}
    added = {name: entry for name, entry in lost.items() if name not in in_base}
    if 2 * _numel(added.values()) < _numel(floats.values()):
        added = {}
    if not changed and not added:
        return []
    settled = {name: entry for name, entry in floats.items() if name not in lost}
    return widened(config, {entry.dtype.name for entry in (*changed.values(), *added.values(), *settled.values())})


def quantization_edits(run: Conversion, view: ModelView, target: Target) -> list[dict[str, Any]]:
    """Edits that take the quantisation out of config.json when a step in floats is written under a quantised base.

    Loaders look for scales where a config speaks of quantisation, find none, and leave the weights as they were made at
    random. The config of a checkpoint that nobody trained since is right, whatever it says.
    """
    if view.config is None or _is_as_published(view):
        return []
    if any(not entry.dtype.cast for entry in target.tensors.values() if len(entry.shape) > 1):
        return []
    edits = dequantized(view.config)
    if edits:
        run.report.warnings.append("config.json speaks of quantisation, and every weight is a float: taken out of it")
    return edits


def _numel(entries: Iterable[TensorEntry]) -> int:
    return sum(entry.numel for entry in entries)


def _is_kept(view: ModelView, name: str) -> bool:
    """True for what transformers loads in float32 under a config of either half precision."""
    return view.architecture is not None and view.architecture.keeps_fp32(name, "bf16")


def _is_as_published(view: ModelView) -> bool:
    """True when nobody has trained since the config was written: an HF checkpoint, or what ckptx made of one."""
    return view.catalog.format in ("huggingface", "bin") or kept_manifest(view, []) is not None
