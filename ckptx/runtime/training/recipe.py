"""Blocks and keys of a training recipe, with the meaning of each key.

A recipe is YAML with one block for each class here; `recipe_file` reads it, and refuses unknown keys and invalid
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ckptx.layout.parallel_dims import ParallelDims

Freezable = Literal["embeddings", "vision", "audio", "language"]


class RecipeBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of a recipe file: each field is a key, and its type determines the valid values."""


class ModelBlock(RecipeBlock, kw_only=True, frozen=True):
    """Model to train.

    Attributes:
        pretrained: Checkpoint directory or Hub id; null if `config` describes the whole model.
        revision: Git revision of the Hub id; null for the default branch.
        config: Keys of config.json, such as `architectures` and `model_type`. With `pretrained`, they override those of
            the checkpoint; without it, the weights are random.
        shrunk: Train a small version of the model that fits a CPU, with random weights: fewer and narrower layers, of
            the same kinds in the same order.
        shrunk_from: Keys of config.json to use as the base of `shrunk`, so that nothing is downloaded; if empty, the
            config of `pretrained` is used. They have no effect without `shrunk`. `config` overrides them.
        dtype: Dtype of the parameters: float32 or bfloat16, written in full; a recipe does not accept bf16.
        attn_implementation: Attention implementation, such as eager or sdpa; null for the default of transformers.
        freeze: Parts of the model that are not trained.
        trust_remote_code: Allow custom model code from the checkpoint.
    """

    pretrained: str | None = None
    revision: str | None = None
    config: Mapping[str, Any] = msgspec.field(default_factory=dict)
    shrunk: bool = False
    shrunk_from: Mapping[str, Any] = msgspec.field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: str | None = None
    freeze: tuple[Freezable, ...] = ()
    trust_remote_code: bool = False


class AdapterBlock(RecipeBlock, kw_only=True, frozen=True):
    """LoRA adapter to train, while all weights of the model are frozen; `layout` must have tp 1.

    Attributes:
        rank: Rank of the two factors of each adapted layer.
        alpha: The change `B A` of a weight is multiplied by alpha / rank.
        targets: Ends of the names of the linear layers to adapt, such as q_proj.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")


class DataBlock(RecipeBlock, kw_only=True, frozen=True):
    """Training data.

    Attributes:
        dataset: Name of the dataset. synthetic_text and synthetic_images generate samples in the format of squad
            (questions with answers) and medpix (questions about images).
        path: Hub id of the dataset, or its local snapshot; null for its public id.
        split: Split of the dataset, as named in `datasets`.
        samples: Number of samples to use, from the first, or to generate; null for all, or 64 generated ones.
        sequence_length: Tokens per sample, padding included; longer samples are truncated.
    """

    dataset: Literal["synthetic_text", "synthetic_images", "squad", "medpix"] = "synthetic_text"
    path: str | None = None
    split: str = "train"
    samples: int | None = None
    sequence_length: int = 32


class TrainingBlock(RecipeBlock, kw_only=True, frozen=True):
    """Number of steps, batch sizes, and other settings of the training run.

    Attributes:
        steps: Number of steps of the run.
        total_steps: Step at which the learning-rate schedule ends; null for `steps`.
        save_at: Steps after which a checkpoint is saved; one is always saved after the last step.
        global_batch: Samples per step, over all data-parallel ranks.
        local_batch: Samples per forward pass and data-parallel rank; with a pipeline, samples of all its microbatches.
        microbatch: Samples per microbatch of the pipeline.
        seed: Seed of the random number generators and of the data order.
        dropout: Probability of all kinds of dropout in the config; null keeps the values of the config.
        clip: Maximum global gradient norm; null disables clipping.
    """

    steps: int = 6
    total_steps: int | None = None
    save_at: tuple[int, ...] = (3,)
    global_batch: int = 8
    local_batch: int = 2
    microbatch: int = 1
    seed: int = 1111
    dropout: float | None = None
    clip: float | None = 1.0


class OptimizerBlock(RecipeBlock, kw_only=True, frozen=True):
    """Adam or AdamW of torch.

    Attributes:
        name: Optimizer class: AdamW or Adam.
        lr: Maximum learning rate.
        betas: Decay rates of the first and second moment.
        eps: Term added to the square root of the second moment.
        weight_decay: Weight decay coefficient: decoupled in adamw, a term of the gradient in adam.
    """

    name: Literal["adamw", "adam"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01


class ScheduleBlock(RecipeBlock, kw_only=True, frozen=True):
    """Learning-rate schedule.

    Attributes:
        decay: Schedule after warm-up: cosine decay to `min_lr`, or a constant rate.
        warmup_steps: Steps of linear warm-up.
        min_lr: Learning rate at the end of the cosine decay.
    """

    decay: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr: float = 0.0


class LayoutBlock(RecipeBlock, kw_only=True, frozen=True):
    """Layout of the model: mesh, pipeline and activation checkpointing, as in `ckptx verify --run`.

    Attributes:
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline ranks.
        dp_shard: Number of FSDP2 ranks; null is the number of ranks that torchrun started divided by tp x pp x
            dp_replicate, and 1 without torchrun. In `checks.layouts`, null is the number of ranks of `layout` divided
            by tp x pp x dp_replicate, and at least 1.
        dp_replicate: Number of replicas of the sharded model.
        pp_split: Assignment of layers to stages: even, vllm, torchtitan, hf, or a comma-separated list of counts.
        tp_plan: JSON file with tensor-parallel rules, as for `--tp-plan`; null for the plan of the model.
        schedule: Pipeline schedule, as for `--schedule`; the top-level block `schedule` is that of the learning rate.
        activation_checkpointing: Parts of a layer that are recomputed in the backward pass.
        ac_scope: Layers to which activation checkpointing applies.
        param_dtype: Dtype of the computation under FSDP2; null for the dtype of the parameters.
        reduce_dtype: Dtype of gradient reduction under FSDP2; null for `param_dtype`.
    """

    tp: int = 1
    pp: int = 1
    dp_shard: int | None = None
    dp_replicate: int = 1
    pp_split: str = "even"
    tp_plan: str | None = None
    schedule: str = "1f1b"
    activation_checkpointing: Literal["none", "full", "submodule", "selective"] = "none"
    ac_scope: Literal["all", "language", "vision", "audio"] = "all"
    param_dtype: Literal["float32", "bfloat16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] | None = None

    @property
    def reduction_dtype(self) -> str | None:
        """Dtype of gradient reduction, as FSDP2 chooses it; None for the dtype of the parameters."""
        return self.reduce_dtype or self.param_dtype

    @property
    def dims(self) -> ParallelDims:
        """Mesh dimensions; requires a known `dp_shard`, which `recipe_file` fills in."""
        return ParallelDims(
            tp=self.tp, pp=self.pp, dp_shard=1 if self.dp_shard is None else self.dp_shard,
            dp_replicate=self.dp_replicate,
        )  # fmt: skip


class CheckpointBlock(RecipeBlock, kw_only=True, frozen=True):
    """Saving of checkpoints.

    Attributes:
        asynchronous: Write in the background, while the next steps run.
        keep: Number of complete checkpoints to keep, the newest ones; null keeps all.
    """

    asynchronous: bool = False
    keep: int | None = None


class TrainerBlock(RecipeBlock, kw_only=True, frozen=True):
    """Command of a custom trainer, and the paths of its output.

    With this block, only `steps`, `total_steps` and `save_at` of `training`, and `sharded` and `loss_noise_factor` of
    `checks` have an effect. All other keys must still be valid and are otherwise ignored.

    Attributes:
        command: Command to run; it is split like shell words, but no shell runs it. `{steps}` is the step at which it
            stops; `{total_steps}` the step at which its schedule ends; `{save_at}` the step after which it saves;
            `{out}` the output directory; `{resume}` the text of `resume` when it resumes, else nothing; `{checkpoint}`
            the checkpoint to resume from, else nothing; `{python}` the interpreter of this process; `{recipe}` the
            directory of the recipe.
        resume: Text for `{resume}` in the command when the trainer resumes; `{checkpoint}` in it is the path of the
            checkpoint to resume from.
        checkpoint: Path of the checkpoint of step `{step}`, relative to `{out}`. `{step:07d}` is padded with zeros to 7
            digits, as in Megatron's `iter_{step:07d}`; step numbers in all keys support such a format.
        losses: Path of the losses, relative to `{out}`: a JSON lines file, a text file for `pattern`, a directory of
            TensorBoard files, or a trainer_state.json; `{steps}` is as in `command`. The output of the command is in
            `{out}/output.log`.
        losses_kind: Format of the losses.
        pattern: Regular expression with groups `step` and `loss`.
        step_key: Key of the step in JSON lines.
        loss_key: Key of the loss in JSON lines, or its TensorBoard tag.
        can_save_without_step: True if the trainer can load a checkpoint and save it again without training a step.
        can_load_altered: True if the weights that the trainer loads come from `checkpoint` unchanged, so that an
            altered copy of a checkpoint shows whether it resumes.
        time_limit: Maximum time of one run of the command, in seconds.
        environment: Environment variables of the command.
    """

    command: str
    resume: str = "{checkpoint}"
    checkpoint: str = "step-{step}"
    losses: str = "losses.jsonl"
    losses_kind: Literal["jsonl", "regex", "tensorboard", "trainer_state"] = "jsonl"
    pattern: str | None = None
    step_key: str = "step"
    loss_key: str = "loss"
    can_save_without_step: bool = True
    can_load_altered: bool = True
    time_limit: float = 3600.0
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)


class ChecksBlock(RecipeBlock, kw_only=True, frozen=True):
    """Checks of `ckptx robustness`.

    Attributes:
        layouts: Other layouts for which checkpoints are resharded.
        sharded: Require parameters to be sharded (true) or not (false); null for no requirement.
        loss_noise_factor: Tolerance of losses, as a multiple of the measured noise.
        logits_noise_factor: Tolerance of logits, as a multiple of the measured noise.
    """

    layouts: tuple[LayoutBlock, ...] = ()
    sharded: bool | None = None
    loss_noise_factor: float = 8.0
    logits_noise_factor: float = 8.0


class RecipeKeys(RecipeBlock, kw_only=True, frozen=True):
    """The content of a recipe file.

    Attributes:
        description: One-line description of the recipe.
        adapter: LoRA adapter to train instead of the weights, see `AdapterBlock`; None trains the weights.
        trainer: Command of a custom trainer, see `TrainerBlock`; None uses ckptx's own trainer.
    """

    description: str = ""
    model: ModelBlock = msgspec.field(default_factory=ModelBlock)
    adapter: AdapterBlock | None = None
    data: DataBlock = msgspec.field(default_factory=DataBlock)
    training: TrainingBlock = msgspec.field(default_factory=TrainingBlock)
    optimizer: OptimizerBlock = msgspec.field(default_factory=OptimizerBlock)
    schedule: ScheduleBlock = msgspec.field(default_factory=ScheduleBlock)
    layout: LayoutBlock = msgspec.field(default_factory=LayoutBlock)
    checkpoint: CheckpointBlock = msgspec.field(default_factory=CheckpointBlock)
    checks: ChecksBlock = msgspec.field(default_factory=ChecksBlock)
    trainer: TrainerBlock | None = None


class Recipe(RecipeKeys, kw_only=True, frozen=True):
    """A recipe that can be run.

    Attributes:
        name: The name of its file, without the ending.
        notes: Notes for the user from `recipe_file`.
    """

    name: str
    notes: tuple[str, ...] = ()
