"""What a training run is made of: the nouns of a recipe, with what each key means.

A recipe is YAML with one block for each class here; `recipe_file` reads it, and refuses what has no meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ckptx.layout.parallel_dims import ParallelDims

Freezable = Literal["embeddings", "vision", "audio", "language"]


class RecipeBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of a recipe file: each field is a key, and its type says what the key may hold."""


class ModelBlock(RecipeBlock, kw_only=True, frozen=True):
    """The model that is trained.

    Attributes:
        pretrained: A directory or a Hub id; None where `config` says all there is to know.
        revision: Of the Hub id.
        config: Keys of config.json, `architectures` and `model_type` among them. With `pretrained`, they replace those
            of the checkpoint; without, the weights are random.
        shrunk: Random weights in narrow layers, and few of them: what a CPU can train of a large model. Its layers are
            of the same kinds, in the same order.
        shrunk_from: Keys of config.json that `shrunk` begins with, so that nothing is downloaded; where there are none,
            it is the config of `pretrained`. They change nothing without `shrunk`. `config` replaces keys of them.
        dtype: Of the parameters: float32 or bfloat16.
        attn_implementation: eager, sdpa, ...; None is what transformers chooses.
        freeze: What is not trained.
        trust_remote_code: Run code from the checkpoint for an unknown class.
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


class DataBlock(RecipeBlock, kw_only=True, frozen=True):
    """What it is trained on.

    Attributes:
        dataset: synthetic_text and synthetic_images make what the others read: questions with answers, and with images.
        path: Of a data set on the Hub, or its local snapshot; None is its public id.
        split: As `datasets` names it.
        samples: The first so many of it, or how many are made; None is all of it, or 64.
        sequence_length: Tokens of a sample, padding included; what is longer is cut.
    """

    dataset: Literal["synthetic_text", "synthetic_images", "squad", "medpix"] = "synthetic_text"
    path: str | None = None
    split: str = "train"
    samples: int | None = None
    sequence_length: int = 32


class TrainingBlock(RecipeBlock, kw_only=True, frozen=True):
    """How long, and in which portions.

    Attributes:
        steps: Where the run stops.
        total_steps: Where its schedule ends; None is `steps`.
        save_at: The steps after which it saves; the last step is always saved.
        global_batch: Samples of a step.
        local_batch: Samples of one forward pass on a data rank; with a pipeline, of all microbatches of one schedule.
        microbatch: Samples of a microbatch of the pipeline.
        seed: Of random numbers, and of the order of the data.
        dropout: Of every kind the config has; None leaves what it says.
        clip: The largest norm of all gradients; None clips nothing.
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
    """torch's Adam or AdamW.

    Attributes:
        name: Which.
        lr: The highest learning rate.
        betas: Of the two moments.
        eps: Added to the root of the second.
        weight_decay: In every step.
    """

    name: Literal["adamw", "adam"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01


class ScheduleBlock(RecipeBlock, kw_only=True, frozen=True):
    """The learning rate over the steps.

    Attributes:
        decay: After the warm-up: a cosine down to `min_lr`, or the same throughout.
        warmup_steps: In which it grows by the same number each.
        min_lr: Where the cosine ends.
    """

    decay: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr: float = 0.0


class LayoutBlock(RecipeBlock, kw_only=True, frozen=True):
    """The mesh, as `ckptx verify --run` takes it.

    Attributes:
        tp: Ranks that share each tensor.
        pp: Ranks of the pipeline.
        dp_shard: FSDP2 ranks; None is as many as the ranks there are allow, and 1 where their number is not known.
        dp_replicate: Replicas of all of them.
        pp_split: Layers of each stage: even, vllm, titan, hf, or counts with commas.
        schedule: Of the pipeline.
        activation_checkpointing: What layers recompute.
        ac_scope: Which layers.
        param_dtype: What FSDP2 computes in; None is that of the parameters.
        reduce_dtype: What it sums gradients in; None is that of the parameters.
    """

    tp: int = 1
    pp: int = 1
    dp_shard: int | None = None
    dp_replicate: int = 1
    pp_split: str = "even"
    schedule: str = "1f1b"
    activation_checkpointing: Literal["none", "full", "submodule", "selective"] = "none"
    ac_scope: Literal["all", "language", "vision", "audio"] = "all"
    param_dtype: Literal["float32", "bfloat16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] | None = None

    @property
    def dims(self) -> ParallelDims:
        """The mesh, where `dp_shard` is known; `recipe_file` fills it in."""
        return ParallelDims(
            tp=self.tp, pp=self.pp, dp_shard=1 if self.dp_shard is None else self.dp_shard,
            dp_replicate=self.dp_replicate,
        )  # fmt: skip


class CheckpointBlock(RecipeBlock, kw_only=True, frozen=True):
    """How it saves.

    Attributes:
        asynchronous: Write in the background, while the next steps run.
        keep: How many published steps stay; None is all of them.
    """

    asynchronous: bool = False
    keep: int | None = None


class ExternalBlock(RecipeBlock, kw_only=True, frozen=True):
    """A trainer that is not ours, and where it leaves what it did.

    Attributes:
        command: What to run, in a shell's words. `{steps}`: where it stops; `{total_steps}`: where its schedule ends;
            `{save_at}`: the step after which it saves; `{out}`: where; `{resume}`: the checkpoint it goes on from, see
            `resume`; `{python}`: the interpreter of this process; `{recipe}`: the folder of the recipe.
        resume: What stands for `{resume}` when it goes on from `{checkpoint}`; it is empty when it starts.
        checkpoint: Where, below `{out}`, the checkpoint of step `{step}` is. `{step:07d}` is padded with zeros to 7
            digits, as in Megatron's `iter_{step:07d}`; so can be all numbers of steps in every key.
        losses: Where, below `{out}`, its losses are: a file of JSON lines, a text with `pattern`, a folder of
            TensorBoard files, or a trainer_state.json; `{steps}` is as in `command`. What the command prints is in
            output.log there.
        losses_kind: Which of them.
        pattern: A regular expression with groups `step` and `loss`.
        step_key: The name of the step in JSON lines.
        loss_key: The name of the loss; in TensorBoard, the tag.
        zero_steps: Whether it can go on for no step and save again.
        time_limit: Seconds that one run of the command may take.
        environment: Variables for the command.
    """

    command: str
    resume: str = "{checkpoint}"
    checkpoint: str = "step-{step}"
    losses: str = "losses.jsonl"
    losses_kind: Literal["jsonl", "regex", "tensorboard", "trainer_state"] = "jsonl"
    pattern: str | None = None
    step_key: str = "step"
    loss_key: str = "loss"
    zero_steps: bool = True
    time_limit: float = 3600.0
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)


class ChecksBlock(RecipeBlock, kw_only=True, frozen=True):
    """What robustness does with it.

    Attributes:
        layouts: Other meshes that what was saved is taken to.
        sharded: Whether parameters must be sharded; None does not ask.
        loss_times_noise: How many times the noise measured a loss may be away.
        logits_times_noise: The same for logits.
    """

    layouts: tuple[LayoutBlock, ...] = ()
    sharded: bool | None = None
    loss_times_noise: float = 8.0
    logits_times_noise: float = 8.0


class RecipeKeys(RecipeBlock, kw_only=True, frozen=True):
    """The content of a recipe file.

    Attributes:
        description: One line.
        train: Set for an external trainer; `model`, `data`, `optimizer` and `schedule` then have no effect.
    """

    description: str = ""
    model: ModelBlock = msgspec.field(default_factory=ModelBlock)
    data: DataBlock = msgspec.field(default_factory=DataBlock)
    training: TrainingBlock = msgspec.field(default_factory=TrainingBlock)
    optimizer: OptimizerBlock = msgspec.field(default_factory=OptimizerBlock)
    schedule: ScheduleBlock = msgspec.field(default_factory=ScheduleBlock)
    layout: LayoutBlock = msgspec.field(default_factory=LayoutBlock)
    checkpoint: CheckpointBlock = msgspec.field(default_factory=CheckpointBlock)
    checks: ChecksBlock = msgspec.field(default_factory=ChecksBlock)
    train: ExternalBlock | None = None


class Recipe(RecipeKeys, kw_only=True, frozen=True):
    """A recipe that can be run.

    Attributes:
        name: The name of its file, without the ending.
        notes: What `recipe_file` found that the user should know.
    """

    name: str
    notes: tuple[str, ...] = ()
