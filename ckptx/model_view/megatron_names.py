"""View a checkpoint with Megatron's names as one with disk names, those of the files on the Hub.

    decoder.layers.mlp.linear_fc1.weight [L, 2 F, H]  ->  model.layers.0.mlp.gate_proj.weight [F, H]
                                                          model.layers.0.mlp.up_proj.weight   [F, H]
                                                          ...

The entries of the result refer to the same bytes, so everything after this step sees an ordinary checkpoint. Moments
(Adam's `exp_avg` and `exp_avg_sq`) and fp32 master weights that have the shape of their parameter, which Megatron saves
as `fully_reshardable`, are mapped along with it if the output keeps them:

    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight  ->  optimizer.state.model.layers.0....exp_avg

Other moments are in the order of communication buffers, which no other program can use; they are left out and listed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from ckptx.architecture.trainer_naming import megatron
from ckptx.architecture.trainer_naming.megatron_prefixes import LAYERS, find_prefixes
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Chunk, TensorEntry
from ckptx.catalog.region import full_region
from ckptx.errors import CkptxError, EnvironmentProblem, InputError, ReadError, UnsupportedError
from ckptx.formats.dcp.megatron import BACKEND_FILE, COMMON_FILE, NAMES_NOTE
from ckptx.formats.dcp.megatron_common import CommonState, read_common_state
from ckptx.formats.dcp.megatron_run_config import read_run_config
from ckptx.mapping.name_index import indices_of
from ckptx.mapping.names import is_optimizer, is_trainer_state
from ckptx.mapping.ops import Conversion
from ckptx.mapping.rewrite import unmerge
from ckptx.mapping.rules import TrainerRules
from ckptx.model_view.megatron_arguments import MEGATRON_BRIDGE, MEGATRON_LM, check_arguments
from ckptx.storage.interface import SourceFiles
from ckptx.wording import counted

T = TypeVar("T")

# Names of state next to the model. Megatron numbers the optimizers of dense and of expert parameters: `chained_0.`.
_CHAINED_OPTIMIZER = re.compile(r"chained_\d+\.")
_MOMENT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param)\.")
# Megatron's kind of optimizer state -> its name in a DCP, as the torch optimizers and the readers of ckptx name it.
_MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master_param"}
STEP_FILE = "optimizer step"  # name of a file that exists in memory only: the step as a little-endian float32
_EXTRA_STATE = re.compile(r"\._extra_state(/|$)")  # TransformerEngine's state of fp8 scaling
_OTHER_ROOTS = frozenset({"rng_state", "rerun_state_machine_state", "opt_param_scheduler", "common_state"})


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A checkpoint of Megatron under disk names.

    Attributes:
        catalog: Catalog with the tensors of the model under disk names, and with optimizer state if `has_optimizer` is
            set. Every chunk is located, or refers to no file if only names and shapes were needed.
        stored_names: Name in `catalog` -> stored names of the tensors that it is made of; empty for a computed step.
        dropped: Stored `name` and `reason` of each tensor that is not in `catalog`.
        optimizer: Stored names of the optimizer tensors in `dropped`.
        conversions: Conversions from Megatron's names, with an index for each layer, to disk names.
        notes: Notes for the user.
        has_optimizer: True if `catalog` has optimizer state as well.
        step_contents: Contents of `STEP_FILE`, to which the steps in `catalog` refer; empty without a step.
    """

    catalog: Catalog
    stored_names: Mapping[str, tuple[str, ...]]
    dropped: tuple[dict[str, str], ...]
    optimizer: tuple[str, ...]
    conversions: tuple[Conversion, ...]
    notes: tuple[str, ...]
    has_optimizer: bool = False
    step_contents: bytes = b""


def map_megatron_names(
    catalog: Catalog, config: Mapping[str, Any] | None, files: SourceFiles | None, *, with_optimizer: bool = False
) -> MegatronModel | None:
    """Return a checkpoint with Megatron's names under disk names.

    Args:
        catalog: Catalog of the checkpoint.
        config: Contents of `config.json` of the model; None without one.
        files: Open files of the checkpoint. None if only names and shapes are needed: then chunks refer to no file,
            and the arguments of the training run are not compared with the config.
        with_optimizer: True to map the moments and fp32 masters, too; those in the order of buffers are dropped.

    Returns:
        The model; None if the names are not Megatron's, or if there is no config or it names no class.

    Raises:
        InputError: Tensors do not match each other or the config, or the training run had other heads than the config.
        UnsupportedError: The checkpoint has several models, the Megatron names of the class are unknown, a tensor has
            no counterpart, or see `check_arguments`.
        ReadError: The storage failed.
    """
    prefixes = find_prefixes(catalog.tensors)
    class_names = (config or {}).get("architectures")
    if not prefixes or config is None or not isinstance(class_names, list) or not class_names:
        return None
    if len(prefixes) > 1:
        raise UnsupportedError(
            f"{catalog.location}: holds {len(prefixes)} Megatron models, under "
            f"{', '.join(map(repr, prefixes[:8]))}; save "
            "one of them to a checkpoint of its own"
        )
    class_name = str(class_names[0])
    mapping = _Mapping(catalog, config, class_name, megatron.conversions(class_name, config), files)
    common, run_notes = (None, []) if files is None else _read_training_run(catalog, config, files)
    stored, moments, dropped = _split_names(catalog, prefixes[0])
    if not with_optimizer:
        reason = "optimizer state, in the layout of Megatron's parameters"
        dropped += [{"name": name, "reason": reason} for names in moments.values() for name in names]
        moments = {}
    renamed = mapping.rename(stored)
    tensors, stored_names = dict(renamed.tensors), dict(renamed.stored_names)
    for copy, original in _mtp_copies(renamed.tensors, class_name, config).items():
        tensors[copy], stored_names[copy] = tensors[original].with_name(copy), stored_names[original]
    names = sorted(tensors, key=_order)
    state, step_contents, state_notes = _rename_moments(mapping, moments, renamed.tensors, common)
    stored_names |= state.stored_names
    mapped = replace(
        catalog,
        tensors={**{name: tensors[name] for name in names}, **state.tensors},
        objects={},
        planner_data=None,
        parts=(),
        verbatim={},
        sidecars=tuple(each for each in catalog.sidecars if each.name not in (BACKEND_FILE, COMMON_FILE)),
        notes=[note for note in catalog.notes if note != NAMES_NOTE],
    )
    left_out = tuple(each["name"] for each in dropped if each["reason"].startswith("optimizer"))
    notes = _notes(catalog, stored, prefixes[0], class_name, config, left_out)
    return MegatronModel(
        mapped, stored_names, tuple(dropped), left_out, mapping.conversions, (*notes, *state_notes, *run_notes),
        bool(state.tensors), step_contents,
    )  # fmt: skip


class _RenamedTensors(NamedTuple):
    """Tensors by disk name, and the stored names of the tensors that each is made of."""

    tensors: dict[str, TensorEntry]
    stored_names: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Renames tensors that have Megatron's names and layout: those of the model, or those of one kind of moment.

    Attributes:
        catalog: Catalog of the checkpoint.
        config: Contents of `config.json`.
        class_name: Name of the class.
        conversions: Conversions from Megatron's names to disk names.
        files: Files of the checkpoint; None if only names and shapes are needed.
    """

    catalog: Catalog
    config: Mapping[str, Any]
    class_name: str
    conversions: tuple[Conversion, ...]
    files: SourceFiles | None

    def rename(self, stored: Mapping[str, str]) -> _RenamedTensors:
        """Return tensors under disk names.

        Args:
            stored: Stored name -> Megatron's name without prefix.

        Raises:
            InputError: Tensors do not match each other or the config, or are stored twice.
            UnsupportedError: A tensor has no counterpart.
        """
        location = self.catalog.location
        second_names = _second_names(self.catalog, stored)
        first_names = {name: short for name, short in stored.items() if name not in second_names}
        entries = _locate(self.catalog, first_names, self.files)
        layer_count = megatron.read_size(self.config, "num_hidden_layers")
        layers: dict[str, TensorEntry] = {}
        stored_name_by_layer_name: dict[str, str] = {}
        for stored_name, name in first_names.items():
            for layer_name, entry in _unstack(name, entries[stored_name], layer_count):
                if layer_name in layers:
                    raise InputError(
                        f'{location}: tensors "{stored_name_by_layer_name[layer_name]}" and "{stored_name}" both hold '
                        f'"{layer_name}"; remove one of them'
                    )
                layers[layer_name] = entry.with_name(layer_name)
                stored_name_by_layer_name[layer_name] = stored_name
        renamed = TrainerRules(self.conversions).from_trainer(layers)
        if renamed.unknown:
            raise UnsupportedError(
                f'{location}: tensor "{stored_name_by_layer_name[renamed.unknown[0]]}" has no counterpart in '
                f"{self.class_name}; pass --base PATH with the config it was trained with, or --base none to keep the "
                "names"
            )
        all_names = {name: [name] for name in first_names}
        for second, first in second_names.items():
            all_names[first].append(second)
        stored_names = {
            name: tuple(
                dict.fromkeys(
                    each for layer_name in layer_names for each in all_names[stored_name_by_layer_name[layer_name]]
                )
            )
            for name, layer_names in renamed.sources.items()
        }
        return _RenamedTensors(renamed.tensors, stored_names)


def _read_training_run(
    catalog: Catalog, config: Mapping[str, Any], files: SourceFiles
) -> tuple[CommonState | None, list[str]]:
    """Return the common state, None if there is none or it cannot be read, and notes on what differs from the config.

    Args:
        catalog: Catalog of the checkpoint.
        config: Contents of `config.json`.
        files: Files of the checkpoint.

    Raises:
        InputError, UnsupportedError: See `check_arguments`.
        ReadError: The storage failed.
    """
    notes: list[str] = []
    common = _read_or_note(read_common_state, catalog, files, notes)
    arguments = None if common is None else common.arguments()
    if common is not None and arguments is not None:
        notes += check_arguments(arguments, common.where, config, MEGATRON_LM)
    run_config = _read_or_note(read_run_config, catalog, files, notes)
    if run_config is not None:
        notes += run_config.notes
        notes += check_arguments(run_config.values, run_config.where, config, MEGATRON_BRIDGE)
    return common, notes


def _read_or_note(
    read: Callable[[Catalog, SourceFiles], T | None], catalog: Catalog, files: SourceFiles, notes: list[str]
) -> T | None:
    """Return what a function reads; None, with a note, if it cannot be read."""
    try:
        return read(catalog, files)
    except ReadError:
        raise
    except (InputError, UnsupportedError, EnvironmentProblem) as error:
        notes.append(f"arguments of the training run not compared with config.json: {error}")
        return None


def _rename_moments(
    mapping: _Mapping,
    moments: Mapping[str, Mapping[str, str]],
    parameters: Mapping[str, TensorEntry],
    common: CommonState | None,
) -> tuple[_RenamedTensors, bytes, list[str]]:
    """Return the optimizer state under the names of a DCP, the contents of `STEP_FILE`, and notes.

    Args:
        mapping: Mapping of the tensors.
        moments: Megatron's kind of state -> stored name -> Megatron's name of the parameter.
        parameters: Parameters by disk name.
        common: Common state, which may record the step; None if it was not read.

    Raises:
        InputError: State has another shape than its parameter; see also `_Mapping.rename`.
        UnsupportedError: See `_Mapping.rename`.
    """
    state = _RenamedTensors({}, {})
    for kind, stored in moments.items():
        renamed = mapping.rename(stored)
        for parameter, entry in renamed.tensors.items():
            if parameter not in parameters or parameters[parameter].shape != entry.shape:
                raise InputError(
                    f'{mapping.catalog.location}: tensor "{renamed.stored_names[parameter][0]}" has other rows or '
                    f'columns than its parameter "{parameter}"; it is of another model, pass --optimizer drop'
                )
            name = f"optimizer.state.{parameter}.{_MOMENTS[kind]}"
            state.tensors[name] = entry.with_name(name)
            state.stored_names[name] = renamed.stored_names[parameter]
    if not state.tensors:
        return state, b"", []
    steps = set() if common is None else common.optimizer_steps()
    notes = [
        "optimizer settings are not read: learning rate, betas and other values of param_groups",
        *([] if len(steps) == 1 else ["optimizer state without its step, which the checkpoint does not record once"]),
    ]
    if len(steps) != 1:
        return state, b"", notes
    contents = struct.pack("<f", steps.pop())
    chunk = Chunk(full_region(()), STEP_FILE, 0, len(contents))
    for parameter in dict.fromkeys(name.removeprefix("optimizer.state.").rpartition(".")[0] for name in state.tensors):
        name = f"optimizer.state.{parameter}.step"
        state.tensors[name] = TensorEntry(name, DTYPES_BY_NAME["F32"], (), (chunk,))
        state.stored_names[name] = ()
    return state, contents, notes


def _mtp_copies(names: Collection[str], class_name: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return disk name -> disk name of the original, for tensors that Megatron's MTP layers share with the model.

    Only MTP layers that the checkpoint has count; `names` are the disk names of its tensors.
    """
    return {
        name: original
        for name, original in megatron.mtp_copies(class_name, config).items()
        if original in names and f"model.layers.{indices_of(name)[0]}.eh_proj.weight" in names
    }


def with_disk_names(catalog: Catalog, config: Mapping[str, Any] | None) -> Catalog:
    """Return a checkpoint with Megatron's names under disk names; any other catalog as it is.

    Raises:
        InputError, UnsupportedError: See `map_megatron_names`.
    """
    if config is None or not find_prefixes(catalog.tensors):
        return catalog
    with catalog.source.open(catalog.identities) as files:
        model = map_megatron_names(catalog, config, files)
    return catalog if model is None else _with_state(catalog, model)


def with_disk_names_for_comparison(catalog: Catalog, other: Catalog, *, needs_bytes: bool) -> Catalog:
    """Return a checkpoint with Megatron's names under disk names.

    If its names cannot be mapped, it keeps them, with a note.

    Args:
        catalog: The checkpoint.
        other: The one that it is compared with, whose config is used if it has none.
        needs_bytes: True to locate the chunks of the tensors, so that they can be read; False if only names and shapes
            are compared.

    Raises:
        ReadError: The storage failed.
    """
    config = catalog.config or other.config
    try:
        if needs_bytes:
            return with_disk_names(catalog, config)
        model = map_megatron_names(catalog, config, None)
        return catalog if model is None else _with_state(catalog, model)
    except ReadError:
        raise
    except CkptxError as error:
        return replace(catalog, notes=[*catalog.notes, f"Megatron's names kept: {error}"])


def _with_state(catalog: Catalog, model: MegatronModel) -> Catalog:
    """Return the model together with the state that is not mapped, which commands list as not compared or not used.

    State whose name does not show that it is training state gets the prefix `optimizer.`. For a format that is no
    training format, no state is added, because every tensor in it counts as one of the model.
    """
    state = (
        {}
        if not catalog.traits.is_training_format
        else {
            name if is_optimizer(name) or is_trainer_state(name) else f"optimizer.{name}": catalog.tensors[name]
            for name in (each["name"] for each in model.dropped)
            if not _EXTRA_STATE.search(name)
        }
    )
    return replace(
        model.catalog,
        tensors={**model.catalog.tensors, **{name: entry.with_name(name) for name, entry in state.items()}},
        objects={name: entry for name, entry in catalog.objects.items() if not _EXTRA_STATE.search(name)},
        notes=[*model.catalog.notes, *model.notes],
    )


def _split_names(
    catalog: Catalog, prefix: str
) -> tuple[dict[str, str], dict[str, dict[str, str]], list[dict[str, str]]]:
    """Return the tensors of the model, those of the optimizer that can be mapped, and all others as dropped.

    Args:
        catalog: Catalog of the checkpoint.
        prefix: Prefix of the model, see `find_prefixes`.

    Returns:
        Stored name -> Megatron's name without prefix for the model; the same (the name of the parameter) for each of
        Megatron's kinds of optimizer state, by kind; and `MegatronModel.dropped`.

    Raises:
        UnsupportedError: A tensor is neither in the model nor training state.
    """
    stored: dict[str, str] = {}
    moments: dict[str, dict[str, str]] = {}
    dropped = []
    for name in catalog.tensors:
        moment = _MOMENT.match(name)
        if moment is not None and name.startswith(prefix, moment.end()) and not _EXTRA_STATE.search(name):
            moments.setdefault(moment[1], {})[name] = name[moment.end() + len(prefix) :]
        elif is_optimizer(name) or _CHAINED_OPTIMIZER.match(name):
            dropped.append({"name": name, "reason": "optimizer state in the order of Megatron's buffers, not mapped"})
        elif is_trainer_state(name) or name.partition(".")[0].partition("/")[0] in _OTHER_ROOTS:
            dropped.append({"name": name, "reason": "training state of Megatron, not mapped"})
        elif _EXTRA_STATE.search(name):
            dropped.append({"name": name, "reason": "_extra_state of TransformerEngine"})
        elif name.startswith(prefix):
            stored[name] = name.removeprefix(prefix)
        else:
            raise UnsupportedError(
                f'{catalog.location}: tensor "{name}" is outside of the Megatron model under "{prefix}", so it '
                "cannot be "
                "mapped; pass --base none to keep the names"
            )
    return stored, moments, dropped


def _second_names(catalog: Catalog, names: Iterable[str]) -> dict[str, str]:
    """Return stored name -> earlier stored name of the same bytes, for norms before experts that have two names."""
    first_by_position: dict[tuple[object, ...], str] = {}
    second_names = {}
    for name in names:
        if name.endswith((f".{megatron.EXPERT_NORM}", f".{megatron.MLP_NORM}")):
            entry = catalog.tensors[name]
            first = first_by_position.setdefault((entry.position, entry.dtype, entry.shape), name)
            if first != name:
                second_names[name] = first
    return second_names


def _locate(catalog: Catalog, names: Mapping[str, str], files: SourceFiles | None) -> dict[str, TensorEntry]:
    """Return the entries of these stored names with every chunk located.

    If `files` is None, each gets one made-up chunk that refers to no file.
    """
    entries = {name: catalog.tensors[name] for name in names}
    if files is None:
        return {
            name: entry._replace(chunks=(Chunk(full_region(entry.shape), name, 0, entry.nbytes),), replicas=())
            for name, entry in entries.items()
        }
    if not catalog.traits.has_archives:
        return entries
    from ckptx.formats.dcp.reader import locate_payloads

    return locate_payloads(replace(catalog, tensors=entries), files).tensors


def _unstack(name: str, entry: TensorEntry, layer_count: int) -> Iterator[tuple[str, TensorEntry]]:
    """Yield a tensor of all layers as one for each layer, with its name; other tensors unchanged.

    Args:
        name: Megatron's name of the tensor without prefix.
        entry: The tensor.
        layer_count: Number of layers in the config.

    Raises:
        InputError: The tensor has another number of layers.
    """
    suffix = megatron.layer_suffix(name)
    if suffix is None:
        yield name, entry
        return
    if not entry.shape or entry.shape[0] != layer_count:
        raise InputError(
            f'tensor "{entry.name}": shape {list(entry.shape)} holds {entry.shape[0] if entry.shape else 0} layers, '
            f"but config.json has num_hidden_layers {layer_count}; pass --base PATH with the config it was trained with"
        )
    for index, layer in enumerate(unmerge(entry, 0)):
        yield f"{LAYERS}.{index}.{suffix}", layer


def _order(name: str) -> tuple[int, ...]:
    """Return a sort key for disk names: embedding, then layers and their experts by index, then norm and head."""
    indices = indices_of(name)
    if indices:
        return (1, *indices)
    return (0,) if "embed" in name else (2,)


def _notes(
    catalog: Catalog,
    stored: Mapping[str, str],
    prefix: str,
    class_name: str,
    config: Mapping[str, Any],
    optimizer: tuple[str, ...],
) -> Iterator[str]:
    """Yield the notes on what the mapping did besides renaming."""
    of_prefix = f' under "{prefix}"' if prefix else ""
    yield f"Megatron's names{of_prefix} mapped to those of {class_name}"
    vocab_size = megatron.read_size(config, "vocab_size")
    padded = {
        name: catalog.tensors[name].shape[0] - vocab_size
        for name, short in stored.items()
        if short in megatron.VOCABULARY
    }
    for rows in sorted({rows for rows in padded.values() if rows}):
        names = [name for name, each in padded.items() if each == rows]
        yield f"vocabulary padding: {counted(rows, 'row')} after vocab_size {vocab_size} left out of {', '.join(names)}"
    if optimizer:
        yield f"optimizer state left out: {counted(len(optimizer), 'tensor')}"
    extra_states = sum(_EXTRA_STATE.search(name) is not None for name in catalog.objects)
    if extra_states:
        yield f"_extra_state of TransformerEngine left out: {counted(extra_states, 'object')}"
