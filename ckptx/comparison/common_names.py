"""Two checkpoints to compare, under common names if only one of them has Megatron's."""

from __future__ import annotations

from ckptx.architecture.trainer_naming.megatron_prefixes import find_prefixes
from ckptx.catalog.catalog import Catalog


def with_common_names(a: Catalog, b: Catalog, *, needs_bytes: bool = True) -> tuple[Catalog, Catalog]:
    """Return two checkpoints to compare; if only one has Megatron's names, it gets disk names.

    If it has no config, that of the other checkpoint is used. If its names cannot be mapped, it keeps them, with a
    note.

    Args:
        a: First checkpoint.
        b: Second checkpoint.
        needs_bytes: True to locate the chunks of the tensors, so that they can be read; False if only names and shapes
            are compared.

    Raises:
        ReadError: The storage failed.
    """
    in_a, in_b = (bool(find_prefixes(each.tensors)) for each in (a, b))
    if in_a == in_b:
        return a, b
    from ckptx.model_view.megatron_names import with_disk_names_for_comparison

    if in_a:
        return with_disk_names_for_comparison(a, b, needs_bytes=needs_bytes), b
    return a, with_disk_names_for_comparison(b, a, needs_bytes=needs_bytes)
