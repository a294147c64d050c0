"""An opened adapter: its tensors grouped by the layer that they change, and the tensors that replace others.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]     A of a linear layer
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]    B
    base_model.model.model.embed_tokens.lora_embedding_A             [rank, vocabulary]
    base_model.model.model.embed_tokens.lora_embedding_B             [dim, rank]
    base_model.model...q_proj.lora_magnitude_vector                  [out]          norms of the rows, DoRA only
    base_model.model...q_proj.lora_B.bias                            [out]          added to the bias, `lora_bias` only
    base_model.model.lm_head.weight                                  replaces a tensor of the model

PEFT leaves the name of the adapter out of the file (`lora_A.weight`); state dicts have it (`lora_A.default.weight`).
Both forms are read. Source: `get_peft_model_state_dict` of PEFT 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptx.adapters.config import MAX_MATCHED_NAME, AdapterConfig, read_adapter_config
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.entry import TensorEntry
from ckptx.errors import InputError, UnsupportedError
from ckptx.wording import counted

_PREFIX = "base_model.model."
# Module, kind of tensor, name of the adapter if it is in the name, and the last component.
LORA_NAME = re.compile(
    r"(?P<module>.+?)\.lora_(?P<kind>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
SAVED_NAME = re.compile(r"(?P<module>.+)\.modules_to_save(?:\.(?P<adapter>[^.]+))?\.(?P<leaf>[^.]+)")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class ExpertSlice(NamedTuple):
    """The part of an adapter of a parameter with all experts that changes one stored tensor.

    Attributes:
        experts: Number of experts of the parameter.
        first: Index of the first expert of the stored tensor.
        row: First row of the stored tensor in the matrix of its expert.
        column: First column of the stored tensor in the matrix of its expert.
    """

    experts: int
    first: int
    row: int
    column: int


class LoraLayer(NamedTuple):
    """The tensors of an adapter that change one weight of the model.

    Attributes:
        module: Name of the module in the model, without "base_model.model.".
        a: [rank, in]; of a convolution [rank, in, *kernel]; of an embedding [rank, vocabulary].
        b: [out, rank]; of a convolution [out, rank, 1, ...]; of an embedding [dim, rank].
        is_embedding: True for an embedding, whose weight is [vocabulary, dim].
        magnitude: Norms of DoRA, [out]; of an embedding [dim]; None without DoRA.
        bias: Addition to the bias before scaling, [out]; None for none.
        rank: Rank.
        scaling: Factor of `B A`, and of `bias`.
        expert: For an adapter of a parameter with all experts, the part that this layer is; None for a module. A is
            [experts * rank, in], one expert after another, and B [out, rank * experts], one index of the rank after
            another.
    """

    module: str
    a: TensorEntry
    b: TensorEntry
    is_embedding: bool
    magnitude: TensorEntry | None
    bias: TensorEntry | None
    rank: int
    scaling: float
    expert: ExpertSlice | None = None

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Return all tensors of the layer."""
        return tuple(each for each in (self.a, self.b, self.magnitude, self.bias) if each is not None)


class ParameterFactors(NamedTuple):
    """A and B of a parameter with all experts of a layer; the file does not record which parameter of the module it is.

    Attributes:
        a: [experts * rank, in].
        b: [out, rank * experts].
    """

    a: TensorEntry
    b: TensorEntry


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter.

    Attributes:
        catalog: Catalog of its tensors, under stored names.
        config: Settings.
        layers: Layer by module name, in the order of the file.
        replaced: Name of a tensor in the model -> tensor of the adapter that replaces it.
        parameters: Name of a module, such as the experts of a layer -> factors of its adapted parameters.
    """

    catalog: Catalog
    config: AdapterConfig
    layers: Mapping[str, LoraLayer] = field(default_factory=dict)
    replaced: Mapping[str, TensorEntry] = field(default_factory=dict)
    parameters: Mapping[str, tuple[ParameterFactors, ...]] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        """Return the last components of the names of the modules with a layer, each once, in order."""
        return list(dict.fromkeys(module.rpartition(".")[2] for module in (*self.layers, *self.parameters)))

    @property
    def adapted_names(self) -> list[str]:
        """Return the names that patterns of the config match: of modules, and of parameters of modules."""
        parameters = [
            f"{module}.{target.rpartition('.')[2]}" for module in self.parameters for target in self.targets_of(module)
        ]
        return [*self.layers, *parameters]

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of the layers, each once, ascending."""
        return sorted(set(map(self.config.layer_rank, self.adapted_names)))

    def targets_of(self, module: str) -> list[str]:
        """Return the names in `target_parameters` that may be parameters of a module."""
        return [
            target
            for target in self.config.target_parameters
            if f"{module}.{target.rpartition('.')[2]}".endswith(f".{target}")
        ]


def open_adapter(catalog: Catalog) -> Adapter:
    """Read the config of an opened adapter and group its tensors.

    Args:
        catalog: Catalog in the format "peft".

    Raises:
        InputError: The config is damaged, a tensor is missing or has a shape that does not fit the others or the
            config, or two tensors have one name in the model.
        UnsupportedError: The adapter is of a kind that ckptx does not read, or has tensors that it does not know.
    """
    return group_tensors(catalog, read_adapter_config(catalog.source))


def group_tensors(catalog: Catalog, config: AdapterConfig) -> Adapter:
    """Group the tensors of an adapter by layer; for the arguments and errors see `open_adapter`."""
    parts: dict[str, dict[str, TensorEntry]] = {}
    replaced: dict[str, TensorEntry] = {}
    names: set[str | None] = set()
    for stored_name, entry in catalog.tensors.items():
        name = stored_name.removeprefix(_PREFIX)
        if entry.dtype.name not in _FLOATS:
            raise UnsupportedError(
                f'{catalog.location}: tensor "{stored_name}" has dtype {entry.dtype.name}; adapters in F32, BF16 or '
                "F16 are supported"
            )
        match = LORA_NAME.fullmatch(name)
        if match is not None:
            names.add(match["adapter"])
            kind = match["kind"] if match["leaf"] != "bias" else f"{match['kind']}.bias"
            if _WRAPPED_PARAMETER.search(match["module"]) and not config.target_parameters:
                raise UnsupportedError(
                    f'{catalog.location}: tensor "{stored_name}" adapts a parameter of its module, and the config '
                    "names no target_parameters; pass the config that the adapter was trained with"
                )
            if kind not in _KINDS or parts.setdefault(match["module"], {}).setdefault(kind, entry) is not entry:
                raise InputError(
                    f'{catalog.location}: tensor "{stored_name}" is a second or an unknown tensor of module '
                    f'"{match["module"]}"; save one adapter into each directory'
                )
            continue
        if any(part.startswith("lora_") or part in _OTHER_PARTS for part in name.split(".")):
            raise UnsupportedError(
                f'{catalog.location}: tensor "{stored_name}" is of a kind of adapter that ckptx does not merge; merge '
                "it with PEFT"
            )
        name = _model_name(name)
        if replaced.setdefault(name, entry) is not entry:
            raise InputError(
                f'{catalog.location}: tensors "{replaced[name].name}" and "{stored_name}" both replace "{name}"; '
                "remove one of them"
            )
    if len(names) > 1:
        listed = ", ".join(sorted(f'"{each}"' for each in names if each is not None))
        raise InputError(f"{catalog.location}: holds several adapters ({listed}); save one adapter into each directory")
    layers: dict[str, LoraLayer] = {}
    parameters: dict[str, list[ParameterFactors]] = {}
    for module, found in parts.items():
        if _is_parameter_module(config, module):
            owner = _WRAPPED_PARAMETER.sub("", module)
            parameters.setdefault(owner, []).append(_make_factors(catalog, module, found))
        else:
            layers[module] = _make_layer(catalog, config, module, found)
    if not parts and not replaced:
        raise InputError(f"{catalog.location}: has no tensors; save the adapter again")
    return Adapter(catalog, config, layers, replaced, {name: tuple(each) for name, each in parameters.items()})


# PEFT nests a wrapper for each adapted parameter of a module: `experts.base_layer.lora_A`.
_WRAPPED_PARAMETER = re.compile(r"(\.base_layer)+$")
_KINDS = ("A", "B", "embedding_A", "embedding_B", "magnitude_vector", "B.bias")
_OTHER_PARTS = frozenset({"token_adapter", "trainable_tokens_delta", "prompt_embeddings", "original_module"})


def _model_name(name: str) -> str:
    """Return the name in the model of a tensor that replaces another: `lm_head.modules_to_save.weight`."""
    match = SAVED_NAME.fullmatch(name)
    if match is not None:
        return f"{match['module']}.{match['leaf']}"
    module, _, leaf = name.rpartition(".")
    return f"{module.removesuffix('.base_layer')}.{leaf}" if module else name


def _is_parameter_module(config: AdapterConfig, module: str) -> bool:
    """Return True if the tensors of a layer adapt a parameter of the module, and not its weight."""
    if not config.target_parameters:
        return False
    if _WRAPPED_PARAMETER.search(module):
        return True
    if isinstance(config.target_modules, tuple):
        return not any(module == target or module.endswith(f".{target}") for target in config.target_modules)
    owners = {name.rpartition(".")[0].rpartition(".")[2] for name in config.target_parameters}
    return module.rpartition(".")[2] in owners | {"experts"}


def _make_factors(catalog: Catalog, module: str, found: Mapping[str, TensorEntry]) -> ParameterFactors:
    """Return A and B of a parameter.

    Raises:
        InputError: One is missing, or they have no two dims.
        UnsupportedError: There are other tensors, such as those of DoRA, which PEFT does not have for parameters.
    """
    if found.keys() - {"A", "B"}:
        (name, *_) = (entry.name for kind, entry in found.items() if kind not in ("A", "B"))
        raise UnsupportedError(
            f'{catalog.location}: tensor "{name}" belongs to an adapter of a parameter, which has A and B only; merge '
            "it with PEFT"
        )
    if found.keys() != {"A", "B"} or any(len(entry.shape) != 2 for entry in found.values()):
        shapes = ", ".join(f"{key} {list(entry.shape)}" for key, entry in found.items())
        raise InputError(
            f'{catalog.location}: module "{module}" has {shapes}, '
            "but A [experts * rank, in] and B [out, rank * experts] are required; save the adapter again"
        )
    return ParameterFactors(found["A"], found["B"])


def _make_layer(catalog: Catalog, config: AdapterConfig, module: str, found: Mapping[str, TensorEntry]) -> LoraLayer:
    """Return the layer of a module, from its tensors by kind.

    Raises:
        InputError: A tensor is missing, or shapes do not fit each other or the config.
        UnsupportedError: The adapter is of a parameter.
    """
    is_embedding = "embedding_A" in found or "embedding_B" in found
    names = ("embedding_A", "embedding_B") if is_embedding else ("A", "B")
    a, b = (found.get(name) for name in names)
    if a is None or b is None or (is_embedding and ("A" in found or "B" in found)):
        missing = names[0] if a is None else names[1]
        some = next(iter(found.values())).name
        raise InputError(
            f'{catalog.location}: module "{module}" has "{some}" but no lora_{missing}; the adapter is incomplete, '
            "save it again"
        )
    if (config.rank_pattern or config.alpha_pattern) and len(module) > MAX_MATCHED_NAME:
        raise UnsupportedError(
            f'{catalog.location}: module "{module:.80}..." has a name of {len(module):,} characters, and names up to '
            f"{MAX_MATCHED_NAME} are matched with rank_pattern and alpha_pattern; merge it with PEFT"
        )
    rank = config.layer_rank(module)
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[0] != b.shape[1] or any(size != 1 for size in b.shape[2:]):
        raise InputError(
            f'{catalog.location}: module "{module}": A has shape {list(a.shape)} and B {list(b.shape)}, but '
            "[rank, in] and [out, rank] are required; a rank saved its own part of them, or the file is damaged; save "
            "the adapter again"
        )
    if a.shape[0] != rank:
        raise InputError(
            f'{catalog.location}: module "{module}": A and B have rank {a.shape[0]}, but the config gives it rank '
            f"{rank} (r, rank_pattern); pass the config that the adapter was trained with"
        )
    magnitude, bias = found.get("magnitude_vector"), found.get("B.bias")
    if config.use_dora != (magnitude is not None):
        stated = "use_dora is true" if config.use_dora else "use_dora is false"
        raise InputError(
            f'{catalog.location}: module "{module}" has {"no " if magnitude is None else "a "}lora_magnitude_vector, '
            f"but {stated} in the config; pass the config that the adapter was trained with"
        )
    for entry in (magnitude, bias):
        if entry is not None and entry.numel != b.shape[0]:
            raise InputError(
                f'{catalog.location}: tensor "{entry.name}" has {counted(entry.numel, "element")}, but '
                f"{b.shape[0]:,} are required; the file is damaged, save the adapter again"
            )
    return LoraLayer(module, a, b, is_embedding, magnitude, bias, rank, config.scaling(module))


def describe_adapter(adapter: Adapter) -> dict[str, Any]:
    """Return the settings and contents of an adapter for a report: see `adapters` of `ConversionReport`."""
    config = adapter.config
    return {
        "ranks": adapter.ranks,
        "alphas": sorted(set(map(config.layer_alpha, adapter.adapted_names))),
        "scalings": sorted(set(map(config.scaling, adapter.adapted_names))),
        "rslora": config.use_rslora,
        "dora": config.use_dora,
        "modules": adapter.modules,
        "layers": len(adapter.layers) + sum(map(len, adapter.parameters.values())),
        "replaced": sorted(adapter.replaced),
        "has_config": True,
        "base": config.base_model,
        "bytes": adapter.catalog.nbytes,
    }
