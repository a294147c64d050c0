"""The adapter in a training checkpoint, such as a DCP: its tensors under the names that PEFT writes into a file.

    model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight    in the state dict of a PeftModel
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight                  in adapter_model.safetensors

A state dict with names of adapters (`default`), or with the base weight of every layer, is that of a whole model: its
other tensors are weights of the base. Any other has the adapter only, as accelerate saves it, and its other tensors
replace tensors of the model. torchtitan's names (`wq.lora_a.weight`) become those of the class in transformers; the
rows of B follow those of the weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptx.adapters.adapter import LORA_NAME, SAVED_NAME, describe_adapter, group_tensors
from ckptx.adapters.config import parse_adapter_config
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.trainer_naming import torchtitan
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InputError, UnsupportedError
from ckptx.mapping.names import is_optimizer, is_trainer_state, strip_wrappers
from ckptx.mapping.rules import TrainerRules
from ckptx.wording import first_of

_ROOT = "base_model.model."
_TITAN_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<kind>[ab])\.weight")
OPTIMIZER_REASON = "optimizer state is not converted to PEFT"
STATE_REASON = "training state is not converted to PEFT"
BASE_REASON = "weight of the base model, not part of the adapter"


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """The tensors of an adapter in a training checkpoint.

    Attributes:
        tensors: Name that PEFT writes -> entry, whose `name` is that name.
        stored_names: Name that PEFT writes -> stored name.
        dropped: Stored name of every other tensor -> reason why it is not part of the adapter.
        adapter_name: Name of the adapter in the state dict, such as "default"; None if it has none.
    """

    tensors: Mapping[str, TensorEntry]
    stored_names: Mapping[str, str]
    dropped: Mapping[str, str]
    adapter_name: str | None


def is_lora_name(name: str) -> bool:
    """Return True for the stored name of a tensor of a LoRA layer, not of its optimizer state."""
    return ".lora_" in name and not is_optimizer(name)


def has_adapter(catalog: Catalog) -> bool:
    """Return True if a training checkpoint has tensors of LoRA layers."""
    return any(map(is_lora_name, catalog.tensors))


def find_adapter_tensors(catalog: Catalog, config: Mapping[str, Any] | None) -> AdapterTensors:
    """Find the tensors of the adapter in a training checkpoint.

    Args:
        catalog: Catalog of the checkpoint.
        config: Config of the base model, which names of a trainer require; None if it is not known.

    Raises:
        InputError: There is no adapter, there are several, or names of a trainer and no config.
        UnsupportedError: The names of a trainer cannot be mapped to those of the class.
    """
    unwrapped = strip_wrappers(catalog.tensors)
    dropped = dict.fromkeys(unwrapped.duplicates, "second name of a tensor")
    names: dict[str, str] = {}  # name without wrappers -> stored name
    for stored, name in unwrapped.names.items():
        if is_optimizer(name):
            dropped[stored] = OPTIMIZER_REASON
        elif is_trainer_state(name):
            dropped[stored] = STATE_REASON
        else:
            names[name] = stored
    if any(_TITAN_NAME.fullmatch(name) for name in names):
        return _from_torchtitan(catalog, names, dropped, config)
    shortened = {name: _without_root(name) for name in names}
    matches = {name: match for name, short in shortened.items() if (match := LORA_NAME.fullmatch(short)) is not None}
    if not matches:
        raise InputError(
            f"{catalog.location}: has no LoRA tensors (names with lora_A and lora_B); pass a checkpoint of a training "
            "run with an adapter"
        )
    adapter_names = {match["adapter"] for match in matches.values()}
    if len(adapter_names) > 1:
        listed = ", ".join(sorted(f'"{each}"' for each in adapter_names if each is not None))
        raise InputError(f"{catalog.location}: holds several adapters ({listed}); save one of them")
    (adapter_name,) = adapter_names
    modules = {match["module"] for match in matches.values()}
    is_whole_model = adapter_name is not None or {f"{each}.base_layer.weight" for each in modules} <= set(
        shortened.values()
    )
    tensors: dict[str, TensorEntry] = {}
    stored_names: dict[str, str] = {}
    for name, stored in names.items():
        short, match = shortened[name], matches.get(name)
        saved = SAVED_NAME.fullmatch(short)
        if match is not None:
            leaf = "" if match["leaf"] is None or match["kind"] == "magnitude_vector" else f".{match['leaf']}"
            new_name = f"{_ROOT}{match['module']}.lora_{match['kind']}{leaf}"
        elif saved is not None and saved["adapter"] in (None, adapter_name):
            new_name = f"{_ROOT}{saved['module']}.{saved['leaf']}"
        elif not is_whole_model and ".original_module." not in short:
            new_name = _ROOT + short
        else:
            dropped[stored] = BASE_REASON
            continue
        if new_name in tensors:
            raise InputError(
                f'{catalog.location}: tensors "{stored_names[new_name]}" and "{stored}" are both "{new_name}"; remove '
                "one of them"
            )
        tensors[new_name], stored_names[new_name] = catalog.tensors[stored].with_name(new_name), stored
    return AdapterTensors(tensors, stored_names, dropped, adapter_name)


def _without_root(name: str) -> str:
    """Return the name of a tensor in the model, without the prefix of a PeftModel and what is in front of it."""
    _, separator, rest = name.partition(_ROOT)
    return rest if separator else name


def _from_torchtitan(
    catalog: Catalog, names: Mapping[str, str], dropped: dict[str, str], config: Mapping[str, Any] | None
) -> AdapterTensors:
    """Find the adapter in a checkpoint with torchtitan's names; for the arguments see `find_adapter_tensors`.

    Args:
        catalog: Catalog of the checkpoint.
        names: Name without wrappers -> stored name, of all tensors of the model.
        dropped: Receives the stored names of tensors of the base.
        config: Config of the base model.

    Raises:
        InputError: There is no config, or the config and the tensors do not fit.
        UnsupportedError: torchtitan has no such class, or a layer does not map to one weight.
    """
    if config is None:
        raise InputError(
            f"{catalog.location}: has torchtitan's names, and mapping them requires the config of the model; pass "
            "--base PATH with the HF checkpoint that it was trained from"
        )
    architecture = find_architecture(dict(config))
    class_name = "" if architecture is None else architecture.class_name
    if not torchtitan.SCHEME.has_model(class_name):
        raise UnsupportedError(
            f"{catalog.location}: has torchtitan's names, and ckptx knows none for {class_name or 'this class'}; "
            "convert it where it was trained"
        )
    rules = TrainerRules(torchtitan.SCHEME.conversions(class_name, config))
    tensors: dict[str, TensorEntry] = {}
    stored_names: dict[str, str] = {}
    for name, stored in names.items():
        match = _TITAN_NAME.fullmatch(name)
        if match is None:
            dropped[stored] = BASE_REASON
            continue
        weight = f"{match['module']}.weight"
        entry = catalog.tensors[stored].with_name(weight)
        if match["kind"] == "b":  # [out, rank]: its rows are those of the weight
            renamed = rules.from_trainer({weight: entry}).tensors
            new_names = list(renamed)
            entry = renamed[new_names[0]]
        else:
            new_names = [rules.disk_name(weight) or ""]
        if len(new_names) != 1 or not new_names[0].endswith(".weight") or new_names[0] == weight:
            raise UnsupportedError(
                f'{catalog.location}: layer "{match["module"]}" has no single counterpart in {class_name}; convert it '
                "where it was trained"
            )
        new_name = f"{_ROOT}{new_names[0].removesuffix('.weight')}.lora_{match['kind'].upper()}.weight"
        tensors[new_name], stored_names[new_name] = entry.with_name(new_name), stored
    return AdapterTensors(tensors, stored_names, dropped, None)


def derive_config(
    tensors: Mapping[str, TensorEntry], alpha: float, base_model: str | None, location: str
) -> dict[str, Any]:
    """Return the contents of `adapter_config.json` for plain LoRA (or DoRA, if there are magnitudes).

    Args:
        tensors: Tensors under the names that PEFT writes.
        alpha: Alpha of all layers.
        base_model: Name or path of the base, to record; None for none.
        location: Location of the checkpoint, for error messages.

    Raises:
        InputError: A layer has no A.
    """
    ranks: dict[str, int] = {}
    modules: list[str] = []
    saved: list[str] = []
    for name, entry in tensors.items():
        short = name.removeprefix(_ROOT)
        match = LORA_NAME.fullmatch(short)
        if match is None:
            saved.append(short)
            continue
        if match["module"] not in modules:
            modules.append(match["module"])
        if match["kind"] in ("A", "embedding_A") and match["leaf"] != "bias":
            ranks[match["module"]] = entry.shape[0] if entry.shape else 0
    missing = [module for module in modules if module not in ranks]
    if missing:
        raise InputError(f"{location}: layers without A: {first_of(missing)}; the checkpoint is incomplete")
    counts = {rank: list(ranks.values()).count(rank) for rank in ranks.values()}
    rank = max(counts, key=lambda each: counts[each])
    biases = [name for name in saved if name.endswith(".bias")]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "bias": "lora_only" if biases else "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": any(".lora_magnitude_vector" in name for name in tensors),
        "lora_bias": any(name.endswith(".lora_B.bias") for name in tensors),
        "init_lora_weights": True,
        "target_modules": sorted(modules),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved if name not in biases}) or None,
        "rank_pattern": {re.escape(module): each for module, each in ranks.items() if each != rank},
        "alpha_pattern": {},
    }


def describe_stored_adapter(catalog: Catalog) -> dict[str, Any]:
    """Return contents of the adapter in a training checkpoint for a report, as `describe_adapter`, without alpha.

    Args:
        catalog: Catalog of the checkpoint.

    Raises:
        InputError: There is no complete adapter, or there are several.
        UnsupportedError: The adapter is of a kind that ckptx does not read.
    """
    # Rows of an archive can only be reordered after it was parsed, and shapes need no bytes.
    shapes = replace(catalog, tensors={name: entry._replace(chunks=()) for name, entry in catalog.tensors.items()})
    found = find_adapter_tensors(shapes, catalog.config)
    config = parse_adapter_config(derive_config(found.tensors, 1.0, None, str(catalog.location)), str(catalog.location))
    adapter = group_tensors(replace(catalog, tensors=dict(found.tensors)), config)
    nbytes = sum(entry.nbytes for entry in found.tensors.values())
    return {**describe_adapter(adapter), "has_config": False, "alphas": [], "scalings": [], "bytes": nbytes}
