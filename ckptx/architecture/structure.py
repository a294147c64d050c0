"""Structure of a class: its plan, layers and heads, and the conversion of disk names to model names.

Numbers are expressions over ``config.json`` (`expressions`); tensor names are patterns, indices replaced by ``*``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptx.architecture.expressions import COMPOSITE_PREFIX


class StackRule(NamedTuple):
    """A list of layers; see `ckptx.layout.stages.Stack`.

    Attributes:
        path: Path of the list, in model names.
        length: Number of layers, as an expression.
        before: Modules and parameters that run right before the first layer; only those of a decoder after an encoder
            are listed.
        after: Modules and parameters that run after the last layer.
    """

    path: str
    length: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class LoadConversion(NamedTuple):
    """Conversion of tensors on disk to tensors of the model; a rename if there are no operations.

    Attributes:
        sources: Patterns on disk.
        targets: Patterns in the model.
        ops: Operations in the order in which loading applies them, as text, see `split_op`.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ops: tuple[str, ...] = ()


Heads = tuple[tuple[str, str], ...]  # candidates (number of heads, size of a head in elements), both expressions


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure of a model class: the facts that sharding its tensors requires.

    Attributes:
        text_config_path: Dotted path from the root config to the config of the layers (``text_config``), empty for the
            root.
        text_type: The model type of that config.
        output_head: Module that maps to the vocabulary; empty if there is none.
        embedding: Module that maps from the vocabulary; empty if there is none.
        plan: Tensor-parallel plan of the model, pattern -> style, without entries that match nothing.
        stacks: Lists of layers in the order they run.
        attention_heads: Pattern of the plan -> candidates (number of heads, size of a head), whose product is the
            sharded dim of an attention projection.
        transposed: Patterns of modules whose weight is stored as [in, out].
        conversions: Conversions between the output of `save_pretrained` and the model: all names that differ, and all
            tensors that are stored in another form.
        other_conversions: The same for the other namings that can be loaded, as far as they differ from `conversions`.
        defaults: Defaults of the config classes for keys of expressions that `config.json` omits.
        aliases: Dotted key -> another name of its last part that the config class accepts.
        root: Keys to follow in `config.json` first, see `Scope`; () in the model files.
    """

    text_config_path: str = ""
    text_type: str = ""
    output_head: str = ""
    embedding: str = ""
    plan: Mapping[str, str] = field(default_factory=dict)
    stacks: tuple[StackRule, ...] = ()
    attention_heads: Mapping[str, Heads] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    conversions: frozenset[LoadConversion] = frozenset()
    other_conversions: frozenset[LoadConversion] = frozenset()
    defaults: Mapping[str, int | None] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    root: tuple[str, ...] = ()

    def merged_with(self, other: Structure) -> Structure:
        """Return the structure with the entries of `other` added, the same class under another config."""
        return dataclasses.replace(
            self,
            plan={**other.plan, **self.plan},
            attention_heads={**other.attention_heads, **self.attention_heads},
            stacks=_merge_stacks(self.stacks, other.stacks),
            transposed=self.transposed | other.transposed,
            conversions=self.conversions | other.conversions,
            other_conversions=(self.other_conversions | other.other_conversions) - self.conversions - other.conversions,
            defaults={**_without_composite_defaults(other.defaults), **self.defaults},
            aliases={**other.aliases, **self.aliases},
        )

    def with_conversions_of(self, other: Structure) -> Structure:
        """Return the structure with the conversions of `other` added, the same class with another sub-model."""
        changes = self.conversions | other.conversions
        variants = (self.other_conversions | other.other_conversions) - changes
        return dataclasses.replace(self, conversions=changes, other_conversions=variants)

    def expressions(self) -> set[str]:
        """Return all expressions of the structure."""
        found = {stack.length for stack in self.stacks}
        found |= {each for pairs in self.attention_heads.values() for pair in pairs for each in pair}
        for change in self.conversions | self.other_conversions:
            for op in change.ops:
                found.update(split_op(op)[1])
        return found


def _merge_stacks(own_stacks: tuple[StackRule, ...], other_stacks: tuple[StackRule, ...]) -> tuple[StackRule, ...]:
    """Return `own_stacks`, with the modules before and after added from `other_stacks` of the same path."""
    if not own_stacks:
        return other_stacks
    others = {stack.path: stack for stack in other_stacks}
    return tuple(
        stack._replace(
            before=_merge_modules(stack, stack.before, others[stack.path].before),
            after=_merge_modules(stack, stack.after, others[stack.path].after),
        )
        if stack.path in others
        else stack
        for stack in own_stacks
    )


def _merge_modules(stack: StackRule, own_modules: tuple[str, ...], other_modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the union; modules next to the list of layers come before modules outside, as in the model files."""
    lead = stack.path.rpartition(".")[0] + "."
    names = dict.fromkeys((*own_modules, *other_modules))
    return tuple(sorted(names, key=lambda name: not name.startswith(lead)))


def _without_composite_defaults(defaults: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the defaults without those that begin with `COMPOSITE_PREFIX`, which are valid for one config only."""
    return {key: value for key, value in defaults.items() if not key.startswith(COMPOSITE_PREFIX)}


def split_op(text: str) -> tuple[list[str], list[str]]:
    """Split an operation of a `LoadConversion` into its words (kind and numbers) and its expressions.

    The words come first. Expressions (see `ckptx.architecture.expressions`) follow a colon, with semicolons in between:

        merge DIM, concat DIM, chunk DIM
        split DIM : SIZE ; SIZE                sizes of the parts
        transpose DIM DIM EITHER : SIZE        EITHER is 1 if checkpoints store it either way; size along the second dim
        interleave DIM INVERSE
        permute_rope INVERSE INDEX ... : HEADS indices of the permuted tensors, none for all
        unsupported:CLASS                      class of transformers that ckptx lacks, or a description

    `plans` converts these texts to `Op`, which describes the kinds.
    """
    words, _, expressions = text.partition(" : ")
    return words.split(), expressions.split(" ; ") if expressions else []


def join_path(path: str, name: str) -> str:
    """Return the path of `name` in the module or config at `path`, which may be empty."""
    return f"{path}.{name}" if path else name


def in_sub_config(expression: str, path: str) -> str:
    """Return the expression with every key moved into the config at `path`."""
    return re.sub(r"[A-Za-z_][A-Za-z0-9_.]*", lambda key: join_path(path, key[0]), expression)


def matches_parameter(pattern: str, names: Iterable[str]) -> bool:
    """Return True if a pattern of a plan names a parameter, or a module that contains one."""
    return any(name == pattern or name.startswith(pattern + ".") for name in names)
