"""Run a model that never needs to be in memory as a whole: stage by stage, each loaded only while it runs.

These are pipeline stages that run one after another in one process. All microbatches go through a stage while it is
loaded, and its outputs are kept for the next. Backward, from the last stage to the first, each stage is loaded again
and recomputes its forward pass. One stage is in memory at a time, except for a tied head: during the backward pass of
the stage with the embedding, the last stage is loaded as well.

    forward     load 0, run every microbatch, release   load 1, run, release   ...   load n: logits, loss
    backward    load n, run, backward, release          ...                    load 0, run, backward, release

A parameter of several stages, such as a tied embedding and head, gets the sum of its gradients microbatch by
microbatch, as autograd sums them in a whole model. On a CPU the results equal those of the whole model bit for bit; on
other devices this is not tested, and results are compared within the noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckptx.layout.stages import StageMap
from ckptx.runtime.model.layers import canonical_name
from ckptx.runtime.parallel.pipeline.boundaries import StageBoundaries
from ckptx.runtime.parallel.pipeline.run import (
    StageRunner,
    as_stage_inputs,
    clone_outputs,
    find_backward_roots,
    get_input_grads,
)
from ckptx.runtime.parallel.pipeline.ties import Tie, find_parameter
from ckptx.runtime.parallel.release import free_storage, return_freed_memory_immediately
from ckptx.runtime.parity import noise
from ckptx.runtime.parity.divergence import OutputsByCall, record_outputs
from ckptx.runtime.parity.execution import (
    compute_loss,
    full_tensor,
    gradient_hooks,
    logits_or_hidden_states,
    translate_model_errors,
)
from ckptx.runtime.parity.inputs.batch import Inputs

OnGradient = Callable[["ComputePass", str, Tensor], None]  # gets the pass, the name in the whole model, the gradient


class StagePartition(NamedTuple):
    """The stages of a stagewise model, and what connects them.

    Attributes:
        stages: Assignment of layers to stages.
        boundaries: Values that each stage passes to the next.
        ties: Parameters that several stages share.
        embeddings: Result of `noise.find_embeddings` for the whole model.
        dtype: Dtype of the first floating-point parameter, to which floating-point inputs are converted.
    """

    stages: StageMap
    boundaries: StageBoundaries
    ties: tuple[Tie, ...]
    embeddings: Mapping[str, str]
    dtype: torch.dtype

    @property
    def last_stage(self) -> int:
        """Number of the last stage."""
        return self.stages.count - 1


@dataclass(slots=True, eq=False)
class ComputePass:
    """One of several computations that run through the stages together, such as a run with perturbed embeddings.

    Attributes:
        draw: Seed of the perturbed embeddings; None leaves them unchanged.
        loss: Mean over the microbatches; 0 before the last stage ran.
        stage_inputs: Number of each stage that was reached -> its inputs, one tuple per microbatch.
        output_grads: For each microbatch, gradients of the inputs of the stage that ran backward last. They are the
            gradients of the outputs of the stage that runs backward next.
        tied_grads: Gradients of tied parameters from later stages, by name of the tie and index of the microbatch.
    """

    draw: int | None = None
    loss: float = 0.0
    stage_inputs: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    output_grads: list[list[Tensor | None]] = field(default_factory=list)
    tied_grads: dict[tuple[str, int], Tensor] = field(default_factory=dict)


# Builds and loads the stage of a number, with the given parameters (by name) in place of its own.
StageOpener = Callable[[int, Mapping[str, nn.Parameter]], nn.Module]


class StagewiseModel:
    """A model whose stages are loaded, run and released one after another."""

    def __init__(
        self,
        partition: StagePartition,
        microbatches: Sequence[Inputs],
        passes: Sequence[ComputePass],
        open_stage: StageOpener,
        device: torch.device,
    ) -> None:
        """Move the inputs to the device; no stage is loaded yet.

        Args:
            partition: Stages of the model, and what connects them.
            microbatches: Microbatches of one step; gradients are those of the mean loss.
            passes: Computations to run.
            open_stage: Builds and loads a stage.
            device: Device of the inputs and stages.
        """
        self.partition, self._passes, self._stage_opener, self._device = partition, passes, open_stage, device
        self._microbatches = microbatches
        self._microbatch_inputs = [
            {
                name: value.to(device, partition.dtype) if value.is_floating_point() else value.to(device)
                for name, value in each.batch.items()
            }
            for each in microbatches
        ]
        return_freed_memory_immediately()

    def forward(self, on_logits: Callable[[ComputePass, Tensor], None], *, backward: bool) -> None:
        """Run all passes forward.

        Args:
            on_logits: Called with each pass and its logits: for all microbatches of the first pass in order, then for
                those of the next.
            backward: Keep the stage inputs for a backward pass.

        Raises:
            UnsupportedError, SpaceError: See `execution.run_step`.
        """
        for compute_pass in self._passes:
            compute_pass.stage_inputs[0] = [()] * len(self._microbatches)
        for number in range(self.partition.stages.count):
            with self._open_stage(number) as runner:
                for compute_pass in self._passes:
                    with self._perturb_stage(runner.model, compute_pass), torch.set_grad_enabled(backward):
                        for index in range(len(self._microbatches)):
                            self._forward(runner, compute_pass, index, on_logits)
            if not backward:
                for compute_pass in self._passes:
                    del compute_pass.stage_inputs[number]

    def _forward(
        self,
        runner: StageRunner,
        compute_pass: ComputePass,
        index: int,
        on_logits: Callable[[ComputePass, Tensor], None],
    ) -> None:
        """Run one microbatch of a pass through a stage; store the inputs of the next stage, or pass on the logits."""
        with translate_model_errors(runner.model):
            output, boundary_values = runner(
                runner.model,
                self._microbatch_inputs[index],
                as_stage_inputs(compute_pass.stage_inputs[runner.number][index]),
            )
            if runner.number == self.partition.last_stage:
                logits = logits_or_hidden_states(runner.model, output)
                compute_pass.loss += float(
                    compute_loss(logits, self._microbatches[index]).detach() / len(self._microbatches)
                )
                on_logits(compute_pass, full_tensor(logits.detach()))
            else:
                compute_pass.stage_inputs[runner.number + 1].append(as_stage_inputs(boundary_values))

    def iter_module_outputs(self) -> Iterator[list[OutputsByCall]]:
        """Yield the outputs of module calls on the first microbatch, stage by stage; each list has a dict per pass."""
        inputs_by_pass: list[tuple[Any, ...]] = [()] * len(self._passes)
        for number in range(self.partition.stages.count):
            outputs_by_pass: list[OutputsByCall] = [{} for _ in self._passes]
            with self._open_stage(number) as runner, torch.no_grad():
                for index, compute_pass in enumerate(self._passes):
                    with (
                        self._perturb_stage(runner.model, compute_pass),
                        record_outputs(runner.model, outputs_by_pass[index], self.partition.stages, number),
                    ):
                        _, boundary_values = runner(runner.model, self._microbatch_inputs[0], inputs_by_pass[index])
                    inputs_by_pass[index] = clone_outputs(boundary_values)
            yield outputs_by_pass

    @contextmanager
    def backward(self, number: int, on_gradient: OnGradient | None = None) -> Iterator[StageRunner]:
        """Run one stage backward, and yield it while it is loaded; call this for the last stage first, then down to 0.

        Its gradients are complete; that of a tied parameter belongs to the first stage that has it.

        Args:
            number: Number of the stage.
            on_gradient: Called with each gradient of each pass as soon as it is complete; the parameter does not keep
                the gradient. With None, the parameters keep the gradients of the only pass.
        """
        if number == self.partition.last_stage:
            for compute_pass in self._passes:
                compute_pass.output_grads = [[] for _ in self._microbatches]
        with self._open_stage(number) as runner:
            with self._tied_head_stage(runner) as head_runner:
                for compute_pass in self._passes:
                    with (
                        self._perturb_stage(runner.model, compute_pass),
                        self._perturb_stage(head_runner and head_runner.model, compute_pass, runner.model),
                    ):
                        self._backward(runner, head_runner, compute_pass, on_gradient)
            yield runner
        if number < self.partition.last_stage or not self._recomputed_ties:  # for these the last stage runs once more
            for compute_pass in self._passes:
                del compute_pass.stage_inputs[number]

    def _backward(
        self,
        runner: StageRunner,
        head_runner: StageRunner | None,
        compute_pass: ComputePass,
        on_gradient: OnGradient | None,
    ) -> None:
        """Run all microbatches of one pass backward through a stage.

        Gradients of parameters are passed to `on_gradient` or stay in the parameters. Gradients of the stage's inputs
        are stored in `output_grads` of the pass, those of tied parameters that an earlier stage has in `tied_grads`.

        Args:
            runner: The stage.
            head_runner: The last stage, if this stage shares a recomputed tie with it; else None.
            compute_pass: The pass.
            on_gradient: See `backward`.
        """
        untied = {canonical_name(name): each for name, each in runner.model.named_parameters() if each.requires_grad}
        first_ties, later_ties = self._pop_tied(runner, untied)
        parameters = [
            *untied.values(),
            *first_ties.values(),
            *(each for name, each in later_ties.items() if name not in self._recomputed_ties),
        ]
        totals: dict[str, Tensor] = {}
        for index in range(len(self._microbatches)):
            self._add_later_grads(head_runner, first_ties, compute_pass, index)
            is_last = index == len(self._microbatches) - 1

            def complete(name: str, gradient: Tensor) -> None:
                assert on_gradient is not None
                on_gradient(compute_pass, name, gradient)

            with (
                translate_model_errors(runner.model),
                gradient_hooks(untied if is_last and on_gradient is not None else {}, complete),
            ):
                self._backward_of_microbatch(runner, compute_pass, index, parameters)
            for name, parameter in first_ties.items():
                if parameter.grad is not None:
                    totals[name] = totals[name].add_(parameter.grad) if name in totals else parameter.grad
                    parameter.grad = None
            for name, parameter in later_ties.items():
                if parameter.grad is not None:
                    later_grad = compute_pass.tied_grads.get((name, index))
                    compute_pass.tied_grads[name, index] = (
                        parameter.grad if later_grad is None else later_grad.add_(parameter.grad)
                    )
                    parameter.grad = None
        for name, parameter in first_ties.items():
            parameter.grad = totals.get(name)
        for name, parameter in (untied | first_ties).items() if on_gradient is not None else ():
            if parameter.grad is not None:  # a tied one, or one that the last microbatch did not reach
                complete(name, parameter.grad)
                parameter.grad = None

    def _backward_of_microbatch(
        self, runner: StageRunner, compute_pass: ComputePass, index: int, parameters: Sequence[Tensor]
    ) -> None:
        """Recompute one microbatch forward, then run it backward; only `parameters` and the inputs get gradients."""
        stage_inputs = as_stage_inputs(compute_pass.stage_inputs[runner.number][index])
        input_leaves = [each for each in stage_inputs if isinstance(each, Tensor) and each.requires_grad]
        with torch.enable_grad():
            output, boundary_values = runner(runner.model, self._microbatch_inputs[index], stage_inputs)
            if runner.number == self.partition.last_stage:
                outputs, gradients = [self._loss(runner, output, index)], None
            else:
                outputs, gradients = find_backward_roots(
                    clone_outputs(boundary_values), compute_pass.output_grads[index]
                )
        if outputs:
            torch.autograd.backward(outputs, gradients, inputs=[*parameters, *input_leaves])
        compute_pass.output_grads[index] = get_input_grads(stage_inputs)

    def _loss(self, runner: StageRunner, output: Any, index: int) -> Tensor:
        return compute_loss(logits_or_hidden_states(runner.model, output), self._microbatches[index]) / len(
            self._microbatches
        )

    # ------------------------------------------------------------------------------------------- ties

    @property
    def _recomputed_ties(self) -> frozenset[str]:
        """Names of the ties between the last stage and one other stage, such as a tied head.

        Their gradient is computed when the other stage runs, with the last stage loaded again. Otherwise it would have
        to be kept for each microbatch and pass until then.
        """
        return frozenset(
            tie.name for tie in self.partition.ties if len(tie.copies) == 2 and self.partition.last_stage in tie.copies
        )

    def _pop_tied(
        self, runner: StageRunner, untied: dict[str, nn.Parameter]
    ) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Remove the tied parameters of a stage from `untied`, and return them.

        Returns:
            Tied parameters by name of the tie: those whose first stage this is, and those whose first stage is an
            earlier one.
        """
        first_ties: dict[str, nn.Parameter] = {}
        later_ties: dict[str, nn.Parameter] = {}
        for tie in self.partition.ties:
            if runner.number in tie.copies:
                name = tie.copies[runner.number]
                parameter = find_parameter(runner.model, name)
                if untied.pop(name, None) is not None:
                    (first_ties if runner.number == min(tie.copies) else later_ties)[tie.name] = parameter
        return first_ties, later_ties

    def _add_later_grads(
        self,
        head_runner: StageRunner | None,
        first_ties: Mapping[str, nn.Parameter],
        compute_pass: ComputePass,
        index: int,
    ) -> None:
        """Set the gradients of tied parameters from later stages, to which autograd adds their own."""
        for name, parameter in first_ties.items():
            parameter.grad = compute_pass.tied_grads.pop((name, index), None)
        recomputed = [parameter for name, parameter in first_ties.items() if name in self._recomputed_ties]
        if head_runner is not None and recomputed:
            with translate_model_errors(head_runner.model), torch.enable_grad():
                output, _ = head_runner(
                    head_runner.model,
                    self._microbatch_inputs[index],
                    as_stage_inputs(compute_pass.stage_inputs[head_runner.number][index]),
                )
                torch.autograd.backward([self._loss(head_runner, output, index)], inputs=recomputed)

    @contextmanager
    def _tied_head_stage(self, runner: StageRunner) -> Iterator[StageRunner | None]:
        """Load the last stage in addition to this one, whose tied parameters it uses; yield None if there are none.

        Only recomputed ties whose first stage is this one count.
        """
        shared = {
            tie.copies[self.partition.last_stage]: find_parameter(runner.model, tie.copies[runner.number])
            for tie in self.partition.ties
            if tie.name in self._recomputed_ties and runner.number == min(tie.copies)
        }
        with self._open_stage(self.partition.last_stage, shared) if shared else nullcontext() as head_runner:
            yield head_runner

    # ------------------------------------------------------------------------------------------- memory

    @contextmanager
    def _open_stage(self, number: int, shared: Mapping[str, nn.Parameter] | None = None) -> Iterator[StageRunner]:
        """Load a stage; parameters in `shared` belong to another stage, and keep their storage at the end."""
        model = self._stage_opener(number, shared or {})
        try:
            yield StageRunner(model, self.partition.stages, number, self.partition.boundaries)
        finally:
            free_storage(model, (shared or {}).values())

    def _perturb_stage(self, model: nn.Module | None, compute_pass: ComputePass, other: nn.Module | None = None) -> Any:
        """Return a context manager that perturbs the embeddings of a stage, except those that it shares with `other`.

        It does nothing if `model` is None, or for a pass without perturbation.
        """
        if model is None or compute_pass.draw is None:
            return nullcontext()
        embeddings = self.partition.embeddings
        if other is not None:
            shared = {id(each) for each in other.parameters()}
            own_names = {canonical_name(name) for name, each in model.named_parameters() if id(each) not in shared}
            embeddings = {name: first for name, first in embeddings.items() if name in own_names}
        return noise.perturb_embeddings(model, compute_pass.draw, embeddings)


def share_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace the parameters of these names, which have no storage yet, by parameters of another model."""
    for name, parameter in parameters.items():
        own = find_parameter(model, name)
        for module in model.modules():
            for leaf, each in module._parameters.items():
                if each is own:
                    module._parameters[leaf] = parameter
