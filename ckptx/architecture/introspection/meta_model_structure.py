"""Read plan, layers and heads from a meta model. Imports transformers; see `meta_model`.

Nothing is inferred from names that the model itself can tell: layers come from the pipeline plan or from
`get_encoder`/`get_decoder`, heads from the shapes of attention modules. Only modules that run after the last layer are
recognized by name (`_LAST`), because the order of registration does not tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ckptx.architecture.corrections import corrections_of, plan_keys
from ckptx.architecture.expressions import Scope, attempt, keys_of
from ckptx.architecture.flags import config_tree, path_of
from ckptx.architecture.introspection.meta_model_configs import class_default, class_defaults, config_around, read
from ckptx.architecture.structure import Heads, LoadConversion, StackRule, Structure, below, is_live, under
from ckptx.mapping.names import pattern_of

# Modules that run after the last layer: children of the module with the layers, and of the modules around it.
_LAST = frozenset(
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
# Subset of `_LAST` that runs after the layers even if it is registered before them.
_LAST_ANYWHERE = _LAST - {"LayerNorm", "embedding_norm", "layer_norm", "layernorm", "rms_norm"}
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_COUNTS_BY_ROLE = {
    "encoder": ("encoder_layers", "num_encoder_layers", *_COUNTS),
    "decoder": ("decoder_layers", "num_decoder_layers", *_COUNTS),
}

_HEADS = "num_attention_heads"
_KV = "num_key_value_heads ?? num_attention_heads"
_SIZE = "head_dim ?? hidden_size // num_attention_heads"
_PLAIN_SIZE = "hidden_size // num_attention_heads"
# Factors of the sharded dim of an attention projection, in the order in which they are tried with a real config.
_CANDIDATES: Heads = (
    (_HEADS, _SIZE), (_KV, _SIZE), (_HEADS, _PLAIN_SIZE), (_KV, _PLAIN_SIZE),
    (_HEADS, "global_head_dim"), (f"num_global_key_value_heads ?? {_KV}", "global_head_dim"),
    (_HEADS, f"2 * ({_SIZE})"), (_HEADS, f"3 * ({_SIZE})"),
    (_HEADS, "qk_nope_head_dim + qk_rope_head_dim"), (_HEADS, "qk_nope_head_dim + v_head_dim"),
    (_HEADS, "v_head_dim"), (_KV, "v_head_dim"),
    ("linear_num_key_heads", "linear_key_head_dim"), ("linear_num_value_heads", "linear_value_head_dim"),
)  # fmt: skip
_CANDIDATE_KEYS = frozenset(key for pair in _CANDIDATES for each in pair for key in keys_of(each))
_SHARDED_DIMS = {"colwise": -2, "rowwise": -1}  # sharded dim, in whole heads; styles that gather or split need no heads


def structure_of(
    model: PreTrainedModel, changes: tuple[frozenset[LoadConversion], frozenset[LoadConversion]]
) -> Structure:
    """Return the structure of a model, with defaults for the keys that correction rows read, too.

    Args:
        model: Model on the meta device.
        changes: Conversions of its names, see `meta_model_names`.
    """
    names = {pattern_of(name) for name in model.state_dict(keep_vars=True)}
    plan = {key: style for key, style in (model.tp_plan or {}).items() if is_live(key, names)}
    tree = list(config_tree(model.config))
    text, text_config = _text_config(model, tree)
    stacks = _stacks(model, tree)
    heads = _heads(model, plan, tree)
    embedding = _call(model, "get_input_embeddings")
    bare = Structure(
        text=".".join(text),
        text_type=str(getattr(text_config, "model_type", "")),
        head=_path_of(model, _call(model, "get_output_embeddings")) or "",
        embedding=(_path_of(model, embedding) or "") if isinstance(embedding, nn.Embedding) else "",
        plan=plan,
        stacks=stacks,
        heads=heads,
        transposed=_transposed(model),
        changes=frozenset(_sized(model, change, tree) for change in changes[0]),
        variants=frozenset(_sized(model, change, tree) for change in changes[1]),
    )
    keys = {key for each in bare.expressions() for key in keys_of(each)}
    keys |= {below(bare.text, key) for key in plan_keys(bare.text_type, str(model.config.model_type))}
    defaults, aliases = class_defaults(keys, model.config, bare.expressions())
    return dataclasses.replace(bare, defaults=defaults, aliases=aliases)


# ----------------------------------------------------------------------------------------- layers


def _stacks(model: PreTrainedModel, tree: Sequence[Any]) -> tuple[StackRule, ...]:
    if corrections_of(str(model.config.model_type)).no_stacks or not _reads_text(model):
        return ()
    encoder, decoder = _call(model, "get_encoder"), _call(model, "get_decoder")
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False)) and encoder not in (None, decoder, model)
    lists = _layer_lists(model)
    if is_pair:
        first = _path_of(model, encoder)
        inner = [path for path in lists if first is not None and path.startswith(first + ".")]
        outer = _path_of(model, decoder)
        rest = [path for path in lists if path not in inner and _is_below(path, outer)]
        paths = [_main(model, inner), _main(model, rest)]
    else:
        planned = [path for path in model.pp_plan or {} if path.endswith("layers") and path in lists]
        outer = _path_of(model, decoder)
        # a class whose head is named `decoder` returns the head
        inner = [path for path in lists if _is_below(path, outer)] or lists
        paths = planned if len(planned) == 1 else [_main(model, inner)]
    found = []
    for at, path in enumerate(paths):
        role = "encoder" if is_pair and at == 0 else "decoder"
        count = _count(model, path, role, tree) if path else None
        if path is None or count is None:
            return ()
        others = [other for other in paths if other and other != path]
        found.append(_stack(model, path, count, others[0] if others else "", role))
    return tuple(found)


def _reads_text(model: PreTrainedModel) -> bool:
    embedding = _call(model, "get_input_embeddings")
    return isinstance(embedding, nn.Embedding) or _call(model, "get_output_embeddings") is not None


def _layer_lists(model: PreTrainedModel) -> list[str]:
    """Return the paths of lists of modules with parameters that are not inside another list."""
    ends = [_path_of(model, _call(model, f"get_{end}_embeddings")) for end in ("input", "output")]
    found = []
    for path, module in model.named_modules():
        is_outermost = not any(part.isdecimal() for part in path.split("."))
        is_list = isinstance(module, nn.ModuleList) and next(module.parameters(), None) is not None
        if is_list and is_outermost and path not in ends:
            found.append(path)
    return found


def _main(model: PreTrainedModel, paths: Sequence[str]) -> str | None:
    """Return the list of decoder layers: nearest to the input embedding, then to the root, then the largest."""
    embedding = _path_of(model, _call(model, "get_input_embeddings")) or ""

    def rank(path: str) -> tuple[int, int, int]:
        common = 0
        for ours, theirs in zip(path.split("."), embedding.split("."), strict=False):
            if ours != theirs:
                break
            common += 1
        return -common, path.count("."), -sum(value.numel() for value in model.get_submodule(path).parameters())

    return min(paths, key=rank) if paths else None


def _count(model: PreTrainedModel, path: str, role: str, tree: Sequence[Any]) -> str | None:
    """Return the config key whose value is the length of the list, as an expression."""
    config = config_around(model, path)
    if config is None:
        return None
    place = ".".join(path_of(config, tree))
    length = len(model.get_submodule(path))
    keys = [key for key in _COUNTS_BY_ROLE[role] if read(config, key) == length]
    if not keys:
        return None
    has_default = class_default(config, getattr(config, "attribute_map", {}).get(keys[0], keys[0])) is not None
    lists: list[str] = []
    fallbacks: list[str] = []
    if not has_default and keys[0] in _COUNTS:
        # the count is a property of the config class: the length of a list with one entry per layer
        lists = [f"#{key}" for key, value in vars(config).items() if isinstance(value, list) and len(value) == length][
            :1
        ]
    elif not has_default:
        fallbacks = keys[1:2]  # T5: as many decoder as encoder layers by default
    return under(" ?? ".join([*lists, keys[0], *fallbacks]), place)


def _stack(model: PreTrainedModel, path: str, count: str, other: str, role: str) -> StackRule:
    """Return the stack at `path`; modules shared with the `other` stack belong to neither, except heads."""
    parts = path.split(".")
    head = _path_of(model, _call(model, "get_output_embeddings")) or ""
    before: list[str] = []
    after: list[str] = []
    for depth in range(len(parts) - 1, -1, -1):
        around = ".".join(parts[:depth])
        is_shared = bool(other) and _is_below(other, around)
        if is_shared and role == "encoder":
            break
        seen = False
        for name in _children(model, around):
            if name == parts[depth]:
                seen = True
                continue
            child = below(around, name)
            if name in (_LAST if seen else _LAST_ANYWHERE) or (head and _is_below(head, child)):
                after.append(child)
            elif role == "decoder" and other and not is_shared:
                before.append(child)
    return StackRule(path, count, tuple(before), tuple(after))


def _children(model: PreTrainedModel, path: str) -> list[str]:
    """Return the direct children with persistent tensors, and tensors of the module itself."""
    lead = f"{path}." if path else ""
    own = [name.removeprefix(lead) for name in model.state_dict(keep_vars=True) if name.startswith(lead)]
    with_tensors = {name.split(".")[0] for name in own}
    registered = [name for name, _ in model.get_submodule(path).named_children() if name in with_tensors]
    return registered + sorted(with_tensors - set(registered))


def _transposed(model: PreTrainedModel) -> frozenset[str]:
    from transformers.pytorch_utils import Conv1D

    return frozenset(pattern_of(path) for path, module in model.named_modules() if isinstance(module, Conv1D))


# ------------------------------------------------------------------------------------------ heads


def _heads(model: PreTrainedModel, plan: Mapping[str, str], tree: Sequence[Any]) -> dict[str, Heads]:
    """Return, for each pattern of the plan in an attention module, candidate factors of its sharded dim."""
    dims: dict[str, tuple[set[int], str, Any]] = {}
    for path, module in model.named_modules():
        kind = type(module).__name__
        config = getattr(module, "config", None)
        if not ("Attention" in kind or "Attn" in kind or kind.endswith("DeltaNet")):
            continue
        config = config if isinstance(config, PreTrainedConfig) else config_around(model, path)
        if config is None:
            continue
        for name, value in module.named_parameters():
            pattern = pattern_of(below(path, name))
            key = pattern if pattern in plan else pattern.rpartition(".")[0]
            dim = _SHARDED_DIMS.get(plan.get(key, ""))
            if dim is not None and value.ndim >= -dim and name.rpartition(".")[2] == "weight":
                place = ".".join(path_of(config, tree))
                dims.setdefault(key, (set(), place, config))[0].add(value.shape[dim])
    return {key: found for key, facts in dims.items() if (found := _fitting(*facts))}


def _fitting(dims: set[int], place: str, config: Any) -> Heads:
    values = {key: read(config, key) for key in _CANDIDATE_KEYS}
    scope = Scope({key: value for key, value in values.items() if isinstance(value, int)})
    found: list[tuple[str, str]] = []
    for count, size in _CANDIDATES:
        numbers = attempt(count, scope), attempt(size, scope)
        if None in numbers or numbers[0] * numbers[1] not in dims:  # type: ignore[operator]  # None is ruled out
            continue
        if (count, _SIZE) in found and size == _PLAIN_SIZE:
            continue  # equal as long as head_dim is not set, and wrong once it is
        found.append((count, size))
    return tuple((under(count, place), under(size, place)) for count, size in found)


def _sized(model: PreTrainedModel, change: LoadConversion, tree: Sequence[Any]) -> LoadConversion:
    """Add the sizes that the last operation of a change needs, as far as the model tells them.

    A split needs the sizes of the parts, as heads of attention. A transpose that is skipped if the tensor already has
    the shape of the model needs its size along the second dim.
    """
    kind, *numbers = change.ops[-1].split(" ") if change.ops else ("",)
    if kind == "split":
        dim, keys = int(numbers[0]), tuple[str, ...]()
    elif kind == "transpose" and numbers[2] == "1":
        dim, keys = int(numbers[1]), ("hidden_size", "moe_intermediate_size")
    else:
        return change
    sizes = [_size_as_expression(model, target, dim, keys, tree) for target in change.targets]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return change
    return change._replace(ops=(*change.ops[:-1], f"{change.ops[-1]} : {' ; '.join(known)}"))


def _size_as_expression(
    model: PreTrainedModel, target: str, dim: int, keys: Sequence[str], tree: Sequence[Any]
) -> str | None:
    """Return the size of a tensor along `dim` as one of `keys`, or as a number of heads times their size."""
    path = next(name for name in model.state_dict(keep_vars=True) if pattern_of(name) == target)
    config = config_around(model, path)
    if config is None:
        return None
    size, place = model.get_parameter(path).shape[dim], ".".join(path_of(config, tree))
    for key in keys:
        if read(config, key) == size:
            return under(key, place)
    fitting = _fitting({size}, place, config)
    return "({}) * ({})".format(*fitting[0]) if fitting else None


# ---------------------------------------------------------------------------------------- modules


def _text_config(model: PreTrainedModel, tree: Sequence[Any]) -> tuple[tuple[str, ...], Any]:
    """Return the path and config of the language model: the nearest config around the decoder."""
    path = _path_of(model, _call(model, "get_decoder"))
    config = config_around(model, below(path, "x")) if path is not None else model.config
    return (path_of(config, tree), config) if config is not None else ((), model.config)


def _call(model: Any, method: str) -> Any:
    try:
        return getattr(model, method)()
    except Exception:  # models without such a part raise different exceptions
        return None


def _path_of(model: nn.Module, module: Any) -> str | None:
    if module is None:
        return None
    return next((path for path, each in model.named_modules(remove_duplicate=False) if each is module), None)


def _is_below(path: str, outer: str | None) -> bool:
    return outer is not None and (outer == "" or path == outer or path.startswith(outer + "."))
