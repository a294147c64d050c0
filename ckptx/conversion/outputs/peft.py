"""`convert to-peft`: an adapter in the format of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptx.catalog.catalog import Catalog
from ckptx.conversion.outputs.output_format import Allocation, ConfigEdits, OutputContents, OutputFormat
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.dtypes import CastTensors
from ckptx.conversion.steps.manifest import manifest_of
from ckptx.conversion.steps.naming import NamedTarget
from ckptx.conversion.steps.output_check import check_huggingface
from ckptx.conversion.steps.source_model import DroppedState, Ties
from ckptx.formats.hf import layout as huggingface_layout
from ckptx.formats.hf.safetensors import pad_header
from ckptx.formats.peft.detect import CONFIG_FILE, WEIGHT_FILES
from ckptx.model_view.view import ModelView
from ckptx.options.adapter import AdapterSettings
from ckptx.options.to_peft import ToPeftOptions
from ckptx.storage.interface import SourceFiles


@dataclass(frozen=True)
class PeftFormat(OutputFormat):
    """`adapter_model.safetensors` and `adapter_config.json`, as `PeftModel.save_pretrained` writes them.

    Attributes:
        options: Options of the conversion.
    """

    options: ToPeftOptions
    sharding: None = None
    records_original_files: ClassVar[bool] = False

    @property
    def adapter_settings(self) -> AdapterSettings:
        return self.options.adapter_settings(self.options.base_name)

    def dropped_state(self, view: ModelView) -> DroppedState:
        return DroppedState()

    def default_naming(self, view: ModelView) -> str | None:
        return None

    def allocate(self, dst: Path, contents: OutputContents, source: SourceFiles) -> Allocation:
        config = contents.base.adapter_config
        assert config is not None
        entries = sorted(contents.sharded.target.tensors.values(), key=lambda entry: (-entry.dtype.bits, entry.name))
        catalog = Catalog(dst, "peft", {})
        (name, _) = WEIGHT_FILES
        text = huggingface_layout.format_header(entries, {"format": "pt"})
        prologue = huggingface_layout.place_file(catalog, name, entries, pad_header(text))
        layout = huggingface_layout.HuggingFaceLayout(catalog, {name: prologue}, "", None)
        config_text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        return Allocation(
            catalog,
            lambda tree, _: check_huggingface(tree, layout),
            prologues=layout.prologues,
            markers=((CONFIG_FILE, config_text.encode()),),
        )

    def edits(
        self,
        view: ModelView,
        named_target: NamedTarget,
        cast: CastTensors,
        base: BaseCheckpoint,
        ties: Ties,
        dtype: str,
    ) -> ConfigEdits:
        return ConfigEdits()

    def sidecars(self, base: BaseCheckpoint) -> list[str]:
        return []

    def manifest(self, contents: OutputContents, allocation: Allocation, digests: Mapping[str, str]) -> dict[str, Any]:
        return manifest_of("peft", allocation.catalog, digests)
