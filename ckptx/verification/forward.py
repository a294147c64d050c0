"""`verify --run`: what a checkpoint computes under TP x PP x FSDP2, held against the reference model.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptx.report.documents.running import RunReport
from ckptx.report.report import Log, Stopwatch
from ckptx.runtime.distributed import Process, alone, data_index, everywhere, mesh_of, process_group, together
from ckptx.runtime.ledger import NO_PLACE, UNKNOWN
from ckptx.verification import execution, memory, noise
from ckptx.verification.comparison import Comparison, Reference, difference, furthest
from ckptx.verification.configs import ConfigDifference, compare_configs
from ckptx.verification.execution import Call, Outcome, observed, run
from ckptx.verification.inputs import windows
from ckptx.verification.inputs.batch import Inputs
from ckptx.verification.loaded import Loaded, in_all
from ckptx.verification.reached import unreached
from ckptx.verification.run_report import report_of, worst_by_tensor
from ckptx.verification.side import RunOptions, Side, both_sides
from ckptx.verification.staging import stage_the

_MOST_NAMED = 3  # in a note


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
        EnvironmentProblem: There is not enough memory; the message says how much it takes.
        CkptxError: Whatever else is in the way, on whichever rank.
    """
    stopwatch = Stopwatch()
    with process_group(options.device, options.backend) as process:
        mesh = mesh_of(options.dims, process.device.type)
        with together():
            first, second, seen, other = both_sides(reference, checkpoint, options)
            configs = compare_configs(seen.config, other.config, used=other.tokens_used)
            memory.check(seen, options, process)
        staging = stage_the(second, other, process, log) if options.dims.pp > 1 else None
        microbatches = staging.microbatches if staging is not None else 1
        with together():
            batches = second.batches(other, microbatches)
            expected = _run_reference(first, batches, process, options) if process.rank == 0 else None
        with together():
            loaded = Loaded(second, mesh, staging)
            loaded.load(process.device)
        with together():
            wrong, without_place = loaded.held_against(first)
            left = _left(without_place)
        rows = _rows_of(configs) if process.rank == 0 else []
        left, added = in_all(everywhere(left)), in_all(everywhere(_left(loaded.unread)))  # on no stage
        rows += _added(added, left) if process.rank == 0 else []
        rows += [difference("bytes", process.rank, name, loaded.stored) for name in wrong]
        index = data_index(mesh) * microbatches
        own = batches[index : index + microbatches]
        with together() if staging is None else alone():
            found = loaded.run(own, backward=options.backward)
        comparison = Comparison(process, loaded.stored, _is_exact(expected, process, options))
        comparison.forward(expected, found, index)
        if options.backward:
            comparison.backward(expected, loaded.held(), loaded.copied)
        rows += comparison.rows
        if staging is not None:
            rows = [{**row, "stage": staging.stage_of(row)} for row in rows]
        numbers = comparison.numbers
        if expected is not None:
            numbers["unreached"] = unreached(expected.outcome.gradients, seen) if options.backward else None
        expected = None  # its gradients have been compared: the room is for what comes
        if staging is None and any(everywhere(any(row["level"] == "forward" for row in rows))):
            with together():
                numbers["first_divergence"] = _first_divergence(
                    first, loaded.models[0], batches[0], process, is_exact=comparison.is_exact
                )
        share = {
            "rows": rows,
            "undecided": comparison.undecided,
            "dtype": _dtype_of(loaded.models),
            "read": loaded.bytes_read,
            "nbytes": loaded.nbytes,
            "names": loaded.names,
            "wrapped": loaded.wrapped_layers,
            **numbers,
        }
        share["by_tensor"] = comparison.gradients
        everyone = everywhere(share)
    inputs, name = batches[0], loaded.models[0].config.architectures[0]
    _note(log, name, configs, left, inputs, everyone[0].get("unreached"), first.apart | second.apart)
    worst = worst_by_tensor(everyone, loaded.stored)
    small = {key: [value, windows.SMALL] for key, value in {**seen.windows, **other.windows}.items()}
    report = report_of(options, everyone, inputs, small, worst, staging)
    return stopwatch.stop(replace(report, warnings=list(log.notes)))


def _note(
    log: Log,
    name: str,
    configs: Sequence[ConfigDifference],
    left: Mapping[str, str],
    inputs: Inputs,
    not_reached: Sequence[Mapping[str, Any]] | None,
    apart: frozenset[str],
) -> None:
    """What was not compared, or is no difference though it looks like one."""
    noted = [
        f"{each.key} ({each.reference} in the reference, {each.checkpoint} in the checkpoint)"
        for each in configs
        if each.is_noted
    ]
    if noted:
        log.note(f"configs differ in what changes nothing that is compared: {', '.join(noted)}")
    if apart:
        log.note(
            f"one checkpoint ties {_some(sorted(apart))}, the other stores it by itself: both ran with a parameter of "
            "its own, so that training goes on with two in one and with one in the other"
        )
    if left:
        log.note(
            "the reference has tensors that its class does not compute with, and they were not compared: "
            f"{_some([f'{each} ({reason})' for each, reason in left.items()])}"
        )
    if inputs.missing:
        log.note(
            f"{name}: no {' and no '.join(inputs.missing)} among the inputs, for ckptx does not know the form that "
            "this class takes; what works on them was compared by its bytes alone"
        )
    if not_reached:
        said = [
            f"{row['name']} of {_experts(row['experts'])}" if "experts" in row else str(row["name"])
            for row in not_reached
        ]
        log.note(f"{name}: no gradient reaches {_some(said)}; how these compute was compared forward at most")


def _experts(numbers: Sequence[int]) -> str:
    return f"expert {numbers[0]}" if len(numbers) == 1 else f"experts {_some([*map(str, numbers)])}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


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


def _is_exact(expected: Reference | None, process: Process, options: RunOptions) -> bool:
    """Whether both sides do the same operations in the same order: stages of a pipeline reorder nothing."""
    if expected is None or not expected.is_repeatable or options.compile:
        return False
    return process.world_size == options.dims.pp


def _run_reference(side: Side, batches: Sequence[Inputs], process: Process, options: RunOptions) -> Reference:
    """The reference on one device, and with its embeddings moved by one unit in the last place.

    Of the moved runs only distances are kept, each taken when its gradient is complete.
    """
    model = side.whole(process)
    outcome = run(model, batches, backward=options.backward)
    is_repeatable = process.device.type == "cpu" or _is_repeated(model, batches, outcome, options)
    moved = Reference(outcome, 0.0, 0.0, dict.fromkeys(outcome.gradients, 0.0), is_repeatable)
    for draw in range(noise.DRAWS):
        distances = dict.fromkeys(outcome.gradients, 0.0)

        def measure(name: str, gradient: torch.Tensor, distances: dict[str, float] = distances) -> None:
            distances[name] = furthest(outcome.gradients[name], gradient)

        with noise.moved_embeddings(model, draw):
            other = run(model, batches, backward=options.backward, see=measure)
        moved = Reference(
            outcome,
            max(moved.logits, *(furthest(a, b) for a, b in zip(outcome.logits, other.logits, strict=True))),
            max(moved.loss, abs(outcome.loss - other.loss)),
            {name: max(before, distances[name]) for name, before in moved.gradients.items()},
            is_repeatable,
        )
    return moved


def _is_repeated(model: nn.Module, batches: Sequence[Inputs], outcome: Outcome, options: RunOptions) -> bool:
    """Whether the device gives the same again, bit for bit."""
    differing: list[str] = []

    def compare(name: str, gradient: torch.Tensor) -> None:
        if not torch.equal(outcome.gradients[name], gradient):
            differing.append(name)

    again = run(model, batches, backward=options.backward, see=compare)
    logits = all(torch.equal(a, b) for a, b in zip(outcome.logits, again.logits, strict=True))
    return not differing and logits and outcome.loss == again.loss


def _first_divergence(
    side: Side, model: nn.Module, inputs: Inputs, process: Process, *, is_exact: bool
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


def _dtype_of(models: Iterable[nn.Module]) -> str:
    """What the parameters are computed in: "float32", or more than one: "bfloat16 and float32"."""
    dtypes = {str(each.dtype).removeprefix("torch.") for model in models for each in model.parameters()}
    return " and ".join(sorted(dtypes))
