"""Types of manual corrections: one for each section of a file in `corrections/`.

Every correction has its reason. Patterns in the sections `plan` and `absent` are relative, because they apply to every
class around a text model: ``@layers`` stands for the path of each list of layers, and ``@around`` for the module that
contains it. Paths and modules in the other sections are FQNs (dotted module paths) in the class that the correction
names. Alternatives are in braces. Expressions (`expressions`) read the config of the text model.

Corrections are named tuples: `ckptx inspect` reads only some, and creating a dozen dataclasses would take longer than
using them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from ckptx.architecture.structure import Heads


class PlanCorrection(NamedTuple):
    """A tensor-parallel rule that is missing or wrong in the plan of transformers.

    It defines which elements each rank holds, for example a chunk of each of q, k and v in the rows ``[q|k|v]``, and is
    for sharding files. A forward pass runs with it only if `ForwardCorrection.runs` has its pattern, or if
    `ckptx.architecture.run_support.is_valid_for_forward` returns True for it.

    Attributes:
        patterns: Patterns of modules or parameters, with alternatives in braces.
        style: Style as in `ckptx.layout.styles`.
        reason: Reason for the correction, which reports repeat.
        groups: Widths in elements of the fused parts along the sharded dim, as expressions; empty if it is not fused.
            If the config gives no number for one of them, the correction does not apply.
        heads: Candidates (number of heads, size of a head) whose product is the sharded dim, as expressions; empty if
            shards need not hold whole heads.
        when: Expression; the correction applies if it has a value other than 0.
        note: Note for maintainers: the contents of the tensors, or related tensors that stay replicated.
    """

    patterns: str
    style: str
    reason: str
    groups: tuple[str, ...] = ()
    heads: Heads = ()
    when: str = "1"
    note: str = ""


class AbsentCorrection(NamedTuple):
    """Tensors that the layers from `first_layer` on do not have, or do not use if they are on disk.

    Attributes:
        patterns: Patterns of modules.
        first_layer: Index of the first layer without them, as an expression.
        reason: Reason why the layers do not need them.
    """

    patterns: str
    first_layer: str
    reason: str


class NoStacksCorrection(NamedTuple):
    """Marks a class whose layers are not a list that runs from first to last, so that no pipeline can split it.

    Attributes:
        reason: Order in which the layers run instead.
    """

    reason: str


class DefaultsCorrection(NamedTuple):
    """The minimal config for building a class that cannot be built with its own defaults; for `tools/build_tables.py`.

    The values affect sizes only: names and ties are the same for every checkpoint of the class.

    Attributes:
        config: Arguments of the config class.
        reason: Problem with the defaults.
    """

    config: Mapping[str, Any]
    reason: str


class NoStagesCorrection(NamedTuple):
    """A class that the runtime cannot run as pipeline stages, although its layers are a list.

    Attributes:
        class_name: Name of the class.
        reason: Reason why it cannot.
    """

    class_name: str
    reason: str


class SequenceParallelModules(NamedTuple):
    """Modules for sequence parallelism; see `ckptx.runtime.parallel.tensor_parallel.sequence`.

    Outputs of single layers that a caller requests, such as hidden states, are slices of the sequence. Shapes are those
    of one microbatch: B sequences of S tokens, H features, and K selected experts for each token.

    Attributes:
        layers: Path of the list of decoder layers.
        whole: Modules of every layer that need the whole sequence [B, S, H], as paths below the layer.
        experts: Modules of some layers that get all tokens [B * S, H] in any order. Their other arguments with a row
            per token, such as routing weights and expert indices [B * S, K], have the same order.
        tokenwise: Modules of some layers that process tokens independently; norms do so in every class and are not
            listed.
        arguments: Names of the arguments of a layer [B, S, ...] that are sliced along S like the hidden states.
    """

    layers: str
    whole: tuple[str, ...] = ("self_attn", "mlp")
    experts: tuple[str, ...] = ()
    tokenwise: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


class ForwardCorrection(NamedTuple):
    """Options of the forward pass of a class under tensor parallelism, all of them verified by tests.

    Attributes:
        class_name: Name of the class, which may have several corrections with different options.
        reason: Reason why the options are valid.
        head: Module whose output stays sharded over the vocabulary; empty for none.
        sequence: Modules for sequence parallelism; None if it is not supported.
        runs: Patterns of plan corrections that are valid for the forward pass, too, not only for sharding files.
        styles: Module -> additional style that the forward pass needs; these styles shard nothing.
        reads_weight: Module -> another module whose weight the `forward` of the first reads; the weight is gathered
            for the duration of that call.
        reads_when: Key of the text model's config; `reads_weight` applies only if its value is not zero. Empty if it
            always applies.
    """

    class_name: str
    reason: str
    head: str = ""
    sequence: SequenceParallelModules | None = None
    runs: tuple[str, ...] = ()
    styles: Mapping[str, str] = {}
    reads_weight: Mapping[str, str] = {}
    reads_when: str = ""


class LayersCorrection(NamedTuple):
    """Paths of the lists of layers of a multimodal class, separately for language, vision and audio.

    The paths in one attribute are alternatives: FQNs of the same list in different releases of transformers, or with
    different towers. The first that exists is used, so that a list with two names counts once.

    Attributes:
        class_name: Name of the class.
        reason: Reason for these paths.
        language: Paths of the decoder layers.
        vision: Paths of the layers of the vision tower.
        audio: Paths of the layers of the audio tower.
    """

    class_name: str
    reason: str
    language: tuple[str, ...]
    vision: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()


class LayerPartsCorrection(NamedTuple):
    """Names of parts of a layer that only this model type uses, for activation checkpointing.

    Attributes:
        reason: Description of the parts.
        attention: Names of modules that mix tokens.
        mlp: Names of modules that process tokens independently.
        norms: Names of norms.
    """

    reason: str
    attention: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


class InputCorrection(NamedTuple):
    """An image or audio input of a class.

    Attributes:
        kind: "images" or "audio" for inputs within a text sequence; "encoder_audio" for the audio input of an encoder
            whose decoder generates text.
        form: Key of the function that makes the input, in the table of its kind in `ckptx.runtime.parity.inputs`.
        reason: Description of the input.
        settings: Keyword arguments of that function.
        class_name: The only class of the model type with this input; empty for all.
    """

    kind: str
    form: str
    reason: str
    settings: Mapping[str, Any] = {}
    class_name: str = ""


class TowerCorrection(NamedTuple):
    """Differences from CLIP of a vision model of this type, for classes that accept any vision model as their tower.

    Attributes:
        reason: Description of the difference.
        any_size: True if the tower takes images of any size, together with their sizes.
        class_token: True if the tower returns a token for the whole image before those of the patches, as CLIP does.
    """

    reason: str
    any_size: bool = False
    class_token: bool = True


class TrainerNamingCorrection(NamedTuple):
    """A class that a trainer (torchtitan or Megatron) implements itself, with tensor names of its own.

    Attributes:
        class_name: Name of the class.
        form: Key of the names of the class in the tables of the trainer, see `ckptx.architecture.trainer_naming`;
            "head_norms", for example.
        reason: Difference from other classes.
    """

    class_name: str
    form: str
    reason: str


_ClassCorrection = TypeVar(
    "_ClassCorrection", ForwardCorrection, LayersCorrection, NoStagesCorrection, TrainerNamingCorrection
)


class Corrections(NamedTuple):
    """All corrections of one model type, by section.

    Attributes:
        plan: Tensor-parallel rules.
        absent: Tensors that some layers do not have.
        no_stacks: At most one correction, which excludes pipelines.
        defaults: At most one config with which the classes can be built.
        no_stages: Classes that cannot run as pipeline stages.
        forward: Options of the forward pass under tensor parallelism, by class.
        layers: Paths of the lists of layers of multimodal classes.
        layer_parts: Names of parts of a layer, for activation checkpointing.
        inputs: Image and audio inputs.
        as_tower: At most one correction about a model that is used as a vision tower.
        torchtitan: Classes for which torchtitan has a model.
        megatron: Classes whose Megatron names are known.
    """

    plan: tuple[PlanCorrection, ...] = ()
    absent: tuple[AbsentCorrection, ...] = ()
    no_stacks: tuple[NoStacksCorrection, ...] = ()
    defaults: tuple[DefaultsCorrection, ...] = ()
    no_stages: tuple[NoStagesCorrection, ...] = ()
    forward: tuple[ForwardCorrection, ...] = ()
    layers: tuple[LayersCorrection, ...] = ()
    layer_parts: tuple[LayerPartsCorrection, ...] = ()
    inputs: tuple[InputCorrection, ...] = ()
    as_tower: tuple[TowerCorrection, ...] = ()
    torchtitan: tuple[TrainerNamingCorrection, ...] = ()
    megatron: tuple[TrainerNamingCorrection, ...] = ()


def filter_by_class(corrections: tuple[_ClassCorrection, ...], class_name: str) -> tuple[_ClassCorrection, ...]:
    """Return the corrections that name a class."""
    return tuple(each for each in corrections if each.class_name == class_name)


def expand_braces(patterns: str) -> list[str]:
    """Return all patterns of a string with alternatives in braces.

    Example:
        a.{b,c}.d -> a.b.d, a.c.d
    """
    front, brace, rest = patterns.partition("{")
    if not brace:
        return [patterns]
    choices, _, back = rest.partition("}")
    return [front + choice + ending for choice in choices.split(",") for ending in expand_braces(back)]
