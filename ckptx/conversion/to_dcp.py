"""`convert hf2dcp`."""

from __future__ import annotations

from ckptx.conversion.manifest import manifest_of
from ckptx.conversion.run import Conversion
from ckptx.conversion.target import cast, share
from ckptx.errors import UsageError
from ckptx.formats import dcp_layout
from ckptx.formats.dcp import METADATA
from ckptx.formats.huggingface_layout import remember
from ckptx.mapping.config import dtype_edits
from ckptx.publish import Job
from ckptx.transfer.planner import plan_copy


def to_dcp(run: Conversion) -> None:
    """Carries out one conversion to DCP.

    Raises:
        UsageError: The source is a DCP.
        CkptxError: Whatever else is in the way.
    """
    options, report = run.options, run.report
    if run.source.format == "dcp":
        raise UsageError(f"{run.source.root}: is a DCP already; convert dcp2hf turns it into safetensors")
    view, decisions = run.view(None, None)
    source = run.source
    if source.config is None:
        report.warnings.append("no config.json: tied names are unknown, every tensor is converted as it is")
    target = share(run, view, decisions, aliases_possible=True)
    was_cast = cast(run, view, target, None)
    if options.prefix:
        target = target.prefixed(options.prefix)
    report.aliases = target.aliases
    layout = dcp_layout.allocate(run.dst, target.tensors.values(), options.files)
    plan = plan_copy(source, layout, target.origin, frame_of=dcp_layout.archive_frame)
    edits = dtype_edits(source.config, options.dtype) if was_cast else []
    # The original files can be given back only from what they hold, as they hold it.
    kept = target.tensors.keys() | target.aliases.keys()
    changed = was_cast or options.prefix or view.wrappers or not all(name in kept for name in source.tensors)
    restorable = source.format == "huggingface" and not changed
    files = {name: index for index, name in enumerate(source.files)}
    shards = {name: files[entry.chunks[0].file] for name, entry in source.tensors.items()} if restorable else {}
    job = Job(
        plan,
        source,
        run.carry(source.root, [sidecar.name for sidecar in source.sidecars], edits),
        options.fingerprint(),
        lambda outcome: manifest_of(
            "dcp",
            layout,
            outcome.digests,
            aliases=target.aliases,
            order=list(source.tensors) if restorable else None,
            shards=shards,
            origin=remember(source) if restorable else None,
        ),
        markers=[(METADATA, dcp_layout.metadata_bytes(layout, target.aliases))],
    )
    run.execute(job, target.origin.values())
