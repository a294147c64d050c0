"""What follows from the format of a checkpoint, so that nobody outside `formats/` has to ask which one it is."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Form(NamedTuple):
    """Properties of every checkpoint of one format.

    Attributes:
        name: Name in catalogs, manifests, reports and docs/formats.md.
        family: What `reshard` makes of it unless asked otherwise.
        has_archives: Its tensors lie in archives of `torch.save`, which have to be looked into.
        is_of_training: A trainer wrote it: names may have wrappers and a prefix, optimizer state and pickled objects
            may lie beside the model.
        is_published: It is as its authors published it: nobody has trained since its config was written.
        can_be_restored: Its files can be remembered, and written again byte for byte.
        has_manifest: ckptx leaves a manifest that remembers the files it came from.
        has_model_names: Its tensors usually have the names of the model, not those of a published checkpoint.
    """

    name: str
    family: Literal["dcp", "safetensors"]
    has_archives: bool = False
    is_of_training: bool = False
    is_published: bool = False
    can_be_restored: bool = False
    has_manifest: bool = False
    has_model_names: bool = False


HUGGINGFACE = Form("huggingface", "safetensors", is_published=True, can_be_restored=True)
BIN = Form("bin", "safetensors", is_published=True)
DCP = Form("dcp", "dcp", has_archives=True, is_of_training=True, has_manifest=True)
SHARDED = Form("sharded", "safetensors", has_manifest=True, has_model_names=True)
FSDP = Form("fsdp", "dcp", is_of_training=True)
FORMS = {form.name: form for form in (HUGGINGFACE, BIN, DCP, SHARDED, FSDP)}
