"""Classes as the file of a model type has them: an ``Architecture`` as JSON, and back.

    classes       LlamaForCausalLM -> what is known of it, for every class of the model type
    bodies        LlamaModel -> names below a base model's prefix, shared by the classes around it
    structures    LlamaForCausalLM -> plan, layers and conversions below that prefix, see `structure_rows`

A class with ``introspect`` holds no names: the reason there says why only the real config can give them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptx.architecture.patterns import pack, unpack
from ckptx.architecture.shared_layers import SharedLayers, decode_shared, encode_shared
from ckptx.architecture.spec import Architecture, TieFlag, TiePair
from ckptx.architecture.structure import Structure
from ckptx.architecture.structure_rows import decode_structure, encode_structure


@dataclass(frozen=True, slots=True)
class Row:
    """One class of the table.

    Attributes:
        class_name: As in ``architectures``.
        model_type: Of the class's config.
        introspect: Why the class must be built with its real config; empty when ``architecture`` is valid
            for all.
        sub_models: Per config key of an exchangeable sub-model, the model types that the row was measured
            with.
        architecture: None when ``introspect`` says why.
        structures: The structure with other sub-models, by the model type of the text model.
        shared: How ties between layers follow from the config; ``architecture`` has them only for a config.
    """

    class_name: str
    model_type: str
    introspect: str
    architecture: Architecture | None
    sub_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    structures: Mapping[str, Structure] = field(default_factory=dict)
    shared: SharedLayers | None = None

    def architecture_for(self, config: Mapping[str, Any]) -> Architecture | None:
        """The architecture with the text model and the ties between layers that this ``config.json`` says."""
        if self.architecture is not None and self.shared is not None:
            if not self.shared.covers(config):
                return None
            return dataclasses.replace(self.architecture, ties=self.architecture.ties + self.shared.ties(config))
        nested = config.get("text_config")
        found = nested.get("model_type") if isinstance(nested, Mapping) else None
        structure = self.structures.get(str(found))
        if self.architecture is None or structure is None:
            return self.architecture
        return dataclasses.replace(self.architecture, structure=structure)

    def covers(self, config: Mapping[str, Any]) -> bool:
        """Whether the row is right for this ``config.json``: its sub-models and lists of layers were measured."""
        if self.architecture is None or (self.shared is not None and not self.shared.covers(config)):
            return False
        for key, measured in self.sub_models.items():
            nested = config.get(key)
            found = nested.get("model_type") if isinstance(nested, Mapping) else None
            if found is not None and found not in measured:
                return False
        return True


def encode_rows(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """The sections of one model type; the same rows give the same entries."""
    ordered = sorted(rows, key=lambda row: row.class_name)
    bodies: dict[str, str] = {}  # names -> the first class that has them
    structures: dict[str, str] = {}  # shared part as text -> its name
    return {
        "classes": {row.class_name: _encoded(row, bodies, structures) for row in ordered},
        "bodies": {owner: names for names, owner in bodies.items()},
        "structures": {owner: json.loads(text) for text, owner in structures.items()},
    }


def decode_row(
    class_name: str, model_type: str, sections: Mapping[str, Mapping[str, Any]], transformers_version: str
) -> Row:
    """The row of one class.

    Args:
        class_name: Of the class.
        model_type: Of its config.
        sections: Of the file that holds it.
        transformers_version: Of the library that was asked.
    """
    values = sections["classes"][class_name]
    body = sections["bodies"][values["body"]] if "body" in values else ""
    reason = values.get("introspect", "")
    if reason:
        return Row(class_name, model_type, reason, None)
    below = values.get("at", "")
    lead = f"{below}." if below else ""
    names = unpack(values["names"]) | {lead + name for name in unpack(body)}

    def structure_from(built: Mapping[str, Any]) -> Structure:
        return decode_structure(built, sections["structures"][built["from"]] if "from" in built else {}, lead)

    architecture = Architecture(
        class_name=class_name,
        model_type=model_type,
        ties=tuple(_decoded_tie(tie) for tie in values.get("ties", ())),
        name_patterns=frozenset(names),
        base_prefix=values["prefix"],
        keep_in_fp32=tuple(values.get("fp32", ())),
        keep_in_fp32_strict=tuple(values.get("fp32_strict", ())),
        ties_flag_editable=values["editable"],
        has_output_embeddings=values["output"],
        known_from="table",
        transformers_version=transformers_version,
        ignored=tuple(values.get("ignored", ())),
        structure=structure_from(values.get("built", {})),
    )
    sub_models = {key: tuple(types) for key, types in values.get("sub", {}).items()}
    structures = {key: structure_from(built) for key, built in values.get("texts", {}).items()}
    layers = decode_shared(values["shared"]) if "shared" in values else None
    return Row(class_name, model_type, "", architecture, sub_models, structures, layers)


def _encoded(row: Row, bodies: dict[str, str], structures: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    known = row.architecture
    if known is None:
        return {"introspect": row.introspect}
    lead = f"{known.base_prefix}." if known.base_prefix else ""
    below = {name for name in known.name_patterns if lead and name.startswith(lead)}
    head = known.name_patterns - below if below else frozenset[str]()
    body = pack(name.removeprefix(lead) if below else name for name in below or known.name_patterns)
    values |= {
        "prefix": known.base_prefix,
        "editable": known.ties_flag_editable,
        "output": known.has_output_embeddings,
    }
    values |= {"at": known.base_prefix} if below else {}
    values |= {"body": bodies.setdefault(body, row.class_name), "names": pack(head)}
    values |= {"ties": [_encoded_tie(pair) for pair in known.ties]} if known.ties else {}
    values |= {"fp32": known.keep_in_fp32} if known.keep_in_fp32 else {}
    values |= {"fp32_strict": known.keep_in_fp32_strict} if known.keep_in_fp32_strict else {}
    values |= {"ignored": known.ignored} if known.ignored else {}
    values |= {"shared": encode_shared(row.shared)} if row.shared else {}
    values |= {"sub": row.sub_models} if row.sub_models else {}
    lead = lead if below else ""
    built = encode_structure(known.structure, lead, structures, row.class_name)
    values |= {"built": built} if built else {}
    texts = {
        text: encode_structure(each, lead, structures, f"{row.class_name}/{text}")
        for text, each in sorted(row.structures.items())
    }
    return values | ({"texts": texts} if texts else {})


def _encoded_tie(pair: TiePair) -> dict[str, Any]:
    flag = {"keys": [".".join(path) for path in pair.flag.paths], "truth": pair.flag.truth}
    return {"names": pair.namings, **flag, **({} if pair.is_primary else {"secondary": True})}


def _decoded_tie(values: Mapping[str, Any]) -> TiePair:
    flag = TieFlag(tuple(tuple(key.split(".")) for key in values["keys"]), values["truth"])
    namings = tuple((target, source) for target, source in values["names"])
    return TiePair(namings, flag, not values.get("secondary", False))
