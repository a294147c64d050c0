"""The nouns of what is corrected by hand: one kind of row for each section of a file in `corrections/`.

Every row has its reason. Patterns of a plan and of absent tensors are relative: ``@layers`` is a list of layers,
``@around`` the module that holds it; alternatives stand in braces. Expressions (`expressions`) read the config of the
text model. Paths and modules of the other rows are FQNs of the class that the row names.

The rows are named tuples: `inspect` reads some, and a dozen dataclasses would take it longer to make than to use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from ckptx.architecture.structure import Heads


class PlanRow(NamedTuple):
    """A tensor parallel rule that the plan of transformers leaves out or gets wrong.

    It says which elements belong together, not how a forward pass would run: rows of ``[q|k|v]`` are three groups.

    Attributes:
        patterns: Of modules or parameters.
        style: As in `ckptx.layout.styles`.
        reason: Why the row is here; reports repeat it.
        groups: Widths of what is fused along the cut dim, expressions.
        heads: Candidates for what the cut dim is made of, expressions.
        when: An expression; the row counts if it is not 0.
        note: For whoever changes the row: what the tensors are made of, or what stays whole beside them.
    """

    patterns: str
    style: str
    reason: str
    groups: tuple[str, ...] = ()
    heads: Heads = ()
    when: str = "1"
    note: str = ""


class AbsentRow(NamedTuple):
    """Tensors that the layers from `first` on do not have, or do not use where they are on disk.

    Attributes:
        patterns: Of modules.
        first: An expression: the first layer without them.
        reason: Why the layers can do without.
    """

    patterns: str
    first: str
    reason: str


class NoStacksRow(NamedTuple):
    """The layers of the class are no list that runs from its first to its last, so no pipeline can split it."""

    reason: str


class DefaultsRow(NamedTuple):
    """The least that makes a class build whose own defaults do not; for `tools/build_tables.py`.

    The values choose sizes only: names and ties are the same for every checkpoint of the class.

    Attributes:
        config: What its config class is given.
        reason: What is wrong with the defaults.
    """

    config: Mapping[str, Any]
    reason: str


class Sequence(NamedTuple):
    """Where the sequence is cut; see `ckptx.runtime.parallel.tensor_parallel.sequence`.

    What a model is asked to give of the inside of its layers, such as their hidden states, are slices.

    Attributes:
        layers: The list of decoder layers.
        whole: Modules of every layer that need the whole sequence [B, S, H].
        experts: Modules of some layers that need all tokens [B * S, H], and what goes with each, in any order.
        tokenwise: Modules of some layers that compute each token by itself, as norms do everywhere.
        arguments: Arguments of a layer [B, S, ...] that go with the hidden states.
    """

    layers: str
    whole: tuple[str, ...] = ("self_attn", "mlp")
    experts: tuple[str, ...] = ()
    tokenwise: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


class ForwardRow(NamedTuple):
    """What the forward pass of a class may do under tensor parallelism; all of it is held by tests.

    Attributes:
        class_name: A class may have several rows, each for something else.
        reason: Why it may.
        head: The module whose output stays sharded over the vocabulary, empty for none.
        sequence: Where norms and residuals may run on a slice of the sequence; None for nowhere.
        runs: Patterns of plan rows, made to cut files, with which the forward pass runs on shards, too.
        styles: Styles that the forward pass needs beside them; they cut nothing.
        reads_weight: Modules whose forward reads a weight of another module: that weight is gathered around it.
        reads_when: A key of the text model's config; `reads_weight` counts only where it is not zero.
    """

    class_name: str
    reason: str
    head: str = ""
    sequence: Sequence | None = None
    runs: tuple[str, ...] = ()
    styles: Mapping[str, str] = {}
    reads_weight: Mapping[str, str] = {}
    reads_when: str = ""


class LayersRow(NamedTuple):
    """Where a multimodal class keeps its lists of layers, by group.

    Each group holds alternatives, FQNs under which one release of transformers or another, or one kind of tower or
    another, keeps the same list. The first that is there is meant, so that a list with two names counts once.

    Attributes:
        class_name: Whose lists these are.
        reason: Why these places and no others.
        language: The decoder.
        vision: The tower for images.
        audio: The tower for sounds.
    """

    class_name: str
    reason: str
    language: tuple[str, ...]
    vision: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()


class LayerPartsRow(NamedTuple):
    """Names that no other model type has for parts of a layer, so that activation checkpointing finds them.

    Attributes:
        reason: What the parts are.
        attention: Of what mixes tokens.
        mlp: Of what computes each token by itself.
        norms: Of norms.
    """

    reason: str
    attention: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


class InputRow(NamedTuple):
    """What a class is given to see or to hear.

    Attributes:
        kind: "images" or "audio" for what stands in a row of text, "heard" for what an encoder hears whose decoder
            writes.
        form: The function in `ckptx.runtime.parity.inputs` that makes it.
        reason: What the class takes.
        settings: Arguments of that function.
        class_name: The only class of the model type that takes it; empty for all.
    """

    kind: str
    form: str
    reason: str
    settings: Mapping[str, Any] = {}
    class_name: str = ""


class TowerRow(NamedTuple):
    """What is otherwise than in CLIP where a model of this type is the tower behind a class that takes any.

    Attributes:
        reason: What it does otherwise.
        any_size: Whether it takes images of any size, and is told which.
        class_token: Whether it gives a token for the whole image before those of the patches.
    """

    reason: str
    any_size: bool = False
    class_token: bool = True


class TorchtitanRow(NamedTuple):
    """A class that torchtitan has a model of.

    Attributes:
        class_name: The class.
        form: The names of `ckptx.architecture.trainer_naming.torchtitan` that it has there.
        reason: In what it differs from the others.
    """

    class_name: str
    form: str
    reason: str


_ClassRow = TypeVar("_ClassRow", ForwardRow, LayersRow, TorchtitanRow)


class Corrections(NamedTuple):
    """All rows of one model type, by section."""

    plan: tuple[PlanRow, ...] = ()
    absent: tuple[AbsentRow, ...] = ()
    no_stacks: tuple[NoStacksRow, ...] = ()
    defaults: tuple[DefaultsRow, ...] = ()
    forward: tuple[ForwardRow, ...] = ()
    layers: tuple[LayersRow, ...] = ()
    layer_parts: tuple[LayerPartsRow, ...] = ()
    inputs: tuple[InputRow, ...] = ()
    as_tower: tuple[TowerRow, ...] = ()
    torchtitan: tuple[TorchtitanRow, ...] = ()


def of_class(rows: tuple[_ClassRow, ...], class_name: str) -> tuple[_ClassRow, ...]:
    """The rows that name a class."""
    return tuple(row for row in rows if row.class_name == class_name)


def expanded(patterns: str) -> list[str]:
    """Every pattern of a text with braces.

    Example:
        a.{b,c}.d -> a.b.d, a.c.d
    """
    front, brace, rest = patterns.partition("{")
    if not brace:
        return [patterns]
    choices, _, back = rest.partition("}")
    return [front + choice + ending for choice in choices.split(",") for ending in expanded(back)]
