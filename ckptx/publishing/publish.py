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
from ckptx.errors import CkptxError, InputError, OutputFailure, SpaceError
from ckptx.formats.hf.reader import stray_notes
from ckptx.formats.sidecars import MANIFEST
from ckptx.processes.peak_memory import peak_memory
from ckptx.processes.peers import PeerProcesses
from ckptx.publishing.existing_files import compare_existing_files
from ckptx.publishing.publisher import Claim, Publisher
from ckptx.publishing.source_contents import require_unchanged
from ckptx.publishing.source_state import FileIdentities, collect_identities, describe_source, is_same_source
from ckptx.publishing.staging import Staging, open_staging
from ckptx.storage.directory_handle import refuse_conflicting_names
from ckptx.storage.files import output_read_failures
from ckptx.storage.interface import ExpectedFile, OutputTree, Source, SourceFiles, StoredFile
from ckptx.transfer.digest import LEAF_NBYTES, bytes_digest_hex, file_digest, leaf_digest, tree_digest
from ckptx.transfer.executor import CopyResult, execute
from ckptx.transfer.plan import CopyPlan
from ckptx.untrusted.limits import MAX_MANIFEST_BYTES

# Loaders would read other files with these suffixes instead of the output, or along with it.
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".distcp", ".metadata")
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """The contents of an output directory, and the checks on them.

    Attributes:
        plan: Copy plan of the tensor files.
        source: The checkpoint from which tensors are read.
        sidecars: Name in the output -> file to copy, or bytes to write, for files other than tensor files and markers.
        settings: Options of the command other than `plan` that determine the bytes, by name; a run resumes another only
            if their `repr` is equal.
        build_manifest: Returns the manifest without `files` and `sidecars`, as a JSON object with the key `tensors`,
            from the result of the copy.
        opened_catalog: Catalog of the source as it was when it was opened, before chunks were located or converted.
        are_source_decisions_unchanged: Reads the tied tensors and the training state of the source again; True if the
            conversion would treat them as it did.
        validate_result: Raises an error if the result of the copy shows that the source cannot be converted.
        check_staged_files: Raises an error if the finished tensor files in the staging directory are wrong; called
            before the commit markers are written.
        markers: Name and bytes of the commit markers (index, `.metadata`), in the order to write them.
    """

    plan: CopyPlan
    source: Catalog
    sidecars: dict[str, StoredFile | bytes]
    settings: dict[str, Any]
    build_manifest: Callable[[CopyResult], dict[str, Any]]
    opened_catalog: Catalog
    are_source_decisions_unchanged: Callable[[], bool]
    validate_result: Callable[[CopyResult], None]
    check_staged_files: Callable[[Source, CopyResult], None] = lambda tree, result: None
    markers: list[tuple[str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the names of all output files.

        Raises:
            InputError: A name leads out of the output, or two files have the same name.
        """
        refuse_conflicting_names(self.file_names)

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of all files of the output."""
        tensor_files = (file.name for file in self.plan.files)
        return (*tensor_files, *self.sidecars, *(name for name, _ in self.markers), MANIFEST)

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
    check_replaceable: Callable[[Path], None] = lambda target: None,
    claim: Claim = Staging,
) -> CopyResult | None:
    """Write and publish an output directory.

    With `processes`, each process writes its share of the files, and rank 0 publishes all of them.

    Args:
        job: Contents of the output.
        target: Output directory.
        files: Files of the source.
        workers: Number of threads.
        max_memory: Memory limit of the buffers for non-contiguous tensors, in bytes.
        overwrite: Replace an existing target.
        resume: Resume an interrupted run.
        on_progress: Called periodically with the number of bytes written so far.
        processes: The processes that write the same output, this one included; None for a single process.
        other_sources: Other checkpoints from which the output is made, such as the one with the config.
        check_replaceable: Raises OutputError for a directory that must not be replaced.
        claim: Returns the context manager that makes this process the only one that writes the target, and yields its
            `Publisher`; by default a staging directory next to it on a local file system.

    Returns:
        The result of the copy, on other ranks than 0 for the files that the rank wrote. If `resume` is set and the
        output was complete already, nothing is written: then `was_complete` is True on rank 0, and the others return
        None.

    Raises:
        OutputError, SpaceError: The output cannot be written, or another process changed it.
        InputError: The source is corrupt, or changed while it was read.
        CkptxError: An error of `Job.validate_result` or `Job.check_staged_files`.
    """
    identities = collect_identities(job.source, *other_sources)
    if processes is not None and processes.rank:
        return _write_share(job, target, files, workers, max_memory, on_progress, processes, identities)
    if processes is not None:
        processes.wait_for_store()  # another process with rank 0 is reported as that, not as another run
    failure_scope = processes.shared_failure() if processes is not None else nullcontext()
    with (
        claim(target, overwrite=overwrite, resume=resume, check_replaceable=check_replaceable) as staging,
        failure_scope,
    ):
        identities.find_touched()
        existing_result = _find_existing_result(staging, job, files, identities, max_memory) if resume else None
        if existing_result is not None:
            staging.discard()
            existing_result.leftover = _leftover_path(staging)
            if processes is not None:
                processes.send("plan", "complete")
            return existing_result
        staging.refuse_existing_target(overwrite)
        resumed = _prepare_staging(job, staging, identities, resume)
        _logger.info("staged in %s%s", staging.output.path, ", resuming an interrupted run" if resumed else "")
        if processes is not None:
            processes.send("plan", {"job": _describe_job(job, files), "resumed": resumed})
        result = execute(
            job.plan,
            files,
            staging.output,
            staging.journal,
            workers=workers,
            max_memory=max_memory,
            resumed=resumed,
            on_progress=_add_peer_checks(on_progress, processes),
            group_indices=None if processes is None else _assign_groups(job.plan, processes),
        )
        result.was_locked = staging.is_locked
        if staging.replaced_plan is not None:
            reason = _explain_replacement(staging.replaced_plan, _describe_plan(job, identities))
            result.restart_reason = reason
        if processes is not None:
            for rank in range(1, processes.world_size):
                result.add(CopyResult(**processes.receive(rank, "result")))
        job.validate_result(result)
        _require_unchanged_source(job, result, files, identities, max_memory)
        expected = staging.output.describe_expected({file.name: file.nbytes for file in job.plan.files})
        _logger.info("copied: %d bytes read, %d written", result.bytes_read, result.bytes_written)
        _check_staged_files(job, result, staging, expected)
        _logger.info("checked: files match the plan")
        expected |= _write_other_files(staging.output, job, result, identities)
        if processes is not None:
            processes.send("written", True)
            for rank in range(1, processes.world_size):
                result.peak_rss = max(result.peak_rss, processes.receive(rank, "peak_rss"))
        staging.publish(expected)
        result.leftover = _leftover_path(staging)
        _logger.info("moved into place as %s", target)
    if processes is not None:
        processes.send("published", True)
    return result


def _require_unchanged_source(
    job: Job, result: CopyResult, files: SourceFiles, identities: FileIdentities, max_memory: int
) -> None:
    require_unchanged(
        identities,
        job.plan,
        result.digests,
        files,
        job.opened_catalog,
        job.are_source_decisions_unchanged,
        max_memory,
    )


def _leftover_path(staging: Publisher) -> str:
    return "" if staging.leftover is None else str(staging.leftover)


def _encode_job_manifest(job: Job, result: CopyResult, files: Mapping[str, Any], sidecars: Mapping[str, Any]) -> bytes:
    """Return the bytes of `ckptx.json`: the manifest of the job, with size and digest of each file.

    Args:
        job: The job.
        result: Result of the copy.
        files: Name of each tensor file and marker -> its `bytes` and `digest`.
        sidecars: The same for each sidecar.
    """
    manifest = job.build_manifest(result)
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
    return len(_encode_job_manifest(job, CopyResult(defaultdict(lambda: digest)), files, sidecars))


def _prepare_staging(job: Job, staging: Publisher, identities: FileIdentities, resume: bool) -> bool:
    """Prepare the staging directory; return True if an interrupted run of the same job is resumed.

    Raises:
        SpaceError: The file system has too little space for the files that are still to be written.
    """
    plan = _describe_plan(job, identities)
    resumed = staging.begin(plan, resume)
    if resumed:
        staging.output.remove_others({file.name for file in job.plan.files})
    staging.require_space(job.nbytes + manifest_size(job) - staging.output.allocated_bytes())
    return resumed


def _describe_plan(job: Job, identities: FileIdentities) -> bytes:
    """Return the plan for `Publisher.begin`: a line for the source, one for the plan, and one for each setting."""
    settings = [f"{name}={value!r}" for name, value in sorted(job.settings.items())]
    return "\n".join([repr(identities.describe_tensor_files()), _digest_plan(job.plan), *settings]).encode()


def _explain_replacement(old_plan: bytes, plan: bytes) -> str:
    """Return the reason why a run with a plan does not resume one with another plan."""
    (old_source, _, *old_settings), (source, _, *settings) = (
        each.decode(errors="replace").split("\n") if each.count(b"\n") > 1 else ["", "", ""]
        for each in (old_plan, plan)
    )
    changed = [each for each in settings if each not in old_settings]
    if old_settings == [""]:
        return "its plan is damaged"
    if old_source != source:
        return "the source has changed since"
    if changed:
        flags = sorted(f"--{each.partition('=')[0].replace('_', '-')}" for each in changed)
        return f"it had another value of {', '.join(flags)}"
    return "it was to write other tensors or files: the options, the config or the version of ckptx differ"


def _write_share(
    job: Job,
    target: Path,
    files: SourceFiles,
    workers: int,
    max_memory: int,
    on_progress: Callable[[int], None],
    processes: PeerProcesses,
    identities: FileIdentities,
) -> CopyResult | None:
    """Write the files of a rank other than 0, and wait until rank 0 has published the output."""
    identities.find_touched()
    message = processes.receive(0, "plan")
    if message == "complete":
        return None
    if not is_same_source(message["job"], _describe_job(job, files)):
        raise InputError(
            f"{job.source.location}: the checkpoint or the options of rank {processes.rank} differ from those "
            "of rank 0; "
            "start all ranks with the same options, on a directory that all nodes share"
        )
    with open_staging(target) as (tree, journal):
        result = execute(
            job.plan,
            files,
            tree,
            journal,
            workers=workers,
            max_memory=max_memory,
            resumed=message["resumed"],
            on_progress=_add_peer_checks(on_progress, processes),
            group_indices=_assign_groups(job.plan, processes),
        )
        _require_unchanged_source(job, result, files, identities, max_memory)
        tree.fsync_tracked()  # rank 0 may be on another node
        written_names = set(result.file_digests)
        processes.send("result", asdict(result))
        processes.receive(0, "written")
        tree.verify_status(
            tree.describe_expected({file.name: file.nbytes for file in job.plan.files if file.name in written_names})
        )
        processes.send("peak_rss", peak_memory())
        processes.receive(0, "published")
    return result


def _check_staged_files(job: Job, result: CopyResult, staging: Publisher, expected: Mapping[str, ExpectedFile]) -> None:
    """Run `Job.check_staged_files`; if another process changed the files, raise an error that says so instead."""

    def require_unchanged_files() -> None:
        staging.verify_claim()
        staging.output.verify_status(expected)

    require_unchanged_files()
    try:
        with output_read_failures():
            job.check_staged_files(staging.staged_source, result)
    except CkptxError:
        require_unchanged_files()
        raise


def _describe_job(job: Job, files: SourceFiles) -> dict[str, str]:
    """Return the values that `is_same_source` compares between ranks before any rank writes."""
    return describe_source(job.source, files, _digest_plan(job.plan), repr(sorted(job.settings.items())))


def _write_other_files(
    output: OutputTree, job: Job, result: CopyResult, identities: FileIdentities
) -> dict[str, ExpectedFile]:
    """Write all files but the tensor files: sidecars, markers, and finally the manifest.

    Returns:
        The expected state of each of these files by name, as `Publisher.publish` takes it.
    """
    expected: dict[str, ExpectedFile] = {}

    def write(name: str, data: StoredFile | bytes) -> dict[str, Any]:
        leaves: list[bytes] = []
        nbytes = 0

        def blocks() -> Iterator[bytes]:
            nonlocal nbytes
            for block in identities.iterate_blocks(data, LEAF_NBYTES):
                leaves.append(leaf_digest(block))
                nbytes += len(block)
                yield block

        device_and_inode = output.write(name, blocks())
        expected[name] = ExpectedFile(nbytes, device_and_inode, lambda file: file_digest(file) == tree_digest(leaves))
        return {"bytes": nbytes, "digest": tree_digest(leaves).hex()}

    sidecars = {name: write(name, data) for name, data in sorted(job.sidecars.items())}
    files = {file.name: {"bytes": file.nbytes, "digest": result.file_digests[file.name]} for file in job.plan.files}
    files |= {name: write(name, data) for name, data in job.markers}
    write(MANIFEST, _encode_job_manifest(job, result, files, sidecars))
    return expected


def _assign_groups(plan: CopyPlan, processes: PeerProcesses) -> list[int]:
    """Return the indices of the file groups that this rank writes.

    Groups are assigned from the largest to the smallest, each to the rank with the fewest bytes.
    """
    sizes = [sum(plan.files[file].nbytes for file in group.files) for group in plan.file_groups]
    loads = [(0, rank) for rank in range(processes.world_size)]
    own_groups = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, rank = heappop(loads)
        heappush(loads, (load + sizes[index], rank))
        if rank == processes.rank:
            own_groups.append(index)
    return sorted(own_groups)


def _add_peer_checks(on_progress: Callable[[int], None], processes: PeerProcesses | None) -> Callable[[int], None]:
    """Return a callback that also checks the other ranks whenever progress is reported."""
    if processes is None:
        return on_progress

    def check_and_report(nbytes: int) -> None:
        processes.check()
        on_progress(nbytes)

    return check_and_report


def _find_existing_result(
    staging: Publisher, job: Job, files: SourceFiles, identities: FileIdentities, max_memory: int
) -> CopyResult | None:
    """Return the result that a copy would have if the target is already complete, or None if it is not.

    This checks the manifest at the target, the files on disk, and that a new run would write the same manifest.

    Raises:
        InputError: The source is corrupt, or changed during the run.
        CkptxError: An error of `Job.validate_result`.
        OutputFailure: The storage of the target failed.
    """
    manifest = _read_target_manifest(staging)
    if manifest is None or not is_complete(staging.target_source, manifest, job):
        return None
    if not is_intact(staging, manifest, job, identities):
        return None
    result = compare_existing_files(staging.target_source, job.plan, files, max_memory)
    if result is None:
        return None
    job.validate_result(result)
    _require_unchanged_source(job, result, files, identities, max_memory)
    described_files, sidecars = (
        {name: {"bytes": file.nbytes, "digest": file.digest} for name, file in each.items()}
        for each in (manifest.files, manifest.sidecars)
    )
    if set(sidecars) != set(job.sidecars):
        return None
    new_manifest = parse_manifest(_encode_job_manifest(job, result, described_files, sidecars), manifest.path)
    return result if new_manifest == manifest else None


def _read_target_manifest(staging: Publisher) -> Manifest | None:
    """Return the manifest at the target, or None if there is no valid one."""
    try:
        with output_read_failures():
            data = staging.target_source.read_small(MANIFEST, MAX_MANIFEST_BYTES)
        return parse_manifest(data, str(staging.target_source.location / MANIFEST))
    except OutputFailure:
        raise
    except CkptxError:
        return None


def is_intact(staging: Publisher, manifest: Manifest, job: Job, identities: FileIdentities) -> bool:
    """Return True if all files at the target but the manifest have the expected bytes; reads all of them.

    Tensor files are compared with the digests in the manifest at the target, markers and sidecars with those of the
    job.

    Raises:
        OutputFailure: The storage of the target failed.
    """
    try:
        expected_digests = {name: file.digest for name, file in manifest.files.items()}
        expected_digests |= {name: bytes_digest_hex(data) for name, data in job.markers}
        for name, data in job.sidecars.items():
            expected_digests[name] = tree_digest(
                leaf_digest(block) for block in identities.iterate_blocks(data, LEAF_NBYTES)
            ).hex()
        return all(staging.digest_target_file(name) == digest for name, digest in expected_digests.items())
    except (OutputFailure, SpaceError):
        raise
    except (CkptxError, OSError):
        return False


def is_complete(target: Source, manifest: Manifest, job: Job) -> bool:
    """Return True if names, dtypes, sizes and markers at the target match the job, and there are no other weights.

    No tensor data is read, and no digest of a tensor is compared.

    Raises:
        OutputFailure: The storage of the target failed.
    """
    expected_sizes = {file.name: file.nbytes for file in job.plan.files} | {
        name: len(data) for name, data in job.markers
    }
    try:
        files, tensors = manifest.files, manifest.tensors
        with output_read_failures():
            return (
                {name: file.nbytes for name, file in files.items()} == expected_sizes
                and not stray_notes(target.listing(), {*expected_sizes, *job.sidecars}, _WEIGHT_SUFFIXES)
                and all(target.size(name) == nbytes for name, nbytes in expected_sizes.items())
                and all(files[name].digest == bytes_digest_hex(data) for name, data in job.markers)
                and all(
                    tensors[step.target.name].dtype is step.target.dtype for step in job.plan.steps() if step.is_tensor
                )
            )
    except OutputFailure:
        raise
    except (CkptxError, KeyError):
        return False


def _digest_plan(plan: CopyPlan) -> str:
    """Return a digest of all files, tensors and positions of the plan."""
    ids, digests = ObjectIds(), dict[tuple[int, int], bytes]()

    def encode_positions(chunks: Sequence[Chunk]) -> bytes:
        if type(chunks) is not ShardedChunks:
            return repr([(*chunk.region, *chunk[1:]) for chunk in chunks]).encode()
        key = (ids(chunks.files), ids(chunks.blocks))  # shared by equally sharded tensors
        if key not in digests:
            digests[key] = leaf_digest(repr((chunks.files, chunks.blocks)).encode())
        return digests[key] + chunks.offsets.tobytes()

    files = (leaf_digest(repr((file.name, file.nbytes)).encode() + file.prologue) for file in plan.files)
    steps = (
        leaf_digest(repr((step.target.name, step.target.dtype.name)).encode() + encode_positions(step.target.chunks))
        for step in plan.steps()
    )
    return tree_digest([*files, *steps]).hex()
