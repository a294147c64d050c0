"""Read plan, layers and heads from a meta model. Imports transformers; see `meta_model`.

Layers come from the pipeline plan or from `get_encoder`/`get_decoder`, heads from the shapes of attention modules. Only
modules that run after the last layer are recognized by name (`_MODULES_AFTER_LAYERS`), because the order of
registration does not show which they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ckptx.architecture.corrections import config_keys_of_corrections, corrections_of
from ckptx.architecture.expressions import Scope, keys_of, try_evaluate
from ckptx.architecture.introspection.meta_model_configs import class_default, class_defaults, nearest_config, read_key
from ckptx.architecture.structure import (
    Heads,
    LoadConversion,
    StackRule,
    Structure,
    in_sub_config,
    join_path,
    matches_parameter,
    split_op,
)
from ckptx.architecture.tie_flags import ConfigTree, config_tree, find_config_path
from ckptx.mapping.names import pattern_of

# Modules that run after the last layer: children of the module with the layers, and of the modules around it.
_MODULES_AFTER_LAYERS = frozenset(
    {
        "LayerNorm", "emb_layer_norm_after", "embedding_norm", "final_input", "final_layer_norm", "final_layernorm",
        "final_norm", "hc_head", "last_layernorm", "layer_norm", "layernorm", "layernorm_final", "ln", "ln_f",
        "ln_out", "norm", "norm_f", "out_norm", "output_layernorm", "rms_norm",
        "altup_unembed_projections", "project_out",
        "answer_class", "audio_lm_head", "classification_head", "classifier", "cls", "codebooks_head", "codec_head",
        "contact_head", "dense", "discriminator_predictions", "embed_out", "embedding_proj_layer", "end_logits",
        "entity_predictions", "final_logits_bias", "generator_lm_head", "generator_predictions", "head", "lm_head",
        "lm_heads", "lm_loss", "logits_proj", "mlm_score", "multiple_choice_head", "output", "output_projection",
        "pooler", "pre_LN", "pre_classifier", "pred_layer", "predictions", "proj_out", "projection_head",
        "qa_classifier", "qa_outputs", "score", "sequence_summary", "sop_classifier", "start_logits",
        "text_decoder_postnet", "text_projection", "vocab_layer_norm", "vocab_projector", "vocab_transform",
    }
)  # fmt: skip
# Subset of `_MODULES_AFTER_LAYERS` that runs after the layers even if it is registered before them.
_ALWAYS_AFTER_LAYERS = _MODULES_AFTER_LAYERS - {"LayerNorm", "embedding_norm", "layer_norm", "layernorm", "rms_norm"}
_COUNT_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_COUNT_KEYS_BY_ROLE = {
    "encoder": ("encoder_layers", "num_encoder_layers", *_COUNT_KEYS),
    "decoder": ("decoder_layers", "num_decoder_layers", *_COUNT_KEYS),
}

# Expressions, see `ckptx.architecture.expressions`.
_NUM_HEADS = "num_attention_heads"
_NUM_KV_HEADS = "num_key_value_heads ?? num_attention_heads"
_HEAD_DIM = "head_dim ?? hidden_size // num_attention_heads"
_DERIVED_HEAD_DIM = "hidden_size // num_attention_heads"
# Factors of the sharded dim of an attention projection, in the order in which they are tried with a real config.
_HEAD_CANDIDATES: Heads = (
    (_NUM_HEADS, _HEAD_DIM), (_NUM_KV_HEADS, _HEAD_DIM),
    (_NUM_HEADS, _DERIVED_HEAD_DIM), (_NUM_KV_HEADS, _DERIVED_HEAD_DIM),
    (_NUM_HEADS, "global_head_dim"), (f"num_global_key_value_heads ?? {_NUM_KV_HEADS}", "global_head_dim"),
    (_NUM_HEADS, f"2 * ({_HEAD_DIM})"), (_NUM_HEADS, f"3 * ({_HEAD_DIM})"),
    (_NUM_HEADS, "qk_nope_head_dim + qk_rope_head_dim"), (_NUM_HEADS, "qk_nope_head_dim + v_head_dim"),
    (_NUM_HEADS, "v_head_dim"), (_NUM_KV_HEADS, "v_head_dim"),
    ("linear_num_key_heads", "linear_key_head_dim"), ("linear_num_value_heads", "linear_value_head_dim"),
)  # fmt: skip
_CANDIDATE_KEYS = frozenset(key for pair in _HEAD_CANDIDATES for each in pair for key in keys_of(each))
_SHARDED_DIMS = {"colwise": -2, "rowwise": -1}  # sharded dim, in whole heads; styles that gather or split need no heads


def read_structure(
    model: PreTrainedModel, conversions: tuple[frozenset[LoadConversion], frozenset[LoadConversion]]
) -> Structure:
    """Return the structure of a model, with defaults for the keys that corrections read, too.

    Args:
        model: Model on the meta device.
        conversions: Conversions of the names of `save_pretrained`, and the additional ones of other names that can be
            loaded; see `meta_model_names.load_conversions`.
    """
    names = {pattern_of(name) for name in model.state_dict(keep_vars=True)}
    plan = {key: style for key, style in (model.tp_plan or {}).items() if matches_parameter(key, names)}
    configs = list(config_tree(model.config))
    text, text_config = _text_config(model, configs)
    stacks = _read_stacks(model, configs)
    attention_heads = _head_candidates(model, plan, configs)
    embedding = _call_or_none(model, "get_input_embeddings")
    structure = Structure(
        text_config_path=".".join(text),
        text_type=str(getattr(text_config, "model_type", "")),
        output_head=_module_path(model, _call_or_none(model, "get_output_embeddings")) or "",
        embedding=(_module_path(model, embedding) or "") if isinstance(embedding, nn.Embedding) else "",
        plan=plan,
        stacks=stacks,
        attention_heads=attention_heads,
        transposed=_transposed_modules(model),
        conversions=frozenset(_with_sizes(model, change, configs) for change in conversions[0]),
        other_conversions=frozenset(_with_sizes(model, change, configs) for change in conversions[1]),
    )
    keys = {key for each in structure.expressions() for key in keys_of(each)}
    keys |= {
        join_path(structure.text_config_path, key)
        for key in config_keys_of_corrections(structure.text_type, str(model.config.model_type))
    }
    defaults, aliases = class_defaults(keys, model.config, structure.expressions())
    return dataclasses.replace(structure, defaults=defaults, aliases=aliases)


# ----------------------------------------------------------------------------------------- layers


def _read_stacks(model: PreTrainedModel, configs: ConfigTree) -> tuple[StackRule, ...]:
    """Return the lists of layers in the order they run: one, or those of encoder and decoder.

    Empty if the corrections exclude the class (`no_stacks`), if it has neither token embedding nor output head, or if a
    list, or the config key with its length, is not found.
    """
    if corrections_of(str(model.config.model_type)).no_stacks or not _has_token_embedding_or_head(model):
        return ()
    encoder, decoder = _call_or_none(model, "get_encoder"), _call_or_none(model, "get_decoder")
    is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False)) and encoder not in (
        None,
        decoder,
        model,
    )
    lists = _layer_lists(model)
    if is_encoder_decoder:
        encoder_path = _module_path(model, encoder)
        encoder_lists = [path for path in lists if encoder_path is not None and path.startswith(encoder_path + ".")]
        decoder_path = _module_path(model, decoder)
        decoder_lists = [path for path in lists if path not in encoder_lists and _is_inside(path, decoder_path)]
        paths = [_main_layer_list(model, encoder_lists), _main_layer_list(model, decoder_lists)]
    else:
        planned = [path for path in model.pp_plan or {} if path.endswith("layers") and path in lists]
        decoder_path = _module_path(model, decoder)
        # `get_decoder` of a class whose output head is named `decoder` returns that head, which has no lists: take all.
        decoder_lists = [path for path in lists if _is_inside(path, decoder_path)] or lists
        paths = planned if len(planned) == 1 else [_main_layer_list(model, decoder_lists)]
    stacks = []
    for index, path in enumerate(paths):
        role = "encoder" if is_encoder_decoder and index == 0 else "decoder"
        count = _count_expression(model, path, role, configs) if path else None
        if path is None or count is None:
            return ()
        others = [other for other in paths if other and other != path]
        stacks.append(_stack_rule(model, path, count, others[0] if others else "", role))
    return tuple(stacks)


def _has_token_embedding_or_head(model: PreTrainedModel) -> bool:
    embedding = _call_or_none(model, "get_input_embeddings")
    return isinstance(embedding, nn.Embedding) or _call_or_none(model, "get_output_embeddings") is not None


def _layer_lists(model: PreTrainedModel) -> list[str]:
    """Return the paths of the outermost lists of modules that have parameters."""
    ends = [_module_path(model, _call_or_none(model, f"get_{end}_embeddings")) for end in ("input", "output")]
    found = []
    for path, module in model.named_modules():
        is_outermost = not any(part.isdecimal() for part in path.split("."))
        is_list = isinstance(module, nn.ModuleList) and next(module.parameters(), None) is not None
        if is_list and is_outermost and path not in ends:
            found.append(path)
    return found


def _main_layer_list(model: PreTrainedModel, paths: Sequence[str]) -> str | None:
    """Return the list that holds the layers of an encoder or decoder; None if there is no list.

    It is the one nearest to the input embedding, then to the root, then the largest.
    """
    embedding = _module_path(model, _call_or_none(model, "get_input_embeddings")) or ""

    def rank(path: str) -> tuple[int, int, int]:
        common = 0
        for ours, theirs in zip(path.split("."), embedding.split("."), strict=False):
            if ours != theirs:
                break
            common += 1
        return -common, path.count("."), -sum(value.numel() for value in model.get_submodule(path).parameters())

    return min(paths, key=rank) if paths else None


def _count_expression(model: PreTrainedModel, path: str, role: str, configs: ConfigTree) -> str | None:
    """Return an expression for the length of the list at `path`: the config key that has this value, with fallbacks.

    None if no config is found for the list, or none of the usual keys has this value.
    """
    config = nearest_config(model, path)
    if config is None:
        return None
    config_path = ".".join(find_config_path(config, configs))
    length = len(model.get_submodule(path))
    keys = [key for key in _COUNT_KEYS_BY_ROLE[role] if read_key(config, key) == length]
    if not keys:
        return None
    has_default = class_default(config, getattr(config, "attribute_map", {}).get(keys[0], keys[0])) is not None
    lists: list[str] = []
    fallbacks: list[str] = []
    if not has_default and keys[0] in _COUNT_KEYS:
        # the count is a property of the config class: the length of a list with one entry per layer
        lists = [f"#{key}" for key, value in vars(config).items() if isinstance(value, list) and len(value) == length][
            :1
        ]
    elif not has_default:
        fallbacks = keys[1:2]  # T5: as many decoder as encoder layers by default
    return in_sub_config(" ?? ".join([*lists, keys[0], *fallbacks]), config_path)


def _stack_rule(model: PreTrainedModel, path: str, count: str, other_path: str, role: str) -> StackRule:
    """Return the rule for the list of layers at `path`.

    Modules next to the list, and next to the modules around it, run before or after the layers. Of the modules next to
    both encoder and decoder, none belongs to the encoder, and only those that run after the layers, such as the output
    head, belong to the decoder.

    Args:
        model: Model on the meta device.
        path: Path of the list.
        count: Expression for the number of layers.
        other_path: Path of the other list of an encoder-decoder; empty if there is one list.
        role: "encoder", or "decoder" also for a single list.
    """
    parts = path.split(".")
    head = _module_path(model, _call_or_none(model, "get_output_embeddings")) or ""
    before: list[str] = []
    after: list[str] = []
    for depth in range(len(parts) - 1, -1, -1):
        container = ".".join(parts[:depth])
        is_shared = bool(other_path) and _is_inside(other_path, container)
        if is_shared and role == "encoder":
            break
        is_after_layers = False
        for name in _children(model, container):
            if name == parts[depth]:
                is_after_layers = True
                continue
            child = join_path(container, name)
            if name in (_MODULES_AFTER_LAYERS if is_after_layers else _ALWAYS_AFTER_LAYERS) or (
                head and _is_inside(head, child)
            ):
                after.append(child)
            elif role == "decoder" and other_path and not is_shared:
                before.append(child)
    return StackRule(path, count, tuple(before), tuple(after))


def _children(model: PreTrainedModel, path: str) -> list[str]:
    """Return the names of the direct children with persistent tensors, then of tensors of the module itself."""
    lead = f"{path}." if path else ""
    own = [name.removeprefix(lead) for name in model.state_dict(keep_vars=True) if name.startswith(lead)]
    with_tensors = {name.split(".")[0] for name in own}
    registered = [name for name, _ in model.get_submodule(path).named_children() if name in with_tensors]
    return registered + sorted(with_tensors - set(registered))


def _transposed_modules(model: PreTrainedModel) -> frozenset[str]:
    from transformers.pytorch_utils import Conv1D

    return frozenset(pattern_of(path) for path, module in model.named_modules() if isinstance(module, Conv1D))


# ------------------------------------------------------------------------------------------ heads


def _head_candidates(model: PreTrainedModel, plan: Mapping[str, str], configs: ConfigTree) -> dict[str, Heads]:
    """Return, for each pattern of the plan in an attention module, candidate factors of its sharded dim."""
    facts: dict[str, tuple[set[int], str, Any]] = {}  # sizes of the sharded dim, config path, config
    for path, module in model.named_modules():
        class_name = type(module).__name__
        config = getattr(module, "config", None)
        if not ("Attention" in class_name or "Attn" in class_name or class_name.endswith("DeltaNet")):
            continue
        config = config if isinstance(config, PreTrainedConfig) else nearest_config(model, path)
        if config is None:
            continue
        for name, value in module.named_parameters():
            pattern = pattern_of(join_path(path, name))
            key = pattern if pattern in plan else pattern.rpartition(".")[0]
            dim = _SHARDED_DIMS.get(plan.get(key, ""))
            if dim is not None and value.ndim >= -dim and name.rpartition(".")[2] == "weight":
                config_path = ".".join(find_config_path(config, configs))
                facts.setdefault(key, (set(), config_path, config))[0].add(value.shape[dim])
    return {key: found for key, each in facts.items() if (found := _matching_candidates(*each))}


def _matching_candidates(sizes: set[int], config_path: str, config: Any) -> Heads:
    """Return the `_HEAD_CANDIDATES` whose product under a config object is one of `sizes`, with keys from the root.

    Args:
        sizes: Sizes of the sharded dim in all layers, in elements.
        config_path: Dotted path of the config from the root config.
        config: The config.
    """
    values = {key: read_key(config, key) for key in _CANDIDATE_KEYS}
    scope = Scope({key: value for key, value in values.items() if isinstance(value, int)})
    matching: list[tuple[str, str]] = []
    for count, size in _HEAD_CANDIDATES:
        numbers = try_evaluate(count, scope), try_evaluate(size, scope)
        if None in numbers or numbers[0] * numbers[1] not in sizes:  # type: ignore[operator]  # None is ruled out
            continue
        if (count, _HEAD_DIM) in matching and size == _DERIVED_HEAD_DIM:
            continue  # equal as long as head_dim is not set, and wrong once it is
        matching.append((count, size))
    return tuple((in_sub_config(count, config_path), in_sub_config(size, config_path)) for count, size in matching)


def _with_sizes(model: PreTrainedModel, conversion: LoadConversion, configs: ConfigTree) -> LoadConversion:
    """Return the conversion with the sizes that its last operation needs, or unchanged if they are not found.

    A split needs the sizes of the parts, as heads of attention. A transpose that is skipped if the tensor already has
    the shape of the model needs its size along the second dim.
    """
    (kind, *numbers), _ = split_op(conversion.ops[-1]) if conversion.ops else ([""], [])
    keys: tuple[str, ...] = ()
    if kind == "split":
        dim = int(numbers[0])
    elif kind == "transpose":
        _, second_dim, is_stored_either_way = map(int, numbers)
        if not is_stored_either_way:
            return conversion
        # The dims of the weight of an expert, of which one of the two is the second dim.
        dim, keys = second_dim, ("hidden_size", "moe_intermediate_size")
    else:
        return conversion
    sizes = [_size_expression(model, target, dim, keys, configs) for target in conversion.targets]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return conversion
    return conversion._replace(ops=(*conversion.ops[:-1], f"{conversion.ops[-1]} : {' ; '.join(known)}"))


def _size_expression(
    model: PreTrainedModel, target: str, dim: int, keys: Sequence[str], configs: ConfigTree
) -> str | None:
    """Return an expression for the size of a tensor along `dim`, None if none is found.

    Args:
        model: Model on the meta device.
        target: Pattern of the tensor in the model.
        dim: The dim.
        keys: Config keys that may have the size. If none does, it may be a number of heads times their size.
        configs: Config of the model and its nested configs.
    """
    path = next(name for name in model.state_dict(keep_vars=True) if pattern_of(name) == target)
    config = nearest_config(model, path)
    if config is None:
        return None
    size, config_path = model.get_parameter(path).shape[dim], ".".join(find_config_path(config, configs))
    for key in keys:
        if read_key(config, key) == size:
            return in_sub_config(key, config_path)
    fitting = _matching_candidates({size}, config_path, config)
    return "({}) * ({})".format(*fitting[0]) if fitting else None


# ---------------------------------------------------------------------------------------- modules


def _text_config(model: PreTrainedModel, configs: ConfigTree) -> tuple[tuple[str, ...], Any]:
    """Return the attribute path and the config of the language model: that of the decoder or a module around it."""
    path = _module_path(model, _call_or_none(model, "get_decoder"))
    # `nearest_config` looks at modules around a path, and so at the decoder itself if any child is appended.
    config = nearest_config(model, join_path(path, "x")) if path is not None else model.config
    return (find_config_path(config, configs), config) if config is not None else ((), model.config)


def _call_or_none(model: Any, method: str) -> Any:
    try:
        return getattr(model, method)()
    except Exception:  # models without such a part raise different exceptions
        return None


def _module_path(model: nn.Module, module: Any) -> str | None:
    if module is None:
        return None
    return next((path for path, each in model.named_modules(remove_duplicate=False) if each is module), None)


def _is_inside(path: str, outer: str | None) -> bool:
    return outer is not None and (outer == "" or path == outer or path.startswith(outer + "."))
