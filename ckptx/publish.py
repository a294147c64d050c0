"""Making an output directory: stage, copy, check, mark as complete, publish."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import Chunk, CutChunks
from ckptx.catalog.manifest import emit_manifest
from ckptx.catalog.manifest_parser import read_manifest
from ckptx.errors import CkptxError, InputError
from ckptx.formats.sidecars import MANIFEST
from ckptx.rendezvous import Rendezvous
from ckptx.staging import Staging, staged, sync
from ckptx.storage import FilePool, create, open_regular, unreadable, write_at
from ckptx.transfer.digest import LEAF, digest_bytes, leaf_digest, tree_digest
from ckptx.transfer.executor import Outcome, execute
from ckptx.transfer.plan import CopyPlan
from ckptx.transfer.sinks import digest_of
from ckptx.transfer.stream import TensorReader


@dataclass(slots=True)
class Job:
    """What one output directory is made of.

    Attributes:
        plan: The tensor files.
        source: The checkpoint they are read from.
        sidecars: Name in the output -> file to copy, or bytes to write.
        options: What else decides the bytes; a resumed run must have the same.
        check: Looks at the finished tensor files in the staged tree before anything marks it as complete.
        markers: Commit markers (index, `.metadata`) in the order to write them, name and bytes.
        manifest: The manifest without `files` and `sidecars`, from what the copy found out.
    """

    plan: CopyPlan
    source: Catalog
    sidecars: dict[str, Path | bytes]
    options: dict[str, Any]
    manifest: Callable[[Outcome], dict[str, Any]]
    check: Callable[[Path, Outcome], None] = lambda tree, outcome: None
    markers: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes the output takes, the manifest excepted."""
        sidecars = (len(data) if isinstance(data, bytes) else data.stat().st_size for data in self.sidecars.values())
        return self.plan.bytes_written + sum(len(data) for _, data in self.markers) + sum(sidecars)


def publish(
    job: Job,
    target: Path,
    files: FilePool,
    *,
    workers: int,
    max_memory: int,
    overwrite: bool,
    resume: bool,
    on_progress: Callable[[int], None],
    ranks: Rendezvous | None = None,
) -> Outcome | None:
    """Writes and publishes.

    With `ranks`, each process writes its share of the files, and rank 0 publishes what all of them wrote.

    Returns:
        What the copy found out, or None when `resume` found the output complete already.

    Raises:
        OutputError, SpaceError: It cannot be written.
        InputError: The source is corrupt, or changed while it was read.
    """
    if ranks is not None and ranks.rank:
        return _assist(job, target, files, workers, max_memory, on_progress, ranks)
    together = ranks.failing_together() if ranks is not None else nullcontext()
    with Staging(target, overwrite=overwrite, resume=resume) as staging, together:
        before = fingerprint(job.source)
        if resume and is_complete(target, job) and has_contents(target, job, files, max_memory):
            staging.discard()
            if ranks is not None:
                ranks.say("plan", "complete")
            return None
        staging.refuse_target_unless(overwrite)
        plan = repr((before, _layout(job.plan), sorted(job.options.items()))).encode()
        staging.begin(plan, resume)
        staging.require_space(job.nbytes - _allocated(staging.tree))
        if ranks is not None:
            ranks.say("plan", digest_bytes(plan))
        outcome = execute(
            job.plan,
            files,
            staging.tree,
            staging.journal,
            workers=workers,
            max_memory=max_memory,
            on_progress=_watching(on_progress, ranks),
            groups=None if ranks is None else _share(job.plan, ranks),
        )
        if ranks is not None:
            for rank in range(1, ranks.world_size):
                outcome.add(Outcome(**ranks.hear(rank, "outcome")))
        if fingerprint(job.source) != before:
            raise InputError(f"{job.source.root}: changed while it was being read; wait for its writer, then run again")
        job.check(staging.tree, outcome)
        sidecars = {name: _write_sidecar(staging.tree / name, data) for name, data in sorted(job.sidecars.items())}
        listed = [*((file.name, file.nbytes, outcome.file_digests[file.name]) for file in job.plan.files)]
        for name, data in job.markers:
            nbytes, digest = _write_sidecar(staging.tree / name, data)
            listed.append((name, nbytes, digest))
        manifest = job.manifest(outcome)
        tensors = manifest.pop("tensors")
        manifest["files"] = {name: {"bytes": nbytes, "digest": digest} for name, nbytes, digest in listed}
        manifest["sidecars"] = {
            name: {"bytes": nbytes, "digest": digest} for name, (nbytes, digest) in sidecars.items()
        }
        manifest["tensors"] = tensors
        _write_sidecar(staging.tree / MANIFEST, emit_manifest(manifest))
        staging.publish()
    if ranks is not None:
        ranks.say("published", True)
    return outcome


def _assist(
    job: Job,
    target: Path,
    files: FilePool,
    workers: int,
    max_memory: int,
    on_progress: Callable[[int], None],
    ranks: Rendezvous,
) -> Outcome | None:
    """The part of `publish` of a rank other than the first: writes its share and waits for the end."""
    before = fingerprint(job.source)
    plan = repr((before, _layout(job.plan), sorted(job.options.items()))).encode()
    wanted = ranks.hear(0, "plan")
    if wanted == "complete":
        return None
    if wanted != digest_bytes(plan):
        raise InputError(
            f"{job.source.root}: rank {ranks.rank} sees another checkpoint or was given other options than rank 0; "
            "start all ranks alike, on a directory that all nodes share"
        )
    tree, journal = staged(target)
    outcome = execute(
        job.plan,
        files,
        tree,
        journal,
        workers=workers,
        max_memory=max_memory,
        on_progress=_watching(on_progress, ranks),
        groups=_share(job.plan, ranks),
    )
    for name in outcome.file_digests:
        sync(tree / name)  # rank 0 may be on another node
    ranks.say("outcome", asdict(outcome))
    ranks.hear(0, "published")
    return outcome


def _share(plan: CopyPlan, ranks: Rendezvous) -> list[int]:
    """The groups that this rank writes: the largest first, each to the rank that has the least."""
    sizes = [sum(plan.files[file].nbytes for file in group.files) for group in plan.groups]
    loads = [(0, rank) for rank in range(ranks.world_size)]
    mine = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, rank = heappop(loads)
        heappush(loads, (load + sizes[index], rank))
        if rank == ranks.rank:
            mine.append(index)
    return sorted(mine)


def _watching(on_progress: Callable[[int], None], ranks: Rendezvous | None) -> Callable[[int], None]:
    """Looks after the other ranks whenever there is progress to tell."""
    if ranks is None:
        return on_progress

    def watch(nbytes: int) -> None:
        ranks.check()
        on_progress(nbytes)

    return watch


def fingerprint(source: Catalog) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the tensor files of a checkpoint.

    Raises:
        InputError: A file is gone, or has another size than when the checkpoint was opened.
    """
    rows = []
    for name in source.files:
        try:
            stat = os.stat(source.root / name)
        except OSError as error:
            raise unreadable(source.root / name, error) from error
        if stat.st_size != source.files[name]:
            raise InputError(
                f"{source.root / name}: changed while it was being read; wait for its writer, then run again"
            )
        rows.append((name, stat.st_size, stat.st_mtime_ns))
    return rows


def is_complete(target: Path, job: Job) -> bool:
    """True when `target` already holds what the job would write, as far as names, dtypes, sizes and markers tell."""
    wanted = {file.name: file.nbytes for file in job.plan.files} | {name: len(data) for name, data in job.markers}
    try:
        manifest = read_manifest(target / MANIFEST)
        files, tensors = manifest.files, manifest.tensors
        return (
            {name: row.nbytes for name, row in files.items()} == wanted
            and all((target / name).stat().st_size == nbytes for name, nbytes in wanted.items())
            and all(files[name].digest == digest_bytes(data) for name, data in job.markers)
            and all(tensors[step.target.name].dtype is step.target.dtype for step in job.plan.steps() if step.framed)
        )
    except (CkptxError, OSError, KeyError):
        return False


def has_contents(target: Path, job: Job, files: FilePool, max_memory: int) -> bool:
    """True when the digests in the manifest of `target` are those of the source; reads all of the source."""
    tensors = read_manifest(target / MANIFEST).tensors
    reader = TensorReader(files, max_memory)
    return all(
        tensors[step.target.name].digest == digest_of(reader, step.source, step.target.dtype).digest().hex()
        for step in job.plan.steps()
        if step.framed
    )


def _layout(plan: CopyPlan) -> str:
    """A digest of everything the plan writes where."""
    known: dict[tuple[int, int], bytes] = {}

    def places(chunks: Sequence[Chunk]) -> bytes:
        if not isinstance(chunks, CutChunks):
            return repr(tuple(chunks)).encode()
        key = (id(chunks.files), id(chunks.blocks))  # which tensors that are cut alike share
        if key not in known:
            known[key] = leaf_digest(repr((chunks.files, chunks.blocks)).encode())
        return known[key] + chunks.offsets.tobytes()

    files = (leaf_digest(repr((file.name, file.nbytes)).encode() + file.prologue) for file in plan.files)
    steps = (
        leaf_digest(repr((step.target.name, step.target.dtype.name)).encode() + places(step.target.chunks))
        for step in plan.steps()
    )
    return tree_digest([*files, *steps]).hex()


def _allocated(tree: Path) -> int:
    """Bytes of disk that the tree of an interrupted run already takes."""
    return sum(path.stat().st_blocks * 512 for path in tree.rglob("*") if path.is_file())


def _write_sidecar(path: Path, data: Path | bytes) -> tuple[int, str]:
    """Copies a file or writes bytes; gives size and digest."""
    descriptor = create(path)
    leaves: list[bytes] = []
    at = 0
    try:
        os.ftruncate(descriptor, 0)
        for block in _leaves(data):
            write_at(descriptor, block, at, path)
            leaves.append(leaf_digest(block))
            at += len(block)
    finally:
        os.close(descriptor)
    return at, tree_digest(leaves).hex()


def _leaves(data: Path | bytes) -> Iterator[bytes]:
    if isinstance(data, bytes):
        for at in range(0, len(data), LEAF):
            yield data[at : at + LEAF]
        return
    try:
        with os.fdopen(open_regular(data), "rb") as file:
            while block := file.read(LEAF):
                yield block
    except OSError as error:
        raise unreadable(data, error) from error
