"""Tensors that a class does not have: kinds that a checkpoint may still contain, and why.

Most published checkpoints have tensors that their class does not load: buffers that it computes, layers for speculative
decoding, parts of a quantized weight. `EXTRA_TENSOR_KINDS` lists these kinds, each with its reason. Any other tensor
inside a module of the class belongs to another model: loaders drop it, and the loaded model gives other results than
the original.

    mtp.fc.weight                               allowed: a multi-token prediction (MTP) layer
    model.layers.0.self_attn.q_norm.weight      a mismatch: no Llama has it in model.layers.0.self_attn
    vision_tower.patch_embed.weight             outside of all modules of a Llama: passes through with a note
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptx.architecture.architecture import Architecture
from ckptx.architecture.class_table import lookup
from ckptx.architecture.model_files import classes_of
from ckptx.catalog.entry import TensorEntry
from ckptx.mapping.names import pattern_of
from ckptx.mapping.quantization_scales import find_parent
from ckptx.processes.threads import lazy_property


class ExtraTensorKind(NamedTuple):
    """A kind of tensor that a checkpoint may have although its class does not.

    Attributes:
        name: Short name of the kind.
        pattern: Regular expression that is searched in a name with `*` for indices.
        reason: Reason for such a tensor, which reports repeat.
        is_computed: True for tensors whose values a loaded model does not need, because the class computes them or has
            no use for them; conversions do not mention them.
        dims: Allowed numbers of dims; empty for any.
        parent: Suffix of the tensor of the class that must exist for the kind to match: the name up to the match,
            followed by this suffix, is its name. Empty for no such condition.
        needs_weight: True if the tensor must belong to a weight of the class, see `find_parent`.
    """

    name: str
    pattern: str
    reason: str
    is_computed: bool = False
    dims: tuple[int, ...] = ()
    parent: str = ""
    needs_weight: bool = False


EXTRA_TENSOR_KINDS: tuple[ExtraTensorKind, ...] = (
    ExtraTensorKind(
        "rotary buffer",
        r"(^|[._])inv_freq$|(^|\.)(rotary_emb|rotary_pos_emb|rope)\.(cos|sin|freqs)(_cached|_cis)?$"
        r"|(^|\.)(cos|sin)_cached$|(^|\.)freqs_cis$",
        "buffer of rotary embeddings, computed from the config",
        is_computed=True,
    ),
    ExtraTensorKind(
        "causal mask",
        r"(^|\.)(attn|attention|self_attn|crossattention)\.(bias|mask|causal_mask)$",
        "causal mask that older releases saved, computed by the class",
        is_computed=True,
        dims=(2, 3, 4),
    ),
    ExtraTensorKind(
        "value of masked scores",
        r"(^|\.)(attn|attention|self_attn|crossattention)\.masked_bias$",
        "constant for masked scores that older releases saved",
        is_computed=True,
        dims=(0, 1),
    ),
    ExtraTensorKind(
        "ids",
        r"(^|\.)(position_ids|token_type_ids)$",
        "buffer of ids that count up, computed by the class",
        is_computed=True,
    ),
    ExtraTensorKind(
        "table of positions",
        r"(^|\.)(relative_position_index|relative_coords_table|attn_mask)$"
        r"|(^|\.)embed_positions\.(weights|_float_tensor)$",
        "table of positions that follows from sizes, computed by the class",
        is_computed=True,
    ),
    ExtraTensorKind(
        "version",
        r"(^|\.)version$",
        "version number that fairseq saved",
        is_computed=True,
        dims=(0, 1),
    ),
    ExtraTensorKind(
        "MTP layer",
        r"^[^*]*(?<![^.])(mtp|nextn)[A-Za-z0-9_]*(\.|$)",
        "multi-token prediction (MTP) layer, for speculative decoding",
    ),
    ExtraTensorKind(
        "extra state",
        r"(^|\.)_extra_state$",
        "state of Transformer Engine, which no class of transformers has",
    ),
    ExtraTensorKind(
        "packed weight",
        r"\.(qweight|qzeros|scales|zeros|g_idx|perm|weight_packed|weight_shape|weight_zero_point|weight_g_idx"
        r"|weight_scale(s|_inv|_2)?|weight_global_scale|SCB|weight_format|absmax|quant_map|nested_absmax"
        r"|nested_quant_map|quant_state\.[a-z_0-9]+|codes|codebooks|centroids|indices|Qidxs|SU|SV|trellis|suh|svh)$",
        "packed data or scale of a quantized weight",
        needs_weight=True,
    ),
    ExtraTensorKind(
        "scale of activations",
        r"\.(input_scale|output_scale|activation_scale|input_global_scale|input_zero_point|output_zero_point"
        r"|[qkv]_scale|prob_scale|kv_scale|[qkv]_zero_point|act\.scales)$|(^|\.)[a-z_]*quantizer\._[a-z_]+$"
        r"|(^|\.)(activation_post_process|weight_fake_quant)\.",
        "scale of quantized activations or of a quantized KV cache",
    ),
    ExtraTensorKind(
        "scale of a parameter",
        r"_(blocks|scales|scale|scale_inv|scale_2|packed|bias_scale|zero_point|qdata)$|\.(scale|zero|qscale_weight"
        r"|qscale_act)$",
        "packed data or scale of a quantized weight",
        needs_weight=True,
    ),
    ExtraTensorKind(
        "weight norm",
        r"\.weight_g$",
        "magnitude of a weight norm under the name of older releases of torch",
        parent=r".parametrizations.weight.original0",
    ),
    ExtraTensorKind(
        "weight norm",
        r"\.weight_v$",
        "direction of a weight norm under the name of older releases of torch",
        parent=r".parametrizations.weight.original1",
    ),
)
"""The kinds, in the order in which they are tried. Adapters are not among them: they change the weights next to them,
and `ckptx.formats.hf.reader.refuse_adapters` refuses them."""

IGNORED_REASON = "ignored by the class"
QUANTIZED_REASON = "part of a quantized weight of the class"
OUTSIDE_REASON = "outside the modules of the class"
_PACKED_KIND = "packed weight"
# Heads of classifiers, taggers and models that answer questions, by their names in most classes.
_TASK_HEADS = frozenset({"score", "classifier", "classification_head", "qa_outputs"})
_MIN_COMPONENTS = 2  # components of the shortest suffix that is looked up in the classes of a tower


class ExtraTensor(NamedTuple):
    """A tensor that the class does not have.

    Attributes:
        reason: Reason why a checkpoint may have it. Empty for a mismatch: a tensor that no reason explains, in a module
            of the class or in place of a head that is not stored.
        module: Innermost module of the class that contains it, with `*` for indices. Empty if there is none, and for an
            expected tensor.
        is_computed: True if a loaded model does not need its values, see `ExtraTensorKind.is_computed`.
        is_expected: True if its presence is no sign of another model: one of `EXTRA_TENSOR_KINDS` matches it, the class
            ignores it, or it belongs to a quantized weight. Tensors of other classes, or outside of the modules of the
            class, have a reason but are not expected.
    """

    reason: str
    module: str = ""
    is_computed: bool = False
    is_expected: bool = False


class ExtraTensors:
    """The tensors of a checkpoint that its class does not have.

    Attributes:
        by_name: Extra tensors by name, in the order of the checkpoint. Empty for a class whose names are unknown.
    """

    def __init__(
        self, architecture: Architecture, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
    ) -> None:
        """Find the extra tensors.

        Args:
            architecture: Architecture of the class, under the names of `tensors`.
            config: Contents of `config.json`.
            tensors: Tensors of the model by name.
        """
        self._architecture, self._config, self._tensors = architecture, config, tensors
        self._ownership: dict[str, bool] = {}
        self._by_pattern: dict[tuple[str, int], ExtraTensor | None] = {}
        self.by_name: dict[str, ExtraTensor] = {}
        for name, entry in tensors.items() if architecture.name_patterns else ():
            extra = self._classify(name, entry)
            if extra is not None:
                self.by_name[name] = extra

    def is_part_of_quantized_weight(self, name: str) -> bool:
        """Return True if a tensor is a quantized weight of the class, or belongs to one, as a scale or a bias does."""
        parent = find_parent(name, self._owns)
        if parent is None:
            return False
        if self._is_quantized and parent.weight not in self._tensors:
            return True
        return parent.weight.removesuffix(".weight") in self._quantized_modules

    # -- tensors of the class

    def _owns(self, name: str) -> bool:
        """Return True if the class has a tensor of this name."""
        pattern = pattern_of(name)
        if pattern not in self._ownership:
            self._ownership[pattern] = self._architecture.owns(pattern)
        return self._ownership[pattern]

    @lazy_property
    def _modules(self) -> frozenset[str]:
        """Patterns of all modules of the class, with and without the name of the base model."""
        prefix = self._architecture.base_prefix
        dotted_prefix = f"{prefix}." if prefix else ""
        found = set()
        for pattern in self._architecture.name_patterns:
            parts = pattern.removesuffix(".**").split(".")
            found |= {".".join(parts[:end]) for end in range(1, len(parts) + pattern.endswith(".**"))}
        found |= {each.removeprefix(dotted_prefix) for each in found}
        found |= {dotted_prefix + each for each in found if not each.startswith(dotted_prefix)}
        # The base model itself does not count: towers and heads of other models would be inside it.
        return frozenset(found - {prefix})

    def _innermost_module(self, pattern: str) -> str:
        parts = pattern.split(".")
        paths = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        return next((path for path in paths if path in self._modules), "")

    def _is_in_base_model(self, pattern: str) -> bool:
        return pattern.startswith(f"{self._architecture.base_prefix}.")

    # -- one tensor

    def _classify(self, name: str, entry: TensorEntry) -> ExtraTensor | None:
        """Return a tensor as an extra one; None for a tensor of the class."""
        if self._owns(name):
            return None
        pattern, dims = pattern_of(name), len(entry.shape)
        if (pattern, dims) not in self._by_pattern:
            self._by_pattern[pattern, dims] = self._classify_by_pattern(pattern, dims)
        return self._by_pattern[pattern, dims] or self._classify_by_module(name, pattern)

    def _classify_by_pattern(self, pattern: str, dims: int) -> ExtraTensor | None:
        """Return the extra tensor by the first kind that matches a pattern, or by the names that the class ignores.

        Returns:
            None if neither matches.
        """
        kind = next((each for each in EXTRA_TENSOR_KINDS if self._matches_kind(each, pattern, dims)), None)
        if kind is not None:
            return ExtraTensor(kind.reason, is_computed=kind.is_computed, is_expected=True)
        return ExtraTensor(IGNORED_REASON, is_expected=True) if self._architecture.ignores(pattern) else None

    def _matches_kind(self, kind: ExtraTensorKind, pattern: str, dims: int) -> bool:
        match = re.search(kind.pattern, pattern)
        if match is None or (kind.dims and dims not in kind.dims):
            return False
        if kind.parent and not self._owns(pattern[: match.start()] + kind.parent):
            return False
        return not kind.needs_weight or find_parent(pattern, self._owns) is not None

    def _classify_by_module(self, name: str, pattern: str) -> ExtraTensor:
        """Return a tensor of no kind, which the class does not ignore, as an extra one, by the module that has it."""
        if self.is_part_of_quantized_weight(name):
            return ExtraTensor(QUANTIZED_REASON, is_expected=True)
        other, module = self._other_class(pattern), self._innermost_module(pattern)
        is_head = not self._is_in_base_model(pattern) and (bool(other) or pattern.split(".")[0] in _TASK_HEADS)
        if is_head and self._lacks_own_head:
            return ExtraTensor("", module)
        if other and pattern.rpartition(".")[0] not in self._modules:  # not a bias that the class's head lacks
            return ExtraTensor(f"of {other}, another class of this model type", module)
        return ExtraTensor("", module) if module else ExtraTensor(OUTSIDE_REASON)

    # -- related tensors

    @lazy_property
    def _is_quantized(self) -> bool:
        nested = self._config.get("text_config")
        return any("quantization_config" in each for each in (self._config, nested) if isinstance(each, Mapping))

    @lazy_property
    def _quantized_modules(self) -> frozenset[str]:
        """Names of quantized weights, without ".weight": packed ones, and those with a dtype that cannot be cast."""
        packed = [re.compile(each.pattern) for each in EXTRA_TENSOR_KINDS if each.name == _PACKED_KIND]
        found = set()
        for name, entry in self._tensors.items():
            if self._owns(name):
                weight = None if entry.dtype.is_castable else name
            else:
                is_packed = not entry.dtype.is_castable or any(each.search(name) for each in packed)
                parent = find_parent(name, self._owns) if is_packed else None
                weight = None if parent is None else parent.weight
            if weight is not None:
                found.add(weight.removesuffix(".weight"))
        return frozenset(found)

    # -- other classes

    @lazy_property
    def _lacks_own_head(self) -> bool:
        """Return True if the class has a head, and the checkpoint has no tensor of it.

        Then a head of another class means that the checkpoint is of that class, for example a classifier with the
        config of a language model, whose own head is tied and so not stored.
        """
        patterns = {pattern_of(name) for name in self._tensors}
        if not self._architecture.base_prefix or not any(map(self._is_in_base_model, patterns)):
            return False
        own = {each for each in self._architecture.name_patterns if not self._is_in_base_model(each)}
        return bool(own) and not own & patterns

    def _other_class(self, pattern: str) -> str:
        """Return the name of another class that has the tensor, or an empty string.

        It has the same model type, or that of a tower; then a suffix of the name has to be one of its names.
        """
        for each in self._siblings:
            if each.owns(pattern):
                return each.class_name
        parts = pattern.split(".")
        suffixes = [".".join(parts[start:]) for start in range(1, len(parts) - _MIN_COMPONENTS + 1)]
        return next((each.class_name for each in self._towers if any(map(each.owns, suffixes))), "")

    @lazy_property
    def _siblings(self) -> tuple[Architecture, ...]:
        return _architectures_of_type(self._architecture.model_type, excluded_class=self._architecture.class_name)

    @lazy_property
    def _towers(self) -> tuple[Architecture, ...]:
        """Classes whose model type is that of a sub-config, such as vision_config."""
        nested = (each for each in self._config.values() if isinstance(each, Mapping))
        types = dict.fromkeys(str(each.get("model_type")) for each in nested if each.get("model_type"))
        return tuple(known for each in types for known in _architectures_of_type(each))


def _architectures_of_type(model_type: str, excluded_class: str = "") -> tuple[Architecture, ...]:
    found = (lookup(name) for name in classes_of(model_type) if name != excluded_class)
    return tuple(each for each in found if each is not None)
