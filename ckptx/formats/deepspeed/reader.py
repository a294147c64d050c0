"""Open a DeepSpeed checkpoint: the files that the ranks saved in one step, or a universal checkpoint made from them."""

from __future__ import annotations

from collections.abc import Sequence

from ckptx.catalog.catalog import Catalog
from ckptx.formats.deepspeed.file_names import is_parameter_file
from ckptx.formats.deepspeed.step_reader import StepReader
from ckptx.formats.deepspeed.tensor_parallel_reader import (
    TensorParallelReader,
    TensorParallelUniversalReader,
    files_by_tensor_parallel_rank,
)
from ckptx.formats.deepspeed.universal_reader import UniversalReader
from ckptx.formats.torch_archive.unpickle import without_garbage_collection
from ckptx.storage.interface import Source


def open_deepspeed(source: Source, names: Sequence[str]) -> Catalog:
    """Return the catalog of a DeepSpeed checkpoint.

    Args:
        source: The directory of a step, or its parent.
        names: Files of one step, in one directory, with the files of parameters in its subdirectory `zero/` if it is a
            universal checkpoint; only the `mp_rank_TT_model_states.pt` to read only the weights.

    Raises:
        InputError: A rank has no file, a file is damaged or of another save, or the files contradict each other.
        UnsupportedError: The checkpoint is of a kind that is not converted, see the modules of this package.
    """
    is_universal = any(map(is_parameter_file, names))
    reader: type[StepReader | TensorParallelReader]
    if files_by_tensor_parallel_rank(names).keys() == {0}:
        reader = UniversalReader if is_universal else StepReader
    else:
        reader = TensorParallelUniversalReader if is_universal else TensorParallelReader
    with without_garbage_collection():
        return reader(source, names).read()
