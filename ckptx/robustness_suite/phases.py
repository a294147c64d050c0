"""Phases: each tests one property of the checkpoints of a training run.

0 initial logits     the sharded model gives the same logits as from_pretrained in one process
1 uninterrupted run  two runs with the same seed match; measures the noise, from which the tolerances of losses and
                     logits follow
2 replicas           replicated state matches across ranks, and a loaded checkpoint gives the same logits
3 load and save      a checkpoint that is loaded and saved keeps all state, with synchronous and asynchronous saves
4 export             exported HF files give the same logits in stock transformers
5 other layouts      a checkpoint resharded for other meshes is bit-identical, and trains equally within the noise
6 resume             a run resumed from each saved step equals the uninterrupted run; the first one in new processes
7 killed saves       after a killed save, the last complete step can be loaded, and no incomplete step looks complete
"""

from __future__ import annotations

import filecmp
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from ckptx.adapters.state_dicts import is_lora_name
from ckptx.api.convert import convert
from ckptx.api.merge import merge
from ckptx.api.reshard import reshard
from ckptx.architecture.lookup import find_architecture
from ckptx.comparison.contents import verify_bytes
from ckptx.errors import InputError, OutputError, UnsupportedError, UsageError
from ckptx.formats.dcp.reader import locate_payloads
from ckptx.formats.hf.reader import read_json
from ckptx.formats.registry import open_checkpoint
from ckptx.mapping.names import is_optimizer, is_trainer_state
from ckptx.options.conversion import Names
from ckptx.options.verify import VerifyOptions
from ckptx.robustness_suite.kills import select_kill_points
from ckptx.robustness_suite.oracles import (
    Difference,
    Verdict,
    check_finite,
    compare,
    compare_measurements,
    compare_replicas,
    compare_with_noise,
)
from ckptx.robustness_suite.report_builder import Findings
from ckptx.robustness_suite.run_requests import KillPoint, Logits, RunResult, max_difference
from ckptx.robustness_suite.session import PERTURBED_RUNS, Session, losses_of_steps
from ckptx.robustness_suite.stored_items import read_items
from ckptx.runtime.training.checkpoints import LATEST
from ckptx.runtime.training.dropout_config import has_dropout
from ckptx.runtime.training.recipe import AdapterBlock, ChecksBlock, LayoutBlock, Recipe
from ckptx.transfer.digest_sink import digest_tensor
from ckptx.transfer.stream import TensorReader

_DEFAULTS = ChecksBlock()
# State of a trainer in memory that is equal on every rank and mesh.
_RANK_INDEPENDENT_ORACLES = ("scheduler", "step", "samples", "learning rate")


class Phase(NamedTuple):
    """One phase.

    Attributes:
        number: Number of the phase, for `--phases`.
        name: Name of the phase.
        title: Property that the phase tests.
        run: Function that runs the phase.
    """

    number: int
    name: str
    title: str
    run: Callable[[Session], Findings]


def check_initial_logits(session: Session) -> Findings:
    """Run phase 0: compare the logits of the sharded model with those of stock transformers."""
    reference, noise = session.run_task("compute_source_logits", session.recipe, session.source, PERTURBED_RUNS)
    logits = session.run_task("compute_runtime_logits", session.make_request())
    return Findings([_logits_verdict(session, reference, logits, noise)])


def check_uninterrupted_run(session: Session) -> Findings:
    """Run phase 1: compare the uninterrupted run with a second one, and measure the noise."""
    uninterrupted, repeated = session.uninterrupted_result, session.repeated_result
    findings = Findings(
        [_sharding_verdict(session, uninterrupted)] if session.recipe.checks.sharded is not None else []
    )
    findings.verdicts += _finite_verdicts(uninterrupted)
    if session.is_exact:
        for step in session.saved_steps:
            findings.verdicts += compare(uninterrupted.items[step], repeated.items[step])
        findings.verdicts.append(_loss_verdict(session, uninterrupted, repeated, noise=None))
    else:
        findings.notes.append(
            "two runs with the same seed may differ in bits on this device; their difference is noise"
        )
    noise = session.noise
    findings.notes.append(
        f"noise of the loss {max(noise['loss'].values()):.3g}, of logits {max(noise['logits'].values()):.3g}; "
        "checks of other logits measure their own"
    )
    return _merge_verdicts(findings)


def _with_save_mode(recipe: Recipe, is_asynchronous: bool) -> Recipe:
    """Return the recipe with saves in the foreground or in the background."""
    return structs.replace(recipe, checkpoint=structs.replace(recipe.checkpoint, asynchronous=is_asynchronous))


def check_replicas(session: Session) -> Findings:
    """Run phase 2: compare replicated state between ranks, and the logits of a reloaded checkpoint."""
    uninterrupted, last = session.uninterrupted_result, session.saved_steps[-1]
    findings = Findings([compare_replicas(uninterrupted.shard_digests[step]) for step in session.saved_steps])
    with findings.catch_read_errors(f"step-{last}"):
        logits = session.run_task(
            "compute_runtime_logits", session.make_request(resume_from=session.uninterrupted_checkpoint(last))
        )
        noise = None if session.is_exact else session.max_noise("logits")
        findings.verdicts.append(_logits_verdict(session, session.reference_logits, logits, noise))
    merged = _merge_verdicts(findings)
    has_replicas = any(each.oracle == "replicas" and each.ok is not None for each in merged.verdicts)
    return merged if has_replicas else replace(merged, title="a loaded checkpoint gives the same logits")


def check_load_and_save(session: Session) -> Findings:
    """Run phase 3: load a checkpoint, save it again, and compare both."""
    step = session.resume_step
    source = session.uninterrupted_checkpoint(step)
    findings = Findings()
    for name, is_asynchronous in (("saved-again", False), ("saved-again-async", True)):
        recipe = _with_save_mode(session.recipe, is_asynchronous)
        with findings.catch_read_errors(f"step-{step}"):
            request = session.make_request(
                resume_from=source,
                last_step=0,
                saves={step: session.checkpoint_path(name, step)},
                snapshot_steps=[step],
            )
            result = session.train(name, replace(request, recipe=recipe))
            findings.verdicts += compare(session.uninterrupted_result.items[step], result.items[step])
            findings.verdicts.append(_compare_files(source, session.checkpoint_path(name, step)))
    return _merge_verdicts(findings)


def check_export(session: Session) -> Findings:
    """Run phase 4: export the last checkpoint, and compare it and its logits in stock transformers."""
    last = session.saved_steps[-1]
    checkpoint, exported = session.uninterrupted_checkpoint(last), session.out / "export"
    findings = Findings()
    if session.recipe.adapter is not None:
        return _check_export_of_adapter(session, session.recipe.adapter, checkpoint)
    architecture = find_architecture(read_json(session.source / "config.json"))
    is_known = architecture is not None and architecture.name_patterns
    names: Names | None = "hf" if is_known else None  # experts that are fused in the run are separate on the Hub
    with findings.catch_read_errors(f"step-{last}"):
        convert("dcp2hf", checkpoint, exported, base=str(session.source), names=names, overwrite=True)
        findings.verdicts.append(_compare_names(session.source, exported))
        findings.verdicts.append(_compare_tensors(checkpoint, exported))
        # This noise is that of a forward pass; that of the session includes training.
        logits, noise = session.run_task("compute_source_logits", session.recipe, exported, PERTURBED_RUNS)
        findings.verdicts.append(_logits_verdict(session, session.reference_logits, logits, noise))
    return _merge_verdicts(findings)


def _check_export_of_adapter(session: Session, adapter: AdapterBlock, checkpoint: Path) -> Findings:
    """Export the adapter of the last checkpoint, merge it into the model that it was trained on, and compare both.

    Args:
        session: Session of the phase.
        adapter: Settings of the adapter.
        checkpoint: The last checkpoint, with the frozen weights and the adapter.
    """
    peft, merged, source = session.out / "adapter", session.out / "merged", str(session.source)
    findings = Findings(title="the exported adapter, merged into its base model, gives the same logits in transformers")
    with findings.catch_read_errors(checkpoint.name):
        convert("to-peft", checkpoint, peft, base=source, alpha=adapter.alpha, overwrite=True)
        findings.verdicts.append(_compare_adapter(checkpoint, peft))
        merge(source, peft, merged, overwrite=True)
        findings.verdicts.append(_compare_names(session.source, merged))
        logits, noise = session.run_task("compute_source_logits", session.recipe, merged, PERTURBED_RUNS)
        findings.verdicts.append(_logits_verdict(session, session.reference_logits, logits, noise))
    return _merge_verdicts(findings)


def check_other_layouts(session: Session) -> Findings:
    """Run phase 5: reshard a checkpoint for other meshes, and train there."""
    step, findings = session.resume_step, Findings()
    layouts = session.recipe.checks.layouts
    if not layouts:
        return Findings(skip_reason="the recipe has no other layouts; add checks.layouts")
    unavailable = [each for each in layouts if not session.supports_world_size(each.dims.world_size)]
    notes = [
        f"{session.layout_text(each)}: not run, requires {each.dims.world_size} ranks, which are not available"
        for each in unavailable
    ]
    if len(unavailable) == len(layouts):
        return Findings(skip_reason="; ".join(notes))
    findings.notes += notes
    if session.recipe.adapter is not None:
        findings.title = "loaded on another mesh, state is equal and training matches"
    recipe_without_dropout = structs.replace(
        session.recipe, training=structs.replace(session.recipe.training, dropout=0.0)
    )
    if _trains_with_dropout(session):
        verb = "resharded for" if session.recipe.adapter is None else "loaded on"
        findings.title = f"{verb} another mesh, state is equal and training without dropout matches"
        findings.notes.append(
            "these runs, and the run that they are compared with (without-dropout), have dropout 0, because its masks "
            "depend on the mesh"
        )
    checkpoint = session.uninterrupted_checkpoint(step)
    base_result: RunResult | None = None
    for number, layout in enumerate(layouts, 1):
        if layout in unavailable:
            continue
        layout_text = session.layout_text(layout)
        with (
            findings.catch_read_errors(f"step-{step} on {layout_text}"),
            _add_key_to_errors(f"checks.layouts[{number - 1}]"),
        ):
            if base_result is None:
                request = replace(
                    session.make_request(resume_from=checkpoint, snapshot_steps=[step]), recipe=recipe_without_dropout
                )
                base_result = session.train("without-dropout", request, compared_with=None)
            findings.verdicts += _check_layout(session, layout, number, base_result, recipe_without_dropout)
    return _merge_verdicts(findings)


def _trains_with_dropout(session: Session) -> bool:
    dropout = session.recipe.training.dropout
    return has_dropout(read_json(session.source / "config.json")) if dropout is None else dropout > 0


def _check_layout(
    session: Session, layout: LayoutBlock, number: int, base_result: RunResult, recipe: Recipe
) -> Iterator[Verdict]:
    """Reshard a checkpoint for another mesh, load it there, save it, and continue training.

    Args:
        session: Session of the phase.
        layout: Layout of the other mesh.
        number: Number of the layout in `checks.layouts`, from 1; part of the names of its run and folders.
        base_result: Result of the same training on the mesh of the recipe.
        recipe: Recipe of both runs, without dropout.
    """
    step, layout_text, dims = session.resume_step, session.layout_text(layout), layout.dims
    checkpoint = session.uninterrupted_checkpoint(step)
    resharded, saved = session.out / f"layout-{number}-resharded", session.checkpoint_path(f"layout-{number}", step)
    compare_models = _compare_tensors
    if recipe.adapter is None:
        reshard(checkpoint, resharded, tp=dims.tp, pp=dims.pp, dp_shard=dims.dp_shard, to="dcp", overwrite=True)
        yield _compare_tensors(checkpoint, resharded, layout_text)
    else:  # `reshard` does not accept an adapter next to its model; the trainer loads the checkpoint on any mesh
        resharded, compare_models = checkpoint, _compare_stored_tensors
    request = replace(
        session.make_request(resume_from=resharded, snapshot_steps=[step], saves={step: saved}, layout=layout),
        recipe=recipe,
    )
    result = session.train(f"layout-{number}", request, compared_with="without-dropout")
    # Rank 0 only, as the numbers of ranks may differ.
    yield from compare(base_result.start_items[:1], result.start_items[:1], _RANK_INDEPENDENT_ORACLES)
    yield compare_models(checkpoint, saved, layout_text)
    yield _loss_verdict(session, base_result, result, session.max_noise("loss"))
    yield from _compare_state(checkpoint, resharded, layout_text)
    yield from _compare_state(checkpoint, saved, layout_text)


@contextmanager
def _add_key_to_errors(key: str) -> Iterator[None]:
    """Prefix errors of layouts that a model does not support with the key of the recipe."""
    try:
        yield
    except (UsageError, UnsupportedError) as error:
        raise type(error)(f"{key}: {error}") from error


def check_resume(session: Session) -> Findings:
    """Run phase 6: resume from each saved step, and compare with the uninterrupted run."""
    findings = Findings()
    noise = None if session.is_exact else session.max_noise("loss")
    steps = [each for each in session.saved_steps if each < session.recipe.training.steps]
    for number, step in enumerate(steps, 1):
        later_steps = [each for each in session.saved_steps if each > step]
        request = session.make_request(resume_from=session.uninterrupted_checkpoint(step), snapshot_steps=later_steps)
        with findings.catch_read_errors(f"step-{step}"):
            if number > 1:
                result = session.train(f"resumed-{number}", request)
            else:
                with session.fresh_ranks() as fresh:
                    result = session.train("resumed", request, fresh)
            start_verdicts = compare(session.uninterrupted_result.items[step], result.start_items)
            findings.verdicts += start_verdicts
            # Later steps can only be equal if the start is.
            if session.is_exact and all(each.ok is not False for each in start_verdicts):
                for each in later_steps:
                    findings.verdicts += compare(session.uninterrupted_result.items[each], result.items[each])
            findings.verdicts += _finite_verdicts(result)
            findings.verdicts.append(
                _loss_verdict(session, session.uninterrupted_result, result, noise, first_step=step)
            )
    return _merge_verdicts(findings)


def check_kills(session: Session) -> Findings:
    """Run phase 7: kill ranks during saves, and check the remaining steps and the next save."""
    findings, good_step = Findings(), session.resume_step
    source = session.uninterrupted_checkpoint(good_step)
    cases = ((False, False), (False, True), (True, False))  # (is_asynchronous, kills_all_ranks)
    operations: dict[bool, list[str]] = {}  # is_asynchronous -> file operations of a save on rank 0
    for number, (is_asynchronous, kills_all_ranks) in enumerate(cases, 1):
        recipe = _with_save_mode(session.recipe, is_asynchronous)
        request = replace(session.make_request(resume_from=source), recipe=recipe)
        if is_asynchronous not in operations:
            root = _create_root(session, f"rehearsed-{number}", source)
            operations[is_asynchronous] = session.run_task("save_and_record", request, KillPoint(root=root))[0]
        operation = select_kill_points(operations[is_asynchronous], len(cases))[number - 1]
        root = _create_root(session, f"killed-{number}", source)
        steps_before = session.run_task("check_surviving_steps", root, good_step, {})
        killed_ranks = session.run_until_killed(
            "save_and_record", request, KillPoint(root=root, operation=operation, kills_all_ranks=kills_all_ranks)
        )
        session.apply_file_fault(f"killed-{number}", root)
        surviving = session.run_task("check_surviving_steps", root, good_step, steps_before.digests)
        violations = list(surviving.violations)
        if not killed_ranks:
            violations.append(f"{operation}: no rank was killed at this operation")
        try:
            session.run_task("save_and_record", request, KillPoint(root=root))
        except (InputError, OutputError) as error:
            violations.append(f"the next save: {error}")
        else:
            steps_after = session.run_task("check_surviving_steps", root, good_step + 1, steps_before.digests)
            violations += [f"after the next save: {each}" for each in steps_after.violations]
        session.kills.append(
            {
                "operation": operation,
                "ranks": killed_ranks,
                "is_async": is_asynchronous,
                "latest_step": surviving.latest,
                "ok": not violations,
            }
        )
        differences = [Difference("readable", operation, None, "only the last good step", each) for each in violations]
        findings.verdicts.append(Verdict("readable", 1, differences))
    return _merge_verdicts(findings)


def _create_root(session: Session, name: str, source: Path) -> Path:
    """Create a directory of steps whose only step is a copy of `source`, which the file `latest` names."""
    root = session.folder(name)
    session.run_once(_publish_first_step, root, source)
    return root


def _publish_first_step(root: Path, source: Path) -> None:
    shutil.copytree(source, root / source.name)
    (root / LATEST).write_text(f"{source.name}\n", encoding="utf-8")


PHASES: tuple[Phase, ...] = (
    Phase(0, "initial logits", "the sharded model gives the same logits as from_pretrained", check_initial_logits),
    Phase(
        1, "uninterrupted run", "two runs with the same seed match; measures numerical noise", check_uninterrupted_run
    ),
    Phase(
        2,
        "replicas",
        "replicated state matches across ranks; a loaded checkpoint gives the same logits",
        check_replicas,
    ),
    Phase(3, "load and save", "a checkpoint that is loaded and saved keeps all state", check_load_and_save),
    Phase(4, "export", "exported HF files give the same logits in transformers", check_export),
    Phase(5, "other layouts", "resharded for another mesh, state is equal and training matches", check_other_layouts),
    Phase(6, "resume", "a resumed run equals an uninterrupted run", check_resume),
    Phase(7, "killed saves", "after a killed save, the last complete step can be loaded", check_kills),
)


# --------------------------------------------------------------------------------------------- verdicts


def _merge_verdicts(findings: Findings) -> Findings:
    """Merge the verdicts of each oracle into one with all items that differ.

    Its measurement is the largest one of the verdicts that failed, or of all if none did; NaN is above all numbers.
    """
    by_oracle: dict[str, list[Verdict]] = {}
    for each in findings.verdicts:
        by_oracle.setdefault(each.oracle, []).append(each)
    verdicts = []
    for oracle, group in by_oracle.items():
        failed = [each for each in group if each.ok is False]
        worst = max(failed or group, key=_magnitude)
        verdicts.append(
            worst._replace(
                oracle=oracle,
                compared=sum(each.compared for each in group),
                differences=[difference for each in group for difference in each.differences],
            )
        )
    return replace(findings, verdicts=verdicts)


def _magnitude(verdict: Verdict) -> float:
    """Return the measurement of a verdict: -1 if it has none, infinity for NaN."""
    if verdict.value is None:
        return -1.0
    return math.inf if math.isnan(verdict.value) else verdict.value


def _finite_verdicts(result: RunResult) -> list[Verdict]:
    return [
        *(check_finite(items) for items in (result.start_items, *result.items.values())),
        check_finite((), result.losses),
    ]  # fmt: skip


def _sharding_verdict(session: Session, result: RunResult) -> Verdict:
    num_sharded, num_parameters = result.sharded_counts
    is_sharded, must_be_sharded = num_sharded > 0, session.recipe.checks.sharded
    words = {True: "sharded", False: "not sharded"}
    differences = (
        [
            Difference(
                "sharded",
                f"{num_sharded} of {num_parameters} parameters",
                None,
                words[bool(must_be_sharded)],
                words[is_sharded],
            )
        ]
        if is_sharded != must_be_sharded
        else []
    )
    return Verdict("sharded", num_parameters, differences)


def _loss_verdict(
    session: Session, reference: RunResult, actual: RunResult, noise: float | None, *, first_step: int = 0
) -> Verdict:
    """Compare the losses after `first_step`, the step from which a run resumed; a missing loss is NaN.

    `noise` is None if equal bits are required.
    """
    steps = sorted({each for each in reference.losses if each > first_step} | actual.losses.keys())
    noise_factor = session.recipe.checks.loss_noise_factor
    pairs = zip(losses_of_steps(reference.losses, steps), losses_of_steps(actual.losses, steps), strict=True)
    return compare_measurements("loss", pairs, noise, noise_factor, _DEFAULTS.loss_noise_factor)


def _logits_verdict(session: Session, reference: Logits, actual: Logits, noise: float | None) -> Verdict:
    """Compare the logits of the probe samples; `noise` is None if equal bits are required."""
    noise_factor = session.recipe.checks.logits_noise_factor
    return compare_with_noise(
        "logits", len(reference), max_difference(reference, actual), noise, noise_factor, _DEFAULTS.logits_noise_factor
    )


def _compare_tensors(reference: Path, actual: Path, label: str = "") -> Verdict:
    """Compare all tensors of two models bit for bit, in any format and layout."""
    # Other oracles compare the rest of the state.
    report = verify_bytes(VerifyOptions(reference, actual), with_state=False)
    prefix = f"{label}: " if label else ""
    differences = [
        Difference("model", f"{prefix}{row['name']}", None, "the same", str(row.get("kind", "differs")))
        for row in report.differing
    ]
    return Verdict("model", report.compared, differences)


# Stored state other than the model that is equal for every mesh; RNG state belongs to a rank.
_MESH_INDEPENDENT_ORACLES = (
    "moments",
    "adam step",
    "param groups",
    "learning rate",
    "scheduler",
    "step",
    "batch",
    "samples",
)


def _compare_state(reference: Path, actual: Path, label: str) -> list[Verdict]:
    """Compare the state of two checkpoints, except the model."""
    verdicts = compare([read_items(reference)], [read_items(actual)], _MESH_INDEPENDENT_ORACLES)
    return [
        each._replace(differences=[one._replace(item=f"{label}: {one.item}", rank=None) for one in each.differences])
        for each in verdicts
    ]


def _compare_names(reference: Path, actual: Path) -> Verdict:
    """Compare the names in two checkpoints of one format, so that none is added, lost or named after a wrapper."""
    before, after = (set(open_checkpoint(each).tensors) for each in (reference, actual))
    differences = [Difference("names", name, None, "present", "missing") for name in sorted(before - after)]
    differences += [Difference("names", name, None, "missing", "present") for name in sorted(after - before)]
    return Verdict("names", len(before | after), differences)


def _compare_stored_tensors(reference: Path, actual: Path, label: str = "") -> Verdict:
    """Compare the tensors of a model and its adapter in two training checkpoints with the same names, bit for bit."""
    first, second = (_digest_tensors(each, _is_of_model) for each in (reference, actual))
    return _digest_verdict("model", first, second, f"{label}: " if label else "")


def _is_of_model(name: str) -> bool:
    """Return True for the stored name of a tensor of the model or its adapter."""
    return not is_optimizer(name) and not is_trainer_state(name)


def _compare_adapter(checkpoint: Path, peft: Path) -> Verdict:
    """Compare the factors of the adapter in a training checkpoint with those in files of PEFT, bit for bit."""
    stored, exported = (
        {
            name.replace(".default.", ".").removeprefix("base_model.model."): digest
            for name, digest in _digest_tensors(path, is_lora_name).items()
        }
        for path in (checkpoint, peft)
    )
    return _digest_verdict("adapter", stored, exported)


def _digest_verdict(
    oracle: str, reference: Mapping[str, object], actual: Mapping[str, object], label: str = ""
) -> Verdict:
    """Compare digests by name of a tensor."""
    differences = [
        Difference(oracle, f"{label}{name}", None, "the same", "differs" if name in actual else "missing")
        for name in reference
        if reference[name] != actual.get(name)
    ]
    added = sorted(actual.keys() - reference.keys())
    differences += [Difference(oracle, f"{label}{name}", None, "missing", "present") for name in added]
    return Verdict(oracle, len(reference), differences)


def _digest_tensors(path: Path, is_selected: Callable[[str], bool]) -> dict[str, object]:
    """Return name -> shape, dtype and digest of the row-major bytes, for the selected tensors of a checkpoint."""
    catalog = open_checkpoint(path)
    selected = replace(catalog, tensors={name: each for name, each in catalog.tensors.items() if is_selected(name)})
    with catalog.source.open() as files:
        located = locate_payloads(selected, files) if catalog.traits.has_archives else selected
        reader = TensorReader(files)
        return {
            name: (each.shape, each.dtype.name, digest_tensor(reader, each, each.dtype).leaves)
            for name, each in located.tensors.items()
        }


def _compare_files(reference: Path, actual: Path) -> Verdict:
    """Compare all files directly in two folders byte for byte."""
    names = sorted({each.name for folder in (reference, actual) for each in folder.iterdir()})
    differences = []
    for name in names:
        first, second = reference / name, actual / name
        if not (first.is_file() and second.is_file()):
            state = "present" if first.is_file() else "missing"
            differences.append(Difference("names", name, None, state, "present" if second.is_file() else "missing"))
        elif not filecmp.cmp(first, second, shallow=False):
            differences.append(Difference("model", name, None, "equal bytes", "different bytes"))
    return Verdict("model", len(names), differences)


def select_phases(text: str | None) -> Sequence[Phase]:
    """Return the phases that `--phases` selects by numbers, ranges or names, separated by commas; all for None.

    Raises:
        UsageError: A part selects no phase.
    """
    if text is None:
        return PHASES
    known = {str(each.number): each for each in PHASES} | {each.name: each for each in PHASES}
    numbers: set[int] = set()
    for part in (each.strip() for each in text.split(",")):
        first, dash, last = part.partition("-")
        if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) <= PHASES[-1].number:
            numbers |= set(range(int(first), int(last) + 1))
        elif part in known:
            numbers.add(known[part].number)
        else:
            names = ", ".join(f"{each.number} ({each.name})" for each in PHASES)
            raise UsageError(f'--phases: "{part}" must be one of {names}, or a range such as 0-3')
    return [each for each in PHASES if each.number in numbers]
