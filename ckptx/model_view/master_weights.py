"""`--weights masters`: the fp32 master weights of the optimizer in place of the 16-bit weights of the model.

They are tensors of the optimizer state with the name of a parameter and the suffix `master_param`: DeepSpeed's ZeRO
stages 1 and 2, and optimizers that store them themselves, such as FusedAdam of Transformer Engine and apex.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InputError
from ckptx.mapping.state_names import ParameterIndex
from ckptx.model_view.parameter_count import tie_representatives
from ckptx.model_view.view import ModelView, decide_ties, locate_archives
from ckptx.storage.interface import SourceFiles
from ckptx.wording import counted, first_of

_SUFFIX = ".master_param"


@dataclass(frozen=True, slots=True)
class MasterWeights:
    """A model whose weights are the masters of its optimizer.

    Attributes:
        view: View of the model; the entry of a weight that has a master has the dtype and bytes of the master.
        masters: Stored name of each such weight -> stored name of its master.
    """

    view: ModelView
    masters: dict[str, str]


def has_master_weights(view: ModelView) -> bool:
    """Return True if the optimizer state of the checkpoint contains master weights."""
    return any(name.endswith(_SUFFIX) for name in view.optimizer)


def use_master_weights(view: ModelView, files: SourceFiles, *, tie_missing: bool = False) -> MasterWeights:
    """Replace each weight by its master in the optimizer state; frozen weights and buffers have none.

    A name that is tied to a weight with a master, or stored in the same bytes of a file, gets the same master.

    Args:
        view: View of the model.
        files: Files of the checkpoint; tied weights that are stored twice are read and compared.
        tie_missing: True to tie a missing output head to the embedding even if the config does not.

    Raises:
        InputError: There are no masters, a master belongs to no weight or to a weight of another shape, or a weight has
            two masters.
    """
    masters = _find_masters(view)
    decisions = decide_ties(locate_archives(view, files), files, tie_missing=tie_missing, accepted_problems=[])
    representatives = tie_representatives(decisions)
    by_position = {view.tensors[name].position: master for name, master in masters.items() if master.numel}
    by_representative = {representatives[name]: masters[name] for name in masters.keys() & representatives.keys()}
    tensors: dict[str, TensorEntry] = {}
    masters_by_stored_name: dict[str, str] = {}
    for name, weight in view.tensors.items():
        master = masters.get(name) or by_representative.get(representatives.get(name, ""))
        if master is None and weight.numel:
            master = by_position.get(weight.position)
        if master is not None and master.shape == weight.shape:
            masters_by_stored_name[weight.name] = master.name
            weight = master.with_name(weight.name)
        tensors[name] = weight
    used = set(masters_by_stored_name.values())
    stored = {name: entry for name, entry in view.catalog.tensors.items() if name not in used}
    stored.update((entry.name, entry) for entry in tensors.values())
    note = f"weights: {counted(len(masters_by_stored_name), 'fp32 master weight')} of the optimizer"
    unchanged = [entry.name for entry in tensors.values() if entry.name not in masters_by_stored_name]
    if unchanged:
        note += f"; {counted(len(unchanged), 'tensor')} without one as stored, {first_of(unchanged)}"
    changed = replace(
        view,
        catalog=replace(view.catalog, tensors=stored),
        tensors=tensors,
        optimizer=tuple(name for name in view.optimizer if name not in used),
        notes=(*view.notes, note),
    )
    return MasterWeights(changed, masters_by_stored_name)


def _find_masters(view: ModelView) -> dict[str, TensorEntry]:
    """Return the master of each weight that has one, by the name of the weight in the view.

    Raises:
        InputError: See `use_master_weights`.
    """
    root = view.catalog.location
    stored = [name for name in view.optimizer if name.endswith(_SUFFIX)]
    if not stored:
        stage_3 = " (of ZeRO stage 3, the weights themselves are the masters)"
        raise InputError(
            f"{root}: --weights masters requires fp32 master weights in the optimizer state, under names that end with "
            f"{_SUFFIX}, and there are none{stage_3 if view.catalog.traits.name == 'deepspeed' else ''}; leave out "
            "--weights"
        )
    index = ParameterIndex.of({name: entry.name for name, entry in view.tensors.items()}, view.prefix)
    masters: dict[str, TensorEntry] = {}
    for name in stored:
        master, state = view.catalog.tensors[name], index.find(name)
        if state is None or state.suffix != _SUFFIX:
            raise InputError(
                f'{root}: master weight "{name}" belongs to no tensor of the model; pass --source-prefix with the '
                "prefix of the model's tensor names, or leave out --weights"
            )
        weight = view.tensors[state.parameter]
        if master.shape != weight.shape:
            raise InputError(
                f'{root}: master weight "{name}" has shape {list(master.shape)}, but tensor "{weight.name}" has '
                f"{list(weight.shape)}; the checkpoint is damaged, or leave out --weights"
            )
        if masters.setdefault(state.parameter, master) is not master:
            raise InputError(
                f'{root}: tensor "{weight.name}" has two master weights, "{masters[state.parameter].name}" and '
                f'"{name}"; leave out --weights'
            )
    return masters
