"""Refuse files and directories that are one rank's part of a checkpoint without a record of how the parts combine.

Half a model would convert without an error, so a part is never opened as a checkpoint. Files, or directories, that may
be parts form a group by their names (`rank_names`). They are parts in these cases:

* Their names are "N of M": files of one checkpoint whose index is missing.
* A word for a rank precedes numbers that count from 0 (after "shard", also from 1), unless config.json is present and
  the tensors have all sizes in it: then each is a whole model.
* Other numbers count from 0 without gaps, and tensors have names in common, unless each is a whole model.
* They have no tensor in common, but layers of the same model. The numbers may count from 1, too.

A single file or directory with a rank in its name is a part if its name, header or config.json records a world size
above 1, unless it is a whole model.
Names and shapes of tensors are read from headers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptx.catalog.region import Shape
from ckptx.errors import CkptxError, InputError, StorageFailure, UnsupportedError
from ckptx.formats.rank_names import NameGroup, group_of, has_only_ranks, has_rank, may_be_part, world_size_from_name
from ckptx.mapping.names import pattern_of
from ckptx.storage.interface import Location, Source
from ckptx.storage.listing import Listing
from ckptx.untrusted.json_text import parse_json
from ckptx.untrusted.limits import MAX_CONFIG_BYTES
from ckptx.wording import counted

Shapes = Mapping[str, Shape]
ShapeReader = Callable[[Location], Shapes | None]
"""Function that returns the shapes of the tensors in a file or directory; None if it cannot be opened."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_MAX_LISTED = 4  # names in an error message
_MAX_OPENED = 8  # other members of a group whose shapes are read
_MAX_SEARCHED, _MAX_DEPTH = 16, 8  # subdirectories per directory, and levels of them, that are searched for weights
_MAX_RANK_LEVELS = 3  # nested directories for tp, pp and dp
_WORLD_SIZE_KEYS = ("world_size", "tp_size", "tensor_parallel_size", "num_ranks")
_NEXT_STEP = (
    "save a DCP or the whole model where it was trained, and pass that (if each rank holds a whole model, put its "
    "config.json next to it)"
)


def complete_files(source: Source, names: Sequence[str], read_shapes: ShapeReader) -> list[str]:
    """Return the weight files of a directory that are not parts of a checkpoint.

    Args:
        source: The directory.
        names: Names of the weight files, at least one.
        read_shapes: Reads the shapes of the tensors in a file.

    Raises:
        UnsupportedError: All of them are parts of checkpoints.
    """
    groups = _part_groups(source, names, read_shapes, are_directories=False)
    parts = {name for group in groups for name in group.names}
    complete = [name for name in names if name not in parts]
    if not complete:
        raise _parts_error(source.location, groups[0])
    return complete


def complete_directories(source: Source, names: Sequence[str], read_shapes: ShapeReader) -> list[str]:
    """Return the subdirectories of a source that are not parts of a checkpoint.

    Args:
        source: A directory.
        names: Paths of the subdirectories with checkpoints, relative to it, at least one.
        read_shapes: Reads the shapes of the tensors in a directory.

    Raises:
        UnsupportedError: All of them are parts of checkpoints.
    """
    # The rank may be in any component of a path. Paths that differ only in that component are siblings: path before
    # it, path after it -> names in its place.
    siblings: dict[tuple[str, str], set[str]] = {}
    for path in names:
        parts = path.split("/")
        for index, name in enumerate(parts):
            siblings.setdefault(("/".join(parts[:index]), "/".join(parts[index + 1 :])), set()).add(name)
    refused: dict[str, tuple[Location, NameGroup]] = {}
    for (parent_path, inner_path), sibling_names in siblings.items():
        directory = source.with_location(source.location / parent_path) if parent_path else source
        for group in _part_groups(
            directory, sorted(sibling_names), _subdirectory_reader(inner_path, read_shapes), are_directories=True
        ):
            refused.update(
                (_join_path(parent_path, name, inner_path), (directory.location, group)) for name in group.names
            )
    complete = [name for name in names if name not in refused]
    if not complete:
        raise _parts_error(*refused[names[0]])
    return complete


def _join_path(*parts: str) -> str:
    return "/".join(filter(None, parts))


def refuse_parts_in_tree(source: Source, depth: int, read_shapes: ShapeReader) -> None:
    """Refuse weight files written per rank in a directory, or in subdirectories down to `depth` levels.

    A directory that cannot be listed is skipped.

    Raises:
        UnsupportedError: There are such files.
    """
    try:
        listing = source.listing()
    except StorageFailure:
        raise
    except InputError:
        return  # not a directory, not accessible, or with too many names
    names = [name for name in listing if name.endswith(WEIGHT_SUFFIXES)]
    groups = _part_groups(source, names, read_shapes, are_directories=False)
    if groups:
        raise _parts_error(source.location, groups[0])
    for name in listing.directories() if depth else ():
        if not name.startswith("."):
            refuse_parts_in_tree(source.with_location(source.location / name), depth - 1, read_shapes)


def refuse_part_file(
    source: Source, name: str, shapes: Shapes, read_shapes: ShapeReader, metadata: Mapping[str, Any]
) -> None:
    """Refuse a weight file that is one rank's part of a checkpoint.

    Args:
        source: The directory of the file.
        name: Name of the file.
        shapes: The shapes of its tensors.
        read_shapes: Reads the shapes of the tensors in other files of the directory.
        metadata: Metadata of its header, which may contain a world size.

    Raises:
        UnsupportedError: It is a part.
    """
    for file in source.absolute_locations(name):  # the name of a link may not contain the rank
        directory = source.with_location(file.parent)
        _refuse_part(
            directory,
            file.name,
            [each for each in directory.listing() if each.endswith(WEIGHT_SUFFIXES)],
            _with_known_shapes(file, shapes, read_shapes),
            metadata,
            are_directories=False,
            subject=source.location / name,
        )


def refuse_part_directory(
    source: Source, shapes: Shapes, read_shapes: ShapeReader, metadata: Mapping[str, Any]
) -> None:
    """Refuse a directory that is one rank's part of a checkpoint, or is inside of one.

    Args:
        source: The directory of a checkpoint.
        shapes: The shapes of its tensors.
        read_shapes: Reads the shapes of the tensors in its sibling directories.
        metadata: See `refuse_part_file`.

    Raises:
        UnsupportedError: It is a part.
    """
    for absolute in source.absolute_locations():
        _refuse_part_at(source, absolute, shapes, read_shapes, metadata)


def _refuse_part_at(
    source: Source, location: Location, shapes: Shapes, read_shapes: ShapeReader, metadata: Mapping[str, Any]
) -> None:
    """Refuse a directory because of its own name or of parent directories named after ranks."""
    directory, inner_path, level = location, "", 0
    while directory.name and (not level or (has_only_ranks(directory.name) and level < _MAX_RANK_LEVELS)):
        if may_be_part(directory.name):
            parent = source.with_location(directory.parent)
            config = read_config(source.with_location(location), parent) or {}
            _refuse_part(
                parent,
                directory.name,
                parent.listing().directories(),
                _with_known_shapes(directory, shapes, _subdirectory_reader(inner_path, read_shapes)),
                {**metadata, **config},
                are_directories=True,
                subject=source.location,
            )
        directory, inner_path, level = directory.parent, _join_path(directory.name, inner_path), level + 1


def _subdirectory_reader(inner_path: str, read_shapes: ShapeReader) -> ShapeReader:
    """Return a function that reads the shapes of the tensors in the subdirectory `inner_path` of a directory."""
    return lambda location: read_shapes(location / inner_path if inner_path else location)


def _with_known_shapes(known_location: Location, shapes: Shapes, read_shapes: ShapeReader) -> ShapeReader:
    """Return a function like `read_shapes` that returns known shapes for one location without opening it."""
    return lambda location: shapes if location == known_location else read_shapes(location)


def _refuse_part(
    directory: Source,
    name: str,
    names: Sequence[str],
    read_shapes: ShapeReader,
    metadata: Mapping[str, Any],
    *,
    are_directories: bool,
    subject: Location,
) -> None:
    """Refuse a file or directory that is one rank's part of a checkpoint.

    Args:
        directory: The directory that contains it.
        name: Its name.
        names: Names of all weight files, or of all subdirectories, in `directory`.
        read_shapes: Reads the shapes of the tensors in one of them.
        metadata: Metadata of its header or config, which may contain a world size.
        are_directories: True if the names are those of directories.
        subject: Location that the user passed, the subject of the error.

    Raises:
        UnsupportedError: It is a part.
    """
    group = group_of(name, names, directories=are_directories)
    if group is not None and group.kind != "n_of_m":
        if _are_parts(directory, group, name, read_shapes, are_directories):
            others = [each for each in group.names if each != name]
            raise UnsupportedError(
                f"{subject}: is one rank's part of a checkpoint, together with {_list_names(others)}, and nothing "
                f"records how its tensors are sharded; {_NEXT_STEP}"
            )
        return
    world_size = world_size_from_name(name) or _recorded_world_size(metadata)
    path = directory.location / name
    if (
        has_rank(name)
        and world_size > 1
        and not _is_whole_model(read_shapes(path), read_config(directory.with_location(path), directory))
    ):
        raise UnsupportedError(
            f"{subject}: is one rank's part of a checkpoint, {counted(world_size - 1, 'part')} of {world_size} "
            f"{'is' if world_size == 2 else 'are'} missing, and nothing records how its tensors are sharded; "
            f"{_NEXT_STEP}"
        )


def _parts_error(where: Location, group: NameGroup) -> UnsupportedError:
    """Return the error for a directory that contains a group of parts."""
    if group.kind == "n_of_m":
        return UnsupportedError(
            f"{where}: {_list_names(group.names)} are files of one checkpoint, but the index that lists their tensors "
            "is missing; copy or download model.safetensors.index.json, too"
        )
    return UnsupportedError(
        f"{where}: {_list_names(group.names)} are parts of one checkpoint, one per rank, and nothing records how their "
        f"tensors are sharded; {_NEXT_STEP}"
    )


def _part_groups(
    directory: Source, names: Sequence[str], read_shapes: ShapeReader, *, are_directories: bool
) -> list[NameGroup]:
    """Return the groups among the names in one directory whose members are parts of one checkpoint."""
    groups: list[NameGroup] = []
    seen: set[str] = set()
    for name in names:
        group = None if name in seen else group_of(name, names, directories=are_directories)
        if group is None:
            continue
        seen.update(group.names)
        if _are_parts(directory, group, name, read_shapes, are_directories):
            groups.append(group)
    return groups


def read_config(*directories: Source) -> dict[str, Any] | None:
    """Return the first config.json that is a JSON object, or None; faults are reported where the config is used."""
    for directory in directories:
        try:
            text = directory.read_small("config.json", MAX_CONFIG_BYTES).decode("utf-8")
            found = parse_json(text, directory.location / "config.json")
        except (CkptxError, UnicodeDecodeError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _are_parts(directory: Source, group: NameGroup, name: str, read_shapes: ShapeReader, are_directories: bool) -> bool:
    """Decide whether the members of a group are parts of one checkpoint; `name` is one of them."""
    if group.kind == "n_of_m":
        return True
    root = directory.location
    config = read_config(directory.with_location(root / name), directory) if are_directories else read_config(directory)
    if group.kind == "rank":
        is_first_valid = group.first == 0 or (group.first == 1 and "shard" in name.lower())
        if not is_first_valid or (
            are_directories and sum(_has_weights(directory.with_location(root / each)) for each in group.names) < 2
        ):
            return False
        if config is None or not _is_whole_model(read_shapes(root / name), config):
            return True
        return _has_disjoint_parts(directory, group, name, read_shapes)
    if group.first > 1 or not group.is_gapless:
        return False
    shapes = read_shapes(root / name)
    if shapes is None:
        return False
    if not _is_whole_model(shapes, config):
        others = (read_shapes(root / each) for each in _some_others(group, name))
        if any(shapes.keys() & other.keys() for other in others if other is not None):
            return group.first == 0
    return _has_disjoint_parts(directory, group, name, read_shapes)


def _some_others(group: NameGroup, name: str) -> list[str]:
    return [each for each in group.names if each != name][:_MAX_OPENED]


def _has_disjoint_parts(directory: Source, group: NameGroup, name: str, read_shapes: ShapeReader) -> bool:
    """Return True if the member `name` has layers of the same model as another, but no tensor in common with it.

    Such a part may pass the check for a whole model: it can have a tensor of every layer and all sizes in the config.
    Two whole models have names in common.
    """
    shapes = read_shapes(directory.location / name)
    if shapes is None:
        return False
    for each in _some_others(group, name):
        others = read_shapes(directory.location / each)
        if others is not None and not shapes.keys() & others.keys() and _modules(shapes) & _modules(others):
            return True
    return False


def _modules(names: Iterable[str]) -> set[str]:
    """Return the first two components of tensor names ("model.layers"): parts of one model have some in common."""
    return {".".join(pattern_of(name).split(".")[:2]) for name in names}


def _has_weights(source: Source) -> bool:
    """Return True if the directory or a subdirectory contains a weight file; links to directories are not followed."""
    try:
        return _lists_weights(source.listing(), _MAX_DEPTH)
    except StorageFailure:
        raise
    except InputError:
        return False  # not a directory, not accessible, or with too many names


def _lists_weights(listing: Listing, depth: int) -> bool:
    """Return True if a listing has a weight file, or one of its subdirectories has, down to `depth` levels."""
    directories = listing.directories()
    if any(name.endswith((*WEIGHT_SUFFIXES, ".distcp")) for name in listing.names - set(directories)):
        return True
    inner = [name for name in directories if not listing.is_link(name)]
    for name in inner[:_MAX_SEARCHED] if depth else ():
        try:
            if _lists_weights(listing.subdirectory(name), depth - 1):
                return True
        except StorageFailure:
            raise
        except InputError:
            continue
    return False


def _list_names(names: Sequence[str]) -> str:
    shown = names[:_MAX_LISTED] if len(names) > _MAX_LISTED + 1 else names
    rest = len(names) - len(shown)
    if rest:
        return f"{', '.join(shown)} and {rest} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _recorded_world_size(metadata: Mapping[str, Any]) -> int:
    """Return the largest world size in the metadata of a file or config; 1 if none is recorded."""
    mapping = metadata.get("mapping")  # in the config.json of TensorRT-LLM
    blocks = [metadata, mapping if isinstance(mapping, Mapping) else {}]
    values = [str(block.get(key)) for block in blocks for key in _WORLD_SIZE_KEYS]
    return max((int(value) for value in values if re.fullmatch(r"\d{1,6}", value, re.ASCII)), default=1)


_LAYER_NAME = re.compile(r"(.*?\.)(\d+)\.")


def _is_whole_model(shapes: Shapes | None, config: Mapping[str, Any] | None) -> bool:
    """Return True if tensors have all sizes of a config: vocabulary, widths, heads, layers and experts.

    False also if there are no shapes or no config, or if the config lacks vocabulary size, width or number of layers.
    """
    if shapes is None or config is None:
        return False
    nested = config.get("text_config")
    values = {**config, **(nested if isinstance(nested, Mapping) else {})}
    vocab_size = _config_size(values, "vocab_size", "n_vocab")
    width = _config_size(values, "hidden_size", "n_embd", "d_model", "dim")
    layers = _config_size(values, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if not (vocab_size and width and layers):
        return False
    matrices: set[Shape] = {shape for shape in shapes.values() if len(shape) == 2}
    has_vocabulary = any(shape[0] >= vocab_size and shape[1] == width for shape in matrices)
    has_norms = any(shape == (width,) for shape in shapes.values())
    if not (has_vocabulary and has_norms and _count_layers(shapes) >= layers):
        return False
    return _has_heads(matrices, width, values) and _has_feed_forward(shapes, matrices, width, values)


def _config_size(values: Mapping[str, Any], *keys: str) -> int:
    """Return the value of the first key with a positive integer; 0 if there is none."""
    return next((values[key] for key in keys if type(values.get(key)) is int and values[key] > 0), 0)


def _count_layers(names: Iterable[str]) -> int:
    """Return the number of layers in the longest list of layers."""
    stacks: dict[str, set[str]] = {}
    for name in names:
        found = _LAYER_NAME.match(name)
        if found is not None:
            stacks.setdefault(found[1], set()).add(found[2])
    return max(map(len, stacks.values()), default=0)


def _has_heads(matrices: set[Shape], width: int, values: Mapping[str, Any]) -> bool:
    """Return True if the attention output projection has the width of all heads, or if the config does not state it."""
    heads = _config_size(values, "num_attention_heads", "n_head", "num_heads")
    if not heads or "kv_lora_rank" in values:
        return True
    heads_width = heads * (_config_size(values, "head_dim") or width // heads)
    return (width, heads_width) in matrices or (heads_width, width) in matrices


def _has_feed_forward(shapes: Shapes, matrices: set[Shape], width: int, values: Mapping[str, Any]) -> bool:
    """Return True if all experts are present, or the up and down projections of the MLP at full width.

    True also if the config has neither a number of experts nor a width of the MLP.
    """
    experts = _config_size(values, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if experts:
        found = {match[1] for name in shapes if (match := re.search(r"\.experts\.(\d+)\.", name))}
        return len(found) >= experts or any(len(shape) == 3 and shape[0] == experts for shape in shapes.values())
    inner = _config_size(values, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size")
    return not inner or ((width, inner) in matrices and not matrices.isdisjoint({(inner, width), (2 * inner, width)}))
