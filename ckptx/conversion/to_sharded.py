"""`reshard` into sharded safetensors."""

from __future__ import annotations

from typing import Any

from ckptx.architecture.tied import TieDecision
from ckptx.conversion.config import Home
from ckptx.conversion.dtypes import cast, lossless_edits, quantization_edits
from ckptx.conversion.manifest import manifest_of
from ckptx.conversion.memory import kept_original, names_on_disk
from ckptx.conversion.meshed import cut_target, cutter_for, describe_ranks, unknown_names
from ckptx.conversion.names import respell
from ckptx.conversion.run import Conversion
from ckptx.conversion.target import share
from ckptx.conversion.to_huggingface import untie_edits
from ckptx.conversion.written import check_sharded
from ckptx.errors import InputError
from ckptx.formats.dcp.megatron import without_backend
from ckptx.formats.sharded import layout as sharded_safetensors_layout
from ckptx.publishing.publish import Job
from ckptx.transfer.planner import plan_copy


def to_sharded(run: Conversion, home: Home) -> None:
    """Carries out one conversion to sharded safetensors, with files of its own for each rank of the mesh.

    Loaders take these files by the names of the model and look for every tensor of it, so a tied name is stored, too.

    Raises:
        CkptxError: Whatever is in the way.
    """
    options, report, root = run.options, run.report, run.source.root
    view, decisions = run.view(home.config, options.prefix if run.source.format == "dcp" else None)
    run.note_wrappers(view)
    if not view.tensors:
        raise InputError(f"{root}: holds no model tensors; look at its names with `ckptx inspect --tensors`")
    if run.source.format == "dcp":
        run.drop_training_state(view, "does not fit into safetensors")
    original = kept_original(view, report.warnings)
    target = share(run, view, decisions, aliases_possible=True)
    if not target.holds(view.tensors):
        original = None
    spelling = respell(run, view, target, by_default="model", original=names_on_disk(original))
    was_cast = cast(run, view, target, home, spelling)
    cutter = cutter_for(run, view, spelling.rules, list(target.tensors), replicate=True)
    mesh = cut_target(run, target, cutter, unknown_names(view, target, spelling))
    layout = sharded_safetensors_layout.allocate(
        run.dst,
        ((entry, mesh.placed[name].stage, mesh.placed[name].blocks) for name, entry in target.tensors.items()),
        mesh.dims,
    )
    describe_ranks(
        run, layout.catalog.files, {name: int(name.split("-")[1]) - 1 for name in layout.catalog.files}, mesh.dims
    )
    plan = plan_copy(run.source, layout.catalog, target.origin, prologues=layout.prologues, groups=layout.groups)
    edits = lossless_edits(run, view, target, home, spelling, was_cast=was_cast)
    edits += quantization_edits(run, view, target)
    edits += untie_edits(run, view, home.config, decisions)
    _warn_of_forced_ties(run, decisions, edits)
    beside = home.base or run.source
    job = Job(
        plan,
        run.source,
        run.carry(beside.root, without_backend(beside.root, beside.sidecars), edits),
        options.fingerprint(),
        lambda outcome: manifest_of(
            "sharded",
            layout.catalog,
            outcome.digests,
            copies=target.copies,
            original=None if was_cast else original,
            mesh=mesh,
        ),
        check=lambda tree, _: check_sharded(tree, layout.catalog),
    )
    run.execute(job, target.written())


def _warn_of_forced_ties(run: Conversion, decisions: list[TieDecision], edits: list[dict[str, Any]]) -> None:
    """Says where transformers would give one tensor the values of another.

    Its loader of this form fills the parameters of a model that is tied by then, and never looks whether they differ.
    """
    forced = [each for each in decisions if each.declared and each.action == "keep-both"]
    if forced and not any(edit["key"].endswith("tie_word_embeddings") for edit in edits):
        run.report.warnings.append(
            f'"{forced[0].target}" and "{forced[0].source}" differ, but the class always ties them: from_pretrained '
            "takes one for the other when it loads sharded safetensors; give it the HF form, torch's reader this one"
        )
