"""Properties of each checkpoint format, so that code outside `formats/` need not compare format names."""

from __future__ import annotations

from typing import Literal, NamedTuple


class FormatTraits(NamedTuple):
    """Properties of every checkpoint of one format.

    Attributes:
        name: Name in catalogs, manifests, reports and docs/formats.md.
        reshard_output: Default output format of `reshard` for such a source.
        has_archives: True if tensors are in `torch.save` archives, which have to be parsed.
        is_training_format: True if a trainer wrote it: names may have wrappers and a prefix, and there may be optimizer
            state and pickled objects.
        can_keep_state: False if optimizer state cannot be kept, because its settings are not stored along with its
            tensors. Only used for training formats.
        is_published: True for the form in which models are published, with a config that matches the weights;
            `Catalog.is_published` is about one checkpoint.
        can_be_restored: True if its files can be recorded and written again byte for byte.
        has_manifest: True if the manifest of an output in this format records the original files. That of an HF
            checkpoint has no such record.
        has_model_names: True if tensors usually have the names of the model, not those of a published checkpoint.
        is_adapter: True if the tensors are those of an adapter (LoRA or similar), which is no model by itself.
    """

    name: str
    reshard_output: Literal["dcp", "safetensors"]
    has_archives: bool = False
    is_training_format: bool = False
    can_keep_state: bool = True
    is_published: bool = False
    can_be_restored: bool = False
    has_manifest: bool = False
    has_model_names: bool = False
    is_adapter: bool = False


HUGGINGFACE = FormatTraits("huggingface", "safetensors", is_published=True, can_be_restored=True)
BIN = FormatTraits("bin", "safetensors", is_published=True)
DCP = FormatTraits("dcp", "dcp", has_archives=True, is_training_format=True, has_manifest=True)
SHARDED = FormatTraits("sharded", "safetensors", has_manifest=True, has_model_names=True)
FSDP = FormatTraits("fsdp", "dcp", is_training_format=True)
DEEPSPEED = FormatTraits("deepspeed", "dcp", is_training_format=True)
TORCH_CHECKPOINTING = FormatTraits("torch-checkpointing", "dcp", is_training_format=True)
TORCH_SAVE = FormatTraits("torch-save", "safetensors", is_training_format=True, can_keep_state=False)
PEFT = FormatTraits("peft", "safetensors", is_adapter=True)
TRAITS_BY_FORMAT = {
    traits.name: traits
    for traits in (HUGGINGFACE, BIN, DCP, SHARDED, FSDP, DEEPSPEED, TORCH_CHECKPOINTING, TORCH_SAVE, PEFT)
}
