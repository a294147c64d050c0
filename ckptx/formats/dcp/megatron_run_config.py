"""Read the arguments of a training run of Megatron Bridge, which are in a file next to the DCP.

    run_config.yaml   {"model": {"_target_": "...Provider", "num_attention_heads": 32, "num_query_groups": 8, ...}, ...}

Bridge writes it with `yaml.safe_dump`: the fields of its model provider are keys of `model`. A model from a builder
(`_builder_`) has those of megatron-core's TransformerConfig in `model.transformer` instead. Only fields that are
compared with `config.json` are converted; nothing is imported or called for `_target_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptx.catalog.catalog import Catalog
from ckptx.errors import InputError, missing_package
from ckptx.storage.interface import SourceFiles
from ckptx.untrusted.printable import one_line

RUN_CONFIG_FILE = "run_config.yaml"
_MAX_NBYTES = 512 << 10  # files take 20 to 60 KB; Python code parses 512 KiB in up to 8 s

_COUNT, _NUMBER, _FLAG = "a positive integer", "a number", "true or false"
# Field -> its type. Each can be null: then Bridge chooses the value. Null query groups are as many as heads.
_FIELDS = {
    "num_layers": _COUNT,
    "hidden_size": _COUNT,
    "num_attention_heads": _COUNT,
    "num_query_groups": _COUNT,
    "kv_channels": _COUNT,
    "vocab_size": _COUNT,
    "moe_router_topk": _COUNT,
    "rotary_base": _NUMBER,
    "rotary_percent": _NUMBER,
    "layernorm_epsilon": _NUMBER,
    "multi_latent_attention": _FLAG,
    "layernorm_zero_centered_gamma": _FLAG,
    "rotary_interleaved": _FLAG,
    "share_embeddings_and_output_weights": _FLAG,
}
# Keys of the file that are parsed, see `parse_yaml`.
_KEYS = {"model": {**dict.fromkeys(_FIELDS), "transformer": dict.fromkeys(_FIELDS)}}


class RunConfig(NamedTuple):
    """Arguments of a training run of Megatron Bridge.

    Attributes:
        where: The file that records them.
        values: Value by name of the field in the model provider, for recorded fields with a valid type.
        notes: Notes for the user, on fields with an invalid type.
    """

    where: str
    values: Mapping[str, Any]
    notes: tuple[str, ...]


def read_run_config(catalog: Catalog, files: SourceFiles) -> RunConfig | None:
    """Return the arguments in the `run_config.yaml` of a checkpoint; None if it has none.

    Args:
        catalog: Catalog of the checkpoint.
        files: Its open files.

    Raises:
        InputError: The file is not YAML in UTF-8, uses features of YAML that Bridge does not write, has no mapping
            `model`, or is larger than 512 KiB.
        EnvironmentProblem: ruamel.yaml is not installed.
        ReadError: The storage failed.
    """
    if not catalog.source.listing().is_file(RUN_CONFIG_FILE):
        return None
    where = f"{files.root / RUN_CONFIG_FILE}"
    model = _parse(files, where).get("model")
    if not isinstance(model, dict):
        raise InputError(f"{where}: has no mapping under model, where Megatron Bridge has its arguments; restore it")
    transformer = model.get("transformer")
    fields = {**(transformer if isinstance(transformer, dict) else {}), **model}
    values: dict[str, Any] = {}
    notes = []
    for name, kind in _FIELDS.items():
        value = fields.get(name)
        if _has_type(value, kind):
            values[name] = value
        elif value is not None:
            notes.append(
                f"{where}: {name} is {one_line(repr(value), 80)}, which must be {kind}; it is not compared with "
                "config.json"
            )
    if "num_query_groups" in fields and fields["num_query_groups"] is None and "num_attention_heads" in values:
        values["num_query_groups"] = values["num_attention_heads"]
    return RunConfig(where, values, tuple(notes))


def _parse(files: SourceFiles, where: str) -> dict[str, Any]:
    """Return the value of the file, with the fields of `_KEYS` alone.

    Raises:
        InputError, EnvironmentProblem, ReadError: See `read_run_config`.
    """
    nbytes = files.size(RUN_CONFIG_FILE)
    if nbytes > _MAX_NBYTES:
        raise InputError(
            f"{where}: has {nbytes:,} bytes, more than {_MAX_NBYTES:,}; restore the file of Megatron Bridge"
        )
    content = files.read(RUN_CONFIG_FILE, 0, nbytes)
    try:
        from ckptx.untrusted.yaml_text import parse_yaml
    except ImportError as error:
        raise missing_package(where, error) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: byte {error.start} is not valid UTF-8; restore the file") from error
    config = parse_yaml(text, where, _KEYS)
    return config if isinstance(config, dict) else {}


def _has_type(value: object, kind: str) -> bool:
    """Return True if a value has one of the types in `_FIELDS`."""
    if kind == _FLAG:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) if kind == _NUMBER else isinstance(value, int) and value > 0
