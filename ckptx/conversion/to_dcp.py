"""`convert hf2dcp`, and `reshard` into a DCP."""

from __future__ import annotations

from ckptx.conversion.config import Home
from ckptx.conversion.dcp_output import DcpContents, DcpOutput, lay_out
from ckptx.conversion.dtypes import cast, quantization_edits
from ckptx.conversion.manifest import manifest_of
from ckptx.conversion.memory import kept_original, names_on_disk
from ckptx.conversion.meshed import cut_target, cutter_for, describe_ranks, unknown_names
from ckptx.conversion.names import Spelling, respell
from ckptx.conversion.run import Conversion
from ckptx.conversion.target import Target, share
from ckptx.conversion.training_state import TrainingState, carry_state
from ckptx.conversion.written import check_dcp
from ckptx.cutting import Mesh
from ckptx.formats.dcp import layout as dcp_layout
from ckptx.formats.dcp.reader import METADATA
from ckptx.formats.torch_archive.archive import archive_frame
from ckptx.mapping.config import dtype_edits
from ckptx.publishing.publish import Job
from ckptx.transfer.planner import plan_copy
from ckptx.view import ModelView, locate_all


def to_dcp(run: Conversion, home: Home, *, cut: bool) -> None:
    """Carries out one conversion to DCP.

    Args:
        run: The conversion.
        home: Whose tensors they are.
        cut: Give each rank of the mesh its own files; otherwise tensors stay whole and files are balanced.

    Raises:
        CkptxError: Whatever is in the way.
    """
    options, report, root = run.options, run.report, run.source.root
    is_dcp = run.source.format == "dcp"
    view, decisions = run.view(home.config, options.prefix if is_dcp else None)
    if view.config is None and options.base != "none":
        report.warnings.append("no config.json: tied names are unknown, every tensor is converted as it is")
    original = kept_original(view, report.warnings)
    keeps_state = is_dcp and options.optimizer != "drop"
    if keeps_state:
        locate_all(view, run.files, later=not options.dry_run)
        run.source = view.catalog
    elif is_dcp:
        run.drop_training_state(view, "dropped as asked")
    target = share(run, view, decisions, aliases_possible=True)
    if not target.holds(view.tensors):
        original = None
    default = "disk" if run.source.format == "sharded" else None
    spelling = respell(run, view, target, by_default=default, original=names_on_disk(original))
    was_cast = cast(run, view, target, home, spelling)
    outward = _outward(run, view, target, spelling)
    run.note_wrappers(view, kept=not spelling.sources)
    mesh = None
    if cut:
        cutter = cutter_for(run, view, spelling.rules, list(target.tensors), replicate=False)
        mesh = cut_target(run, target, cutter, unknown_names(view, target, spelling))
        mesh.placed = {outward[name]: placed for name, placed in mesh.placed.items()}
    target = target.renamed(outward.__getitem__)
    state = TrainingState()
    if keeps_state:
        state = carry_state(run, view, target, {old: outward[new] for old, new in spelling.renamed(view).items()}, mesh)
    report.aliases = {**target.aliases, **state.target.aliases}
    output = _lay_out(run, target, state, mesh)
    if mesh is not None:
        describe_ranks(run, output.catalog.files, output.ranks, mesh.dims)
    plan = plan_copy(
        run.source,
        output.catalog,
        {**target.origin, **state.target.origin, **state.object_origin},
        frame_of=archive_frame,
        groups=output.groups,
    )
    edits = dtype_edits(view.config, options.dtype) if was_cast else []
    edits += quantization_edits(run, view, target)
    if was_cast or (options.prefix and not is_dcp):
        original = None
    carried = (home.base or run.source).sidecars
    job = Job(
        plan,
        run.source,
        run.carry(home.base.root if home.base is not None else root, [sidecar.name for sidecar in carried], edits),
        options.fingerprint(),
        lambda outcome: manifest_of(
            "dcp",
            output.catalog,
            outcome.digests,
            aliases=report.aliases,
            copies={**target.copies, **state.target.copies},
            original=original,
            mesh=mesh,
            model_names=_model_names(spelling, outward),
        ),
        check=lambda tree, _: check_dcp(tree, output),
        markers=output.markers,
    )
    run.execute(job, target.written() | state.target.written())


def _outward(run: Conversion, view: ModelView, target: Target, spelling: Spelling) -> dict[str, str]:
    """The name in the output of each name of the target.

    A DCP keeps the names it has, wrappers and prefix too, as the trainer that wrote it looks for them; one that comes
    out of an HF checkpoint gets the prefix that was asked for.
    """
    names = [*target.tensors, *target.aliases]
    if run.source.format != "dcp":
        return {name: run.options.prefix + name if run.options.prefix else name for name in names}
    if spelling.sources:
        return {name: name for name in names}
    return {name: view.tensors[name].name if name in view.tensors else view.prefix + name for name in names}


def _lay_out(run: Conversion, target: Target, state: TrainingState, mesh: Mesh | None) -> DcpOutput:
    """Gives every block its place."""
    if mesh is None:
        assert not state.target.tensors
        catalog = dcp_layout.allocate(run.dst, target.tensors.values(), run.options.files)
        marker = (METADATA, dcp_layout.metadata_bytes(catalog, target.aliases))
        fqns = {name: name for name in catalog.tensors} | target.aliases
        return DcpOutput(catalog, [(name,) for name in catalog.files], [marker], {}, {METADATA: fqns})
    order = {name: at for at, name in enumerate(run.source.tensors)}
    origin = {**target.origin, **state.target.origin}
    cuts = [(entry, mesh.placed[name].stage, mesh.placed[name].blocks) for name, entry in target.tensors.items()]
    cuts += [(entry, *state.places[name]) for name, entry in state.target.tensors.items()]
    cuts.sort(key=lambda each: order[origin[each[0].name]])  # as the source holds them: one sequential pass
    contents = DcpContents(
        cuts,
        state.objects,
        {**target.aliases, **state.target.aliases},
        {**target.copies, **state.target.copies},
    )
    return lay_out(run.dst, contents, mesh.dims, run.options.files, run.source)


def _model_names(spelling: Spelling, outward: dict[str, str]) -> dict[str, str]:
    """Name in the output -> name in the model, where they differ."""
    if spelling.rules is None:
        return {}
    found = {out: spelling.rules.model_name(name) for name, out in outward.items()}
    return {out: name for out, name in found.items() if name is not None and name != out}
