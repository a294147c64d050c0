"""Select the source that the steps of a conversion read: for `convert to-peft`, only the adapter in the checkpoint.

An adapter that is extracted from a training checkpoint is a catalog of its own, with the names that PEFT writes. Other
conversions read the whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptx.catalog.catalog import Catalog
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.errors import InputError
from ckptx.formats.peft.detect import CONFIG_FILE
from ckptx.options.adapter import AdapterSettings
from ckptx.storage.interface import Source, SourceFiles
from ckptx.storage.local import LocalSource

_VERL_FILE = "lora_train_meta.json"  # r and alpha, next to the files of the ranks

if TYPE_CHECKING:  # numpy and the readers of adapters are imported for adapters only
    from ckptx.adapters.adapter import Adapter


@dataclass(frozen=True, slots=True)
class ExtractedAdapter:
    """An adapter that was found in a training checkpoint.

    Attributes:
        adapter: The adapter; the names in its catalog are those that PEFT writes, and the positions of the elements are
            known, because torch archives (see `Chunk`) were parsed.
        config: Contents of its `adapter_config.json`.
        stored_name_by_peft_name: Name that PEFT writes -> stored name.
        dropped: Stored name of every other tensor of the checkpoint -> reason.
    """

    adapter: Adapter
    config: Mapping[str, Any]
    stored_name_by_peft_name: Mapping[str, str]
    dropped: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ConversionSource:
    """The source of a conversion: a checkpoint, or only the adapter in it if the output is an adapter.

    Attributes:
        base: Source and base, see `BaseCheckpoint`; if the output is an adapter, `base.source` is its catalog.
        extracted: The adapter; None if the output is a model.
        notes: Notes for the user.
    """

    base: BaseCheckpoint
    extracted: ExtractedAdapter | None = None
    notes: tuple[str, ...] = ()

    @property
    def dropped(self) -> list[dict[str, str]]:
        """Stored `name` and `reason` of each tensor that is not part of the adapter; empty for a model."""
        dropped = {} if self.extracted is None else self.extracted.dropped
        return [{"name": name, "reason": reason} for name, reason in dropped.items()]

    def report_entry(self) -> list[dict[str, Any]] | None:
        """Return the entry `adapters` of the report; None for a model."""
        if self.extracted is None:
            return None
        from ckptx.adapters.adapter import describe_adapter

        adapter = self.extracted.adapter
        return [{"path": str(adapter.catalog.location), "factor": 1.0, **describe_adapter(adapter)}]

    def stored_names(self, names: Iterable[str]) -> set[str]:
        """Return the stored names of tensors that have the names `names` in `base.source`."""
        stored_by_name = {} if self.extracted is None else self.extracted.stored_name_by_peft_name
        return {stored_by_name.get(name, name) for name in names}


def extract_adapter(
    catalog: Catalog, files: SourceFiles, settings: AdapterSettings, model_config: Mapping[str, Any] | None
) -> ExtractedAdapter:
    """Find the adapter in a training checkpoint, and give it a config.

    Args:
        catalog: Catalog of the checkpoint.
        files: Its open files.
        settings: Config or alpha of the adapter, and the name of the base model to record.
        model_config: Config of the base model, which torchtitan's names require; None if it is not known.

    Raises:
        InputError: There is no adapter, or several; alpha is not known; or the config does not fit the tensors.
        UnsupportedError: The adapter is of a kind that ckptx does not read.
    """
    from ckptx.adapters.adapter import group_tensors
    from ckptx.adapters.config import parse_adapter_config
    from ckptx.adapters.state_dicts import derive_config, find_adapter_tensors, is_lora_name
    from ckptx.formats.hf.reader import read_json_object

    catalog = _locate(catalog, [name for name in catalog.tensors if is_lora_name(name)], files)
    found = find_adapter_tensors(catalog, model_config)
    location = str(catalog.location)
    config_label, alpha = f"{location} (config from --alpha)", settings.alpha  # the label is for error messages
    config_source = _find_config(catalog)
    if alpha is None and config_source is None and catalog.source.listing().is_file(_VERL_FILE):
        config_label = str(catalog.source.location / _VERL_FILE)
        alpha = _recorded_alpha(read_json_object(catalog.source, _VERL_FILE), config_label)
    if settings.config_file is not None:
        path = Path(settings.config_file)
        config_label, config = str(path), read_json_object(LocalSource(path.parent), path.name)
    elif alpha is not None:
        config = derive_config(found.tensors, alpha, settings.base_name, location)
    elif config_source is not None:
        config_label = str(config_source.location / CONFIG_FILE)
        config = read_json_object(config_source, CONFIG_FILE)
    else:
        raise InputError(
            f"{location}: a checkpoint of a trainer does not record the alpha of its adapter, which scales it; pass "
            "--adapter-config FILE (adapter_config.json of the run) or --alpha N"
        )
    if settings.base_name is not None:
        config["base_model_name_or_path"] = settings.base_name
    # The first search shows which other tensors belong to the adapter, such as those of `modules_to_save`. Only their
    # archives are parsed, not those of the whole model; the second search returns their entries with positions.
    others = [stored for stored in found.stored_names.values() if not is_lora_name(stored)]
    if others:
        found = find_adapter_tensors(_locate(catalog, others, files), model_config)
    adapter_catalog = replace(
        catalog, format="peft", tensors=dict(found.tensors), sidecars=(), training_files=(), config=None,
        planner_data=None, parts=(), verbatim={}, notes=[], objects={},
    )  # fmt: skip
    adapter = group_tensors(adapter_catalog, parse_adapter_config(config, config_label))
    return ExtractedAdapter(adapter, config, found.stored_names, found.dropped)


def _find_config(catalog: Catalog) -> Source | None:
    """Return the directory with the `adapter_config.json` of a training checkpoint; None if there is none.

    The file is in the directory of the checkpoint, or in the directory that the user passed and in a subdirectory of
    which the checkpoint was found: Trainer writes `checkpoint-N/adapter_config.json` and
    `checkpoint-N/pytorch_model_fsdp_0/`.
    """
    locations = [catalog.root]
    if catalog.opened_from is not None and catalog.opened_file is None:
        locations.append(catalog.opened_from)
    sources = (catalog.source.with_location(location) for location in dict.fromkeys(locations))
    return next((source for source in sources if source.listing().is_file(CONFIG_FILE)), None)


def _locate(catalog: Catalog, names: Collection[str], files: SourceFiles) -> Catalog:
    """Return the catalog with the positions of the elements of some tensors, which their torch archives record."""
    if not catalog.traits.has_archives or not names:
        return catalog
    from ckptx.formats.dcp.reader import locate_payloads

    located = locate_payloads(replace(catalog, tensors={name: catalog.tensors[name] for name in names}), files)
    return replace(catalog, tensors=catalog.tensors | located.tensors)


def _recorded_alpha(values: Mapping[str, Any], path: str) -> float:
    """Return the alpha that verl recorded next to the files of the ranks.

    Raises:
        InputError: It is not a finite number other than 0.
    """
    alpha = values.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not isfinite(alpha) or not alpha:
        raise InputError(
            f"{path}: lora_alpha is {alpha!r:.40}, but a number other than 0 is required; pass --alpha N, or "
            "--adapter-config FILE"
        )
    return float(alpha)


def select_conversion_source(
    base: BaseCheckpoint, files: SourceFiles, settings: AdapterSettings | None, model_config: Mapping[str, Any] | None
) -> ConversionSource:
    """Return the adapter in the source if the output is an adapter, else the source unchanged.

    Args:
        base: Source and base, see `BaseCheckpoint`.
        files: Files of the source.
        settings: Settings of `convert to-peft`; None for other commands.
        model_config: Config of the base model, which torchtitan's names require; None if it is not known.

    Raises:
        InputError, UnsupportedError: See `extract_adapter`.
    """
    if settings is None:
        return ConversionSource(base)
    extracted = extract_adapter(base.source, files, settings, model_config)
    notes = list(base.source.notes)  # the catalog of the adapter has none
    if settings.alpha is not None:
        notes.append(
            f"--alpha {settings.alpha:g}: the output is plain LoRA, scaled by alpha / rank; if the run used rsLoRA or "
            "patterns of ranks or alphas, pass its adapter_config.json with --adapter-config"
        )
    adapter_base = replace(
        base, source=extracted.adapter.catalog, catalog=None, config=None, uses_no_base=True, notes=(),
        adapter_config=extracted.config,
    )  # fmt: skip
    return ConversionSource(adapter_base, extracted, tuple(notes))
