"""Target tensors in the form in which an output stores them: unchanged, or combined into Megatron's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptx.catalog.dtype import DType
from ckptx.catalog.entry import TensorEntry
from ckptx.conversion.steps.base_checkpoint import BaseCheckpoint
from ckptx.conversion.steps.naming import NamedTarget, NameMap, SchemeChange
from ckptx.conversion.steps.recorded_config import check_recorded_config
from ckptx.conversion.steps.target_tensors import TargetTensors
from ckptx.errors import UnsupportedError
from ckptx.mapping.rewrite import ZEROS_FILE
from ckptx.mapping.rules import TrainerRules
from ckptx.model_view.view import ModelView, difference_between
from ckptx.quantization.computed_files import ComputedFiles, FileOfZeros
from ckptx.storage.interface import SourceFiles
from ckptx.transfer.stream import TensorReader

if TYPE_CHECKING:  # imported for `to-megatron` only
    from ckptx.model_view.megatron_tensors import Layers, MegatronTensors

_COMPUTED_REASON = "buffer that Megatron computes from the config"


@dataclass(frozen=True, slots=True)
class CombinedTarget:
    """Target tensors in the form in which the output stores them.

    Attributes:
        named_target: Target tensors under their final names.
        files: Files of the source, and a file of zeros if the vocabulary is padded.
        dropped: Stored `name` and `reason` of each tensor that the output does not have.
        megatron: Entry `megatron` of the report; None for other outputs.
        padding_bytes: Bytes of the target that are read from the file of zeros.
    """

    named_target: NamedTarget
    files: SourceFiles
    dropped: tuple[dict[str, str], ...] = ()
    megatron: dict[str, Any] | None = None
    padding_bytes: int = 0


def combine_for_megatron(
    view: ModelView,
    named_target: NamedTarget,
    base: BaseCheckpoint,
    files: SourceFiles,
    *,
    layers: Layers | None,
    vocabulary_multiple: int,
) -> CombinedTarget:
    """Return the tensors of a model in Megatron's layout.

    Args:
        view: Model in the source.
        named_target: Target tensors under disk names, with the dtypes of the target.
        base: Source and base, see `BaseCheckpoint`.
        files: Files of the source.
        layers: "stacked" for all layers in one tensor, "separate" for one tensor per layer; None for stacked layers if
            all layers have the same tensors, else separate ones.
        vocabulary_multiple: Number of which the rows of the vocabulary become a multiple, with rows of zeros.

    Raises:
        UnsupportedError: The Megatron names of the class or of a tensor are unknown, the layers cannot be stacked, or
            tensors that are combined have different dtypes.
        InputError: Tensors do not match each other or the config.
    """
    from ckptx.model_view.megatron_tensors import make_megatron_tensors

    if view.config is None or view.disk_architecture is None:
        raise UnsupportedError(
            f"{base.sidecar_source.root}: config.json names no known architecture, which Megatron's names depend on; "
            "pass --base PATH with an HF checkpoint of the model"
        )
    target = named_target.target
    class_name = view.disk_architecture.class_name
    made = make_megatron_tensors(
        {name: target.source.tensors[target.source_names[name]].with_name(name) for name in target.tensors},
        class_name,
        view.config,
        layers=layers,
        vocabulary_multiple=vocabulary_multiple,
    )
    _refuse_changed_copies(target, made, files)
    tensors = {
        name: entry._replace(dtype=_common_dtype(name, made, target.tensors)) for name, entry in made.tensors.items()
    }
    combined = replace(
        target,
        source=replace(target.source, tensors={**target.source.tensors, **made.tensors}),
        tensors=tensors,
        source_names={name: name for name in tensors},
        stored_names={
            name: tuple(stored for old in made.sources[name] for stored in target.stored_names[old]) for name in tensors
        },
        aliases=dict(made.aliases),
        copied_aliases={},
    )
    change = named_target.scheme_change
    before = change.before if change is not None else "model" if named_target.naming.sources else "hf"
    result = NamedTarget(
        combined,
        NameMap(TrainerRules(made.conversions), made.sources),
        scheme_change=SchemeChange(before, "megatron", made.conversions),
    )
    check_recorded_config(view, base, result)
    padding = [chunk.nbytes for entry in made.tensors.values() for chunk in entry.chunks if chunk.file == ZEROS_FILE]
    return CombinedTarget(
        result,
        ComputedFiles(files, {ZEROS_FILE: FileOfZeros(max(padding))}) if padding else files,
        tuple(
            {"name": stored, "reason": reason}
            for name, reason in (
                *((name, _COMPUTED_REASON) for name in made.computed),
                *(
                    (name, f"copy of {original}, which Megatron's MTP layers use")
                    for name, original in made.copies.items()
                ),
            )
            for stored in target.stored_names[name]
        ),
        {
            "layers": made.layers,
            "vocabulary_rows": made.vocabulary_rows,
            "padded_rows": made.padded_rows,
            "is_head_separate": "output_layer.weight" in tensors,
        },
        sum(padding),
    )


def _refuse_changed_copies(target: TargetTensors, made: MegatronTensors, files: SourceFiles) -> None:
    """Compare the copies of tensors in MTP (multi-token prediction) layers with their originals.

    Raises:
        UnsupportedError: One is different.
    """
    reader = TensorReader(files)
    for name, original in made.copies.items():
        copy, first = (target.source.tensors[target.source_names[each]] for each in (name, original))
        difference = difference_between(reader, first, copy)
        if difference is not None:
            raise UnsupportedError(
                f'tensors "{original}" and "{name}": {difference}, but Megatron has one tensor for both; copy the '
                "first over the second if the MTP layer should use it, or convert with convert to-dcp or convert to-hf"
            )


def _common_dtype(name: str, made: MegatronTensors, tensors: Mapping[str, TensorEntry]) -> DType:
    """Return the dtype of a combined tensor.

    Raises:
        UnsupportedError: The tensors that it is made of have different dtypes.
    """
    first, *others = made.sources[name]
    for other in others:
        if tensors[other].dtype is not tensors[first].dtype:
            raise UnsupportedError(
                f'tensors "{first}" ({tensors[first].dtype}) and "{other}" ({tensors[other].dtype}): are one tensor '
                f'"{name}" in Megatron, which has one dtype; pass --dtype bf16, fp16 or fp32'
            )
    return tensors[first].dtype
