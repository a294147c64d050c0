"""`verify --run`: what a checkpoint computes under TP x FSDP2, held against the reference model.

Four levels, the cheap ones first:

    config      what the class makes of the config, key by key
    bytes       what each rank loaded, against the slices of the reference that belong there
    forward     logits and loss on the same inputs
    gradients   of one backward step, parameter by parameter

Sums that TP and FSDP put into another order round otherwise. How much that may be is not chosen but measured, on the
reference, in the same run: see `ckptx.verification.noise`. On one rank nothing is reordered: results are equal bit for
bit, if the device gives the same results twice. A CPU does; another device is asked first, by running the reference
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptx.catalog.region import Region
from ckptx.errors import InputError, UnsupportedError
from ckptx.formats.hf.hf_metadata import directory_of_config
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.report.documents.running import RunReport
from ckptx.report.report import Log, Stopwatch
from ckptx.runtime.build import build_model, materialize, read_config
from ckptx.runtime.distributed import Process, everywhere, mesh_of, process_group, together
from ckptx.runtime.ledger import NO_PLACE, UNKNOWN
from ckptx.runtime.load import RegionsOf, differing, load_from, unread
from ckptx.runtime.parallelize import Parallelized, parallelize
from ckptx.runtime.reading import Source, open_source
from ckptx.runtime.tensor_parallel.plans import check_heads, find_plan
from ckptx.verification import execution, noise
from ckptx.verification.comparison import Comparison, Reference, difference, furthest
from ckptx.verification.configs import ConfigDifference, compare_configs
from ckptx.verification.execution import Call, observed, run, tokens_used
from ckptx.verification.inputs.batch import Inputs, inputs_for

_ROWS = 2  # of each batch
_MOST_NAMED = 3  # in a note
_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    Attributes:
        dims: The mesh.
        tp_plan: Pattern -> style of the user, or None.
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl.
        dtype: Of the parameters on both sides: bf16, fp16 or fp32; auto takes that of each config, or what is stored.
            The fewer bits, the less is found: eight times the rounding of bf16 can be more than a whole layer does.
        activation_checkpointing: none, full, submodule or selective.
        scope: all, language, vision or audio.
        compile: Compile each layer.
        backward: Compare gradients, too.
        trust_remote_code: Whether Python files of the checkpoints may be executed.
        strict: Whether what could not be decided counts as a difference.
    """

    dims: ParallelDims = field(default_factory=ParallelDims)
    tp_plan: dict[str, str] | None = None
    device: str = "auto"
    backend: str = "auto"
    dtype: str = "fp32"
    activation_checkpointing: str = "none"
    scope: str = "all"
    compile: bool = False
    backward: bool = True
    trust_remote_code: bool = False
    strict: bool = False


def verify_run(reference: Path, checkpoint: Path, options: RunOptions, log: Log) -> RunReport:
    """Compares what two checkpoints compute; every rank of the mesh calls it.

    Args:
        reference: What the other should compute.
        checkpoint: Loaded under the layout of `options`. One without a config.json gets that of the reference.
        options: How to run.
        log: Has what the user should know, on every rank alike.

    Returns:
        On every rank the same. Its `exit` is 1 when something differs.

    Raises:
        UnsupportedError: The class cannot run like that; the message says why.
        InputError: A checkpoint is incomplete.
        CkptxError: Whatever else is in the way, on whichever rank.
    """
    stopwatch = Stopwatch()
    if options.dims.pp > 1:
        raise UnsupportedError("--pp with --run: pipeline stages are not run yet; leave out --pp")
    with process_group(options.device, options.backend) as process:
        mesh = mesh_of(options.dims, process.device.type)
        first, second = _Side(reference, reference, options), _Side(checkpoint, reference, options)
        with together():
            batches = second.batches()
            configs = compare_configs(first.config(), second.config(), used=second.tokens_used())
        with together():
            expected = _run_reference(first, batches, process, options) if process.rank == 0 else None
        with together():
            model, done, source_of = second.build(mesh)
            materialize(model, process.device)
            regions = _regions_of(done)
            with second.opened() as source:
                ledger = load_from(model, source, regions=regions)
        with together(), first.opened() as source:
            wrong = differing(model, source, regions=regions)
            left = _left(unread(model, source, regions=regions))
        rows = _rows_of(configs) if process.rank == 0 else []
        rows += _added(_left(ledger.unread), left) if process.rank == 0 else []
        rows += [difference("bytes", process.rank, name, source_of) for name in wrong]
        index = mesh["dp_shard"].get_local_rank()
        with together():
            found = run(model, [batches[index]], backward=options.backward)
        is_exact = expected is not None and expected.is_repeatable and process.world_size == 1 and not options.compile
        comparison = Comparison(process, source_of, is_exact)
        comparison.forward(expected, found, index)
        if options.backward:
            comparison.backward(expected, model, regions)
        rows += comparison.rows
        numbers = comparison.numbers
        if any(everywhere(any(row["level"] == "forward" for row in rows))):
            with together():
                numbers["first_divergence"] = _first_divergence(first, model, batches[0], process, is_exact=is_exact)
        share = {
            "rows": rows,
            "undecided": comparison.undecided,
            "dtype": _dtype_of(model),
            "read": ledger.bytes_read,
            "nbytes": ledger.nbytes,
            **numbers,
        }
        share["by_tensor"] = comparison.gradients
        everyone = everywhere(share)
    noted = [each for each in configs if each.is_noted]
    if noted:
        said = [
            f"{each.key} ({each.reference} in the reference, {each.checkpoint} in the checkpoint)" for each in noted
        ]
        log.note(f"configs differ in what changes nothing that is compared: {', '.join(said)}")
    if left:
        names = ", ".join(f"{name} ({reason})" for name, reason in [*left.items()][:_MOST_NAMED])
        more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
        log.note(
            f"the reference has tensors that its class does not compute with, and they were not compared: {names}{more}"
        )
    inputs = batches[0]
    if inputs.missing:
        log.note(
            f"{model.config.architectures[0]}: no {' and no '.join(inputs.missing)} among the inputs, for ckptx does "
            "not know the form that this class takes; what works on them was compared by its bytes alone"
        )
    worst = _worst_by_tensor(everyone, source_of)
    report = _report_of(len(ledger.loaded), options, done.wrapped_layers, everyone, inputs.kinds, worst)
    return stopwatch.stop(replace(report, warnings=list(log.notes)))


# ------------------------------------------------------------------------------------------------------ the two sides


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints; `fallback` has the config of one without."""

    path: Path
    fallback: Path
    options: RunOptions

    @contextmanager
    def opened(self) -> Iterator[Source]:
        trust = self.options.trust_remote_code
        with open_source(self.path, trust_remote_code=trust) as source:
            if source.config is not None or self.fallback == self.path:
                yield source
                return
        with open_source(self.fallback, trust_remote_code=trust) as other:
            config = other.config
        with open_source(self.path, config=config, trust_remote_code=trust) as source:
            yield source

    def _home(self, source: Source) -> Path:
        """The directory of the config."""
        if source.view.catalog.config is not None:
            return directory_of_config(source.view.catalog)
        with open_source(self.fallback, trust_remote_code=self.options.trust_remote_code) as other:
            if other.view.catalog.config is None:
                raise InputError(
                    f"{self.path}: found no config.json beside it or the reference, needed one to build it"
                )
            return directory_of_config(other.view.catalog)

    def config(self) -> dict[str, Any]:
        """What the config class makes of the file."""
        with self.opened() as source:
            name, _, config = read_config(self._home(source), trust_remote_code=self.options.trust_remote_code)
        return {**config.to_dict(), "architectures": [name]}

    def tokens_used(self) -> frozenset[str]:
        """See `execution.tokens_used`."""
        with self.opened() as source:
            return tokens_used(self.model(source))

    def model(self, source: Source) -> nn.Module:
        """On the meta device."""
        options = self.options
        return build_model(
            self._home(source),
            dtype=_DTYPES[options.dtype],
            stored=source.dtype,
            trust_remote_code=options.trust_remote_code,
            untied=source.untied(),
        )

    def batches(self) -> list[Inputs]:
        """Refuses what cannot work before anything is built; gives a batch for each data-parallel rank."""
        options = self.options
        with self.opened() as source:
            if source.architecture is None or source.config is None:
                raise UnsupportedError(f"{self.path}: its class is unknown, needed one of transformers to run it")
            check_heads(source.config, options.dims.tp, source.architecture)
            config = self.model(source).config.to_dict()  # with the defaults of the class
        dims = options.dims
        return [inputs_for(config, rows=_ROWS, seed=index, shards=dims.tp) for index in range(dims.dp_shard)]

    def whole(self, process: Process) -> nn.Module:
        """Loaded, in one piece."""
        with self.opened() as source:
            model = self.model(source)
            materialize(model, process.device)
            load_from(model, source)
        return model

    def build(self, mesh: DeviceMesh) -> tuple[nn.Module, Parallelized, dict[str, tuple[str, ...]]]:
        """Parallel and without storage; and the names on disk of each tensor."""
        options = self.options
        with self.opened() as source:
            assert source.config is not None
            model = self.model(source)
            plan = find_plan(model, source.config, options.tp_plan) if options.dims.tp > 1 else None
            stored = dict(source.stored)
        done = parallelize(
            model,
            mesh,
            plan,
            activation_checkpointing=options.activation_checkpointing,
            scope=options.scope,
            compile=options.compile,
        )
        return model, done, stored


def _rows_of(configs: Sequence[ConfigDifference]) -> list[dict[str, Any]]:
    return [
        {"level": "config", "rank": 0, "name": each.key, "reference": each.reference, "checkpoint": each.checkpoint}
        for each in configs
        if not each.is_noted
    ]


def _left(found: Mapping[str, str]) -> dict[str, str]:
    """Of what nothing read, what would be of a model."""
    return {name: reason for name, reason in found.items() if reason in (NO_PLACE, UNKNOWN)}


def _added(checkpoint: Mapping[str, str], reference: Mapping[str, str]) -> list[dict[str, Any]]:
    """Tensors that nothing reads, and that the reference does not have either."""
    return [
        {"level": "bytes", "rank": 0, "name": name, "what": f"{reason}, and not in the reference"}
        for name, reason in checkpoint.items()
        if name not in reference
    ]


def _regions_of(done: Parallelized) -> RegionsOf | None:
    layout = done.layout
    if layout is None:
        return None

    def regions(name: str) -> list[Region] | None:
        return layout.local_regions(name) if layout.placements.get(name) is not None else None

    return regions


def _run_reference(side: _Side, batches: Sequence[Inputs], process: Process, options: RunOptions) -> Reference:
    """The reference on one device, and with its embeddings moved by one unit in the last place."""
    model = side.whole(process)
    outcome = run(model, batches, backward=options.backward)
    is_repeatable = process.device.type == "cpu" or outcome.is_equal(run(model, batches, backward=options.backward))
    moved = Reference(outcome, 0.0, 0.0, dict.fromkeys(outcome.gradients, 0.0), is_repeatable)
    for draw in range(noise.DRAWS):
        with noise.moved_embeddings(model, draw):
            other = run(model, batches, backward=options.backward)
        moved = Reference(
            outcome,
            max(moved.logits, *(furthest(a, b) for a, b in zip(outcome.logits, other.logits, strict=True))),
            max(moved.loss, abs(outcome.loss - other.loss)),
            {name: max(before, furthest(outcome.gradients[name], other.gradients[name]))
             for name, before in moved.gradients.items()},
            is_repeatable,
        )  # fmt: skip
    return moved


def _first_divergence(
    side: _Side, model: nn.Module, inputs: Inputs, process: Process, *, is_exact: bool
) -> dict[str, Any] | None:
    """The first module, in the order of the reference, whose output is further away than its noise allows.

    Outputs are compared where they have the shape of the reference's: not inside of modules that TP cuts, and not
    where experts get other tokens. Every rank runs the same batch as the reference.
    """
    ours = _observed(model, inputs)
    if process.rank:
        return None
    reference = side.whole(process)
    seen = _observed(reference, inputs)
    with noise.moved_embeddings(reference, 0):
        other = _observed(reference, inputs)
    for call, output in seen.items():
        found, moved = ours.get(call), other.get(call)
        if found is None or moved is None or not found.shape == moved.shape == output.shape:
            continue
        limit = 0.0 if is_exact else noise.ALLOWED * furthest(output, moved)
        distance = furthest(output, found)
        if not distance <= limit:
            return {"module": call.module, "max_abs": distance, "limit": limit}
    return None


def _observed(model: nn.Module, inputs: Inputs) -> dict[Call, torch.Tensor]:
    """What each call of a module gave, whole, on the CPU, as it was before anything was added to it in place."""
    found: dict[Call, torch.Tensor] = {}
    observed(model, inputs, lambda call, output: found.__setitem__(call, execution.whole(output).to("cpu", copy=True)))
    return found


def _report_of(
    tensors: int,
    options: RunOptions,
    wrapped_layers: int,
    everyone: list[dict[str, Any]],
    kinds: Sequence[str],
    worst: list[dict[str, Any]],
) -> RunReport:
    """What all ranks found, in one report."""
    dims = options.dims
    rows = [row for share in everyone for row in share["rows"]]
    undecided = _once(row for share in everyone for row in share["undecided"])
    first = everyone[0]
    ranks = [
        {
            "rank": rank,
            "bytes_read": share["read"],
            "bytes": share["nbytes"],
            "differing": len(share["rows"]),
            **{name: _plain(share.get(name)) for name in ("max_abs", "kl", "cosine", "grad_max_abs")},
        }
        for rank, share in enumerate(everyone)
    ]
    by_gradients: dict[str, Any] = {"gradients": None, "grad_max_abs": None, "grad_of_limit": None}
    if options.backward:
        by_gradients = {
            "gradients": first["gradients"],
            "grad_max_abs": max(share["grad_max_abs"] for share in everyone),
            "grad_of_limit": max((share["grad_of_limit"] for share in everyone), key=lambda found: found[1]),
        }
    found = {
        "differing": rows,
        "undecided": undecided,
        "max_abs": max(share["max_abs"] for share in everyone),
        "max_abs_limit": first["max_abs_limit"],
        "logits_deviation": first["logits_deviation"],
        "kl": max((share["kl"] for share in everyone), key=_badness),
        "cosine": max((share["cosine"] for share in everyone), key=lambda found: _badness(-found)),
        "loss": first["loss"],
        "loss_reference": first["loss_reference"],
        "loss_limit": first["loss_limit"],
        "first_divergence": first.get("first_divergence"),
        "gradient_differences": worst,
        **by_gradients,
    }
    return RunReport(
        command="verify",
        exit=1 if rows or (undecided and options.strict) else 0,
        tensors=tensors,
        bytes_read=sum(share["read"] for share in everyone),
        ranks=ranks,
        compared=tensors,
        world_size=dims.world_size,
        layout={"tp": dims.tp, "pp": dims.pp, "dp_shard": dims.dp_shard},
        stages=1,
        inputs=list(kinds),
        compute_dtype=first["dtype"],
        wrapped_layers=wrapped_layers,
        bytes_read_per_rank=[share["read"] for share in everyone],
        **{name: _plain(value) for name, value in found.items()},
    )


def _once(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each name the first row: a limit is the same on every rank."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["level"], row["name"]), row)
    return list(found.values())


def _badness(value: float) -> tuple[bool, float]:
    """What to order numbers by: on whichever rank one is none, that is the worst; `max` takes what comes first."""
    return isnan(value), value


def _worst_by_tensor(everyone: list[dict[str, Any]], stored: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """Of each gradient, how far it is away on the rank where it is furthest."""
    found: dict[str, tuple[int, float, float]] = {}
    for rank, share in enumerate(everyone):
        for name, (distance, limit) in share["by_tensor"].items():
            if name not in found or distance > found[name][1]:
                found[name] = rank, distance, limit
    return [
        {**difference("gradients", rank, name, stored), "max_abs": _plain(distance), "limit": _plain(limit)}
        for name, (rank, distance, limit) in found.items()
    ]


def _dtype_of(model: nn.Module) -> str:
    """What the parameters are computed in: "float32", or more than one: "bfloat16 and float32"."""
    return " and ".join(sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()}))


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite become texts."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
