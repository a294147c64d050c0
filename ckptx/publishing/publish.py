"""Write an output directory: stage, copy, check, mark as complete, publish."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, ShardedChunks
from ckptx.catalog.manifest import Manifest, encode_manifest
from ckptx.catalog.manifest_parser import parse_manifest
from ckptx.catalog.object_ids import ObjectIds
from ckptx.errors import CkptxError, InputError
from ckptx.formats.hf.reader import stray_notes
from ckptx.formats.sidecars import MANIFEST
from ckptx.processes.peak_memory import peak_memory
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.completeness import result_of_existing_files
from ckptx.publishing.publisher import Claim, Publisher
from ckptx.publishing.source_contents import require_unchanged
from ckptx.publishing.source_state import FileIdentities, agreement, is_agreed, recorded_identities
from ckptx.publishing.staging import Staging, open_staged
from ckptx.storage.directory_handle import refuse_conflicting_names
from ckptx.storage.interface import ExpectedFile, OutputTree, Source, SourceFiles, StoredFile
from ckptx.transfer.digest import LEAF_NBYTES, digest_bytes, file_digest, leaf_digest, tree_digest
from ckptx.transfer.executor import CopyResult, execute
from ckptx.transfer.plan import CopyPlan
from ckptx.untrusted.limits import MANIFEST_BYTES

# Loaders would read other files with these suffixes instead of the output, or along with it.
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".distcp", ".metadata")
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """The contents of an output directory, and the checks on them.

    Attributes:
        plan: Copy plan of the tensor files.
        source: The checkpoint from which tensors are read.
        sidecars: Name in the output -> file to copy, or bytes to write.
        options: Other settings that determine the bytes; a resumed run must have equal ones.
        manifest: Returns the manifest without `files` and `sidecars` from the result of the copy.
        opened: The source as it was opened.
        is_decision_unchanged: Repeats decisions on the current contents of the source; True if they are unchanged.
        refuse: Raises an error if the result of the copy shows that the source cannot be converted.
        check: Checks the finished tensor files in the staged tree before the commit markers are written.
        markers: Name and bytes of the commit markers (index, `.metadata`), in the order to write them.
    """

    plan: CopyPlan
    source: Catalog
    sidecars: dict[str, StoredFile | bytes]
    options: dict[str, Any]
    manifest: Callable[[CopyResult], dict[str, Any]]
    opened: Catalog
    is_decision_unchanged: Callable[[], bool]
    refuse: Callable[[CopyResult], None]
    check: Callable[[Source, CopyResult], None] = lambda tree, outcome: None
    markers: list[tuple[str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the names of all output files.

        Raises:
            InputError: A name leads out of the output, or two files have the same name.
        """
        tensor_files = (file.name for file in self.plan.files)
        refuse_conflicting_names((*tensor_files, *self.sidecars, *(name for name, _ in self.markers), MANIFEST))

    @property
    def nbytes(self) -> int:
        """Size of the output in bytes, without the manifest."""
        sidecars = self.sidecar_sizes().values()
        return self.plan.bytes_written + sum(len(data) for _, data in self.markers) + sum(sidecars)

    def sidecar_sizes(self) -> dict[str, int]:
        """Return the size of each sidecar in bytes."""
        return {name: len(data) if isinstance(data, bytes) else data.size for name, data in self.sidecars.items()}


def publish(
    job: Job,
    target: Path,
    files: SourceFiles,
    *,
    workers: int,
    max_memory: int,
    overwrite: bool,
    resume: bool,
    on_progress: Callable[[int], None],
    processes: PeerProcesses | None = None,
    other_sources: Iterable[Catalog] = (),
    may_replace: Callable[[Path], None] = lambda target: None,
    claim: Claim = Staging,
) -> CopyResult | None:
    """Write and publish an output directory.

    With `processes`, each process writes its share of the files, and rank 0 publishes all of them.

    Args:
        job: Contents of the output.
        target: Output directory.
        files: Files of the source.
        workers: Number of threads.
        max_memory: Memory limit for I/O buffers, in bytes.
        overwrite: Replace an existing target.
        resume: Resume an interrupted run.
        on_progress: Called periodically with the number of bytes written.
        processes: The other processes that write the same output; None for a single process.
        other_sources: Other checkpoints from which the output is made.
        may_replace: Raises OutputError for a directory that must not be replaced.
        claim: Claims the target in its storage.

    Returns:
        The result of the copy, which wrote nothing if `resume` is set and the output was complete already. None on
        other ranks than 0 in that case.

    Raises:
        OutputError, SpaceError: The output cannot be written, or another process changed it.
        InputError: The source is corrupt, or changed while it was read.
    """
    seen = recorded_identities(job.source, *other_sources)
    if processes is not None and processes.rank:
        return _write_share(job, target, files, workers, max_memory, on_progress, processes, seen)
    together = processes.shared_failure() if processes is not None else nullcontext()
    with claim(target, overwrite=overwrite, resume=resume, may_replace=may_replace) as staging, together:
        seen.touched()
        done = _existing_result(staging, job, files, seen, max_memory) if resume else None
        if done is not None:
            staging.discard()
            if processes is not None:
                processes.send("plan", "complete")
            return done
        staging.refuse_target_unless(overwrite)
        resumed = _prepare(job, staging, seen, resume)
        _logger.info("staged in %s%s", staging.output.path, ", resuming an interrupted run" if resumed else "")
        if processes is not None:
            processes.send("plan", {"agreed": _agreement(job, files), "resumed": resumed})
        outcome = execute(
            job.plan,
            files,
            staging.output,
            staging.notes,
            workers=workers,
            max_memory=max_memory,
            resumed=resumed,
            on_progress=_with_peer_checks(on_progress, processes),
            groups=None if processes is None else _share(job.plan, processes),
        )
        outcome.was_locked = staging.is_locked
        if processes is not None:
            for rank in range(1, processes.world_size):
                outcome.add(CopyResult(**processes.receive(rank, "outcome")))
        job.refuse(outcome)
        require_unchanged(seen, job.plan, outcome.digests, files, job.opened, job.is_decision_unchanged, max_memory)
        expected = staging.output.describe_expected({file.name: file.nbytes for file in job.plan.files})
        _logger.info("copied: %d bytes read, %d written", outcome.bytes_read, outcome.bytes_written)
        _check(job, outcome, staging, expected)
        _logger.info("checked: files match the plan")
        expected |= _write_rest(staging.output, job, outcome, seen)
        if processes is not None:
            processes.send("written", True)
            for rank in range(1, processes.world_size):
                outcome.peak_rss = max(outcome.peak_rss, processes.receive(rank, "held"))
        staging.publish(expected)
        _logger.info("published as %s", target)
    if processes is not None:
        processes.send("published", True)
    return outcome


def _manifest_bytes(job: Job, outcome: CopyResult, files: Mapping[str, Any], sidecars: Mapping[str, Any]) -> bytes:
    """Return the bytes of `ckptx.json`: the manifest of the job, with size and digest of each file."""
    manifest = job.manifest(outcome)
    tensors = manifest.pop("tensors")
    return encode_manifest({**manifest, "files": files, "sidecars": sidecars, "tensors": tensors})


def manifest_size(job: Job) -> int:
    """Return the size of `ckptx.json` in bytes, which is known before copying because digests have a fixed length."""
    digest = tree_digest([]).hex()
    sizes = {file.name: file.nbytes for file in job.plan.files} | {name: len(data) for name, data in job.markers}
    files, sidecars = (
        {name: {"bytes": nbytes, "digest": digest} for name, nbytes in each.items()}
        for each in (sizes, job.sidecar_sizes())
    )
    return len(_manifest_bytes(job, CopyResult(defaultdict(lambda: digest)), files, sidecars))


def _prepare(job: Job, staging: Publisher, seen: FileIdentities, resume: bool) -> bool:
    """Prepare the staging directory; return True if an interrupted run of the same job is resumed."""
    plan = repr((seen.states(), _layout(job.plan), sorted(job.options.items()))).encode()
    resumed = staging.begin(plan, resume)
    if resumed:
        staging.output.remove_others({file.name for file in job.plan.files})
    staging.require_space(job.nbytes - staging.output.allocated_bytes())
    return resumed


def _write_share(
    job: Job,
    target: Path,
    files: SourceFiles,
    workers: int,
    max_memory: int,
    on_progress: Callable[[int], None],
    processes: PeerProcesses,
    seen: FileIdentities,
) -> CopyResult | None:
    """Write the share of a rank other than 0, and wait until rank 0 has published the output."""
    seen.touched()
    wanted = processes.receive(0, "plan")
    if wanted == "complete":
        return None
    if not is_agreed(wanted["agreed"], _agreement(job, files)):
        raise InputError(
            f"{job.source.root}: the checkpoint or the options of rank {processes.rank} differ from those of rank 0; "
            "start all ranks with the same options, on a directory that all nodes share"
        )
    with open_staged(target) as (tree, journal):
        outcome = execute(
            job.plan,
            files,
            tree,
            journal,
            workers=workers,
            max_memory=max_memory,
            resumed=wanted["resumed"],
            on_progress=_with_peer_checks(on_progress, processes),
            groups=_share(job.plan, processes),
        )
        require_unchanged(seen, job.plan, outcome.digests, files, job.opened, job.is_decision_unchanged, max_memory)
        tree.fsync_tracked()  # rank 0 may be on another node
        own = set(outcome.file_digests)
        processes.send("outcome", asdict(outcome))
        processes.receive(0, "written")
        tree.verify_status(
            tree.describe_expected({file.name: file.nbytes for file in job.plan.files if file.name in own})
        )
        processes.send("held", peak_memory())
        processes.receive(0, "published")
    return outcome


def _check(job: Job, outcome: CopyResult, staging: Publisher, expected: Mapping[str, ExpectedFile]) -> None:
    """Run the check of the job on the finished tensor files; report changes by other processes as such."""

    def require_untouched() -> None:
        staging.require_own()
        staging.output.verify_status(expected)

    require_untouched()
    try:
        job.check(staging.written, outcome)
    except CkptxError:
        require_untouched()
        raise


def _agreement(job: Job, files: SourceFiles) -> dict[str, str]:
    """Return the values that must be equal on all ranks before any rank writes."""
    return agreement(job.source, files, _layout(job.plan), repr(sorted(job.options.items())))


def _write_rest(output: OutputTree, job: Job, outcome: CopyResult, seen: FileIdentities) -> dict[str, ExpectedFile]:
    """Write all files but the tensor files: sidecars, markers, and finally the manifest."""
    written: dict[str, ExpectedFile] = {}

    def write(name: str, data: StoredFile | bytes) -> dict[str, Any]:
        leaves: list[bytes] = []
        nbytes = 0

        def blocks() -> Iterator[bytes]:
            nonlocal nbytes
            for block in seen.blocks(data, LEAF_NBYTES):
                leaves.append(leaf_digest(block))
                nbytes += len(block)
                yield block

        holder = output.write(name, blocks())
        written[name] = ExpectedFile(nbytes, holder, lambda file: file_digest(file) == tree_digest(leaves))
        return {"bytes": nbytes, "digest": tree_digest(leaves).hex()}

    sidecars = {name: write(name, data) for name, data in sorted(job.sidecars.items())}
    rows = {file.name: {"bytes": file.nbytes, "digest": outcome.file_digests[file.name]} for file in job.plan.files}
    rows |= {name: write(name, data) for name, data in job.markers}
    write(MANIFEST, _manifest_bytes(job, outcome, rows, sidecars))
    return written


def _share(plan: CopyPlan, processes: PeerProcesses) -> list[int]:
    """Return the groups that this rank writes: groups are assigned by size, each to the rank with the least bytes."""
    sizes = [sum(plan.files[file].nbytes for file in group.files) for group in plan.groups]
    loads = [(0, rank) for rank in range(processes.world_size)]
    mine = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, rank = heappop(loads)
        heappush(loads, (load + sizes[index], rank))
        if rank == processes.rank:
            mine.append(index)
    return sorted(mine)


def _with_peer_checks(on_progress: Callable[[int], None], processes: PeerProcesses | None) -> Callable[[int], None]:
    """Return a callback that also checks the other ranks whenever progress is reported."""
    if processes is None:
        return on_progress

    def watch(nbytes: int) -> None:
        processes.check()
        on_progress(nbytes)

    return watch


def _existing_result(
    staging: Publisher, job: Job, files: SourceFiles, seen: FileIdentities, max_memory: int
) -> CopyResult | None:
    """Return the result of a copy whose target is complete already, or None if it is not.

    Checks the manifest at the target, the files on disk, and that a new run would write the same manifest.

    Raises:
        InputError: The source is corrupt, changed during the run, or has values that cannot be cast.
    """
    manifest = _manifest_at(staging)
    if manifest is None or not is_complete(staging.published, manifest, job):
        return None
    if not is_intact(staging, manifest, job, seen):
        return None
    outcome = result_of_existing_files(staging.published, job.plan, files, max_memory)
    if outcome is None:
        return None
    job.refuse(outcome)
    require_unchanged(seen, job.plan, outcome.digests, files, job.opened, job.is_decision_unchanged, max_memory)
    rows, sidecars = (
        {name: row._asdict() for name, row in each.items()} for each in (manifest.files, manifest.sidecars)
    )
    for row in (*rows.values(), *sidecars.values()):
        row["bytes"] = row.pop("nbytes")
    if set(sidecars) != set(job.sidecars):
        return None
    fresh = parse_manifest(_manifest_bytes(job, outcome, rows, sidecars), manifest.path)
    return outcome if fresh == manifest else None


def _manifest_at(staging: Publisher) -> Manifest | None:
    """Return the manifest at the target, or None if there is no valid one."""
    try:
        data = staging.published.read_small(MANIFEST, MANIFEST_BYTES)
        return parse_manifest(data, str(staging.published.location / MANIFEST))
    except CkptxError:
        return None


def is_intact(staging: Publisher, manifest: Manifest, job: Job, seen: FileIdentities) -> bool:
    """Return True if tensor files, markers and sidecars at the target have the expected bytes; reads all of them."""
    try:
        wanted = {name: row.digest for name, row in manifest.files.items()}
        wanted |= {name: digest_bytes(data) for name, data in job.markers}
        for name, data in job.sidecars.items():
            wanted[name] = tree_digest(leaf_digest(block) for block in seen.blocks(data, LEAF_NBYTES)).hex()
        return all(staging.digest_of_published(name) == digest for name, digest in wanted.items())
    except (CkptxError, OSError):
        return False


def is_complete(target: Source, manifest: Manifest, job: Job) -> bool:
    """Return True if the target matches the job in names, dtypes, sizes and markers; tensor data is not read."""
    wanted = {file.name: file.nbytes for file in job.plan.files} | {name: len(data) for name, data in job.markers}
    try:
        files, tensors = manifest.files, manifest.tensors
        return (
            {name: row.nbytes for name, row in files.items()} == wanted
            and not stray_notes(target.listing(), {*wanted, *job.sidecars}, _WEIGHTS)
            and all(target.size(name) == nbytes for name, nbytes in wanted.items())
            and all(files[name].digest == digest_bytes(data) for name, data in job.markers)
            and all(tensors[step.target.name].dtype is step.target.dtype for step in job.plan.steps() if step.has_frame)
        )
    except (CkptxError, KeyError):
        return False


def _layout(plan: CopyPlan) -> str:
    """Return a digest of all files, tensors and positions of the plan."""
    ids, known = ObjectIds(), dict[tuple[int, int], bytes]()

    def places(chunks: Sequence[Chunk]) -> bytes:
        if type(chunks) is not ShardedChunks:
            return repr([(*chunk.region, *chunk[1:]) for chunk in chunks]).encode()
        key = (ids(chunks.files), ids(chunks.blocks))  # shared by equally sharded tensors
        if key not in known:
            known[key] = leaf_digest(repr((chunks.files, chunks.blocks)).encode())
        return known[key] + chunks.offsets.tobytes()

    files = (leaf_digest(repr((file.name, file.nbytes)).encode() + file.prologue) for file in plan.files)
    steps = (
        leaf_digest(repr((step.target.name, step.target.dtype.name)).encode() + places(step.target.chunks))
        for step in plan.steps()
    )
    return tree_digest([*files, *steps]).hex()
