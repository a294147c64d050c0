"""Decode the classes in a model file (`model_files`): JSON becomes a `ClassRecord`.

    classes       LlamaForCausalLM -> its facts; `names` are the patterns outside of its base model
    bodies        LlamaForCausalLM -> patterns in the base model, without its prefix, shared by the classes around it
    structures    LlamaForCausalLM -> plan, layers and conversions in the base model, see `structure_decoding`

In the facts of a class, `body` is the key of its entry in `bodies` (the name of one of the classes that share it), and
`body_below` is the prefix that the patterns of that entry have in the class. A class with the key `introspect` has no
names in the file: the value of that key is the reason why only the real config can give them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptx.architecture.architecture import Architecture, TieFlag, TiePair
from ckptx.architecture.shared_layers import SharedLayers, decode_shared
from ckptx.architecture.structure import Structure
from ckptx.architecture.structure_decoding import decode_structure


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """Record of one class in the generated files.

    Attributes:
        class_name: Name as in ``architectures``.
        model_type: Model type of the class's config.
        introspection_reason: Reason why the class must be built with its real config; empty if ``architecture`` is
            known without it.
        architecture: Architecture of the class, without ties between layers; None if ``introspection_reason`` is set.
        sub_models: Config key of an exchangeable sub-model, such as ``text_config`` -> its model types that the record
            covers, because `tools/build_tables.py` built the class with each of them.
        structures: Model type of an exchangeable text model -> structure of the class with it, in place of that of
            ``architecture``.
        shared_layers: Rule from which the ties between layers follow under a config; None if there are no such ties.
    """

    class_name: str
    model_type: str
    introspection_reason: str
    architecture: Architecture | None
    sub_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    structures: Mapping[str, Structure] = field(default_factory=dict)
    shared_layers: SharedLayers | None = None

    def architecture_for(self, config: Mapping[str, Any]) -> Architecture | None:
        """Return the architecture of the class under this ``config.json``.

        The ties between layers are added if the record has a rule for them; else the structure is that of the text
        model of the config if the record has one for its model type. No class has both. `covers` states whether the
        record is valid for the sub-models of the config; this method does not check it.

        Returns:
            None if the record has no architecture, or its rule for ties is not valid for the layers of the config.
        """
        if self.architecture is not None and self.shared_layers is not None:
            if not self.shared_layers.covers(config):
                return None
            return dataclasses.replace(self.architecture, ties=self.architecture.ties + self.shared_layers.ties(config))
        nested = config.get("text_config")
        found = nested.get("model_type") if isinstance(nested, Mapping) else None
        structure = self.structures.get(str(found))
        if self.architecture is None or structure is None:
            return self.architecture
        return dataclasses.replace(self.architecture, structure=structure)

    def covers(self, config: Mapping[str, Any]) -> bool:
        """Return True if the record has an architecture, and it is valid for this ``config.json``.

        It is valid if the class was recorded with the sub-models of the config, and if the config has what the rule for
        ties between layers reads (`SharedLayers.covers`).
        """
        if self.architecture is None or (self.shared_layers is not None and not self.shared_layers.covers(config)):
            return False
        for key, recorded in self.sub_models.items():
            nested = config.get(key)
            found = nested.get("model_type") if isinstance(nested, Mapping) else None
            if found is not None and found not in recorded:
                return False
        return True


def decode_class(
    class_name: str, model_type: str, sections: Mapping[str, Mapping[str, Any]], transformers_version: str
) -> ClassRecord:
    """Return the record of a class.

    Args:
        class_name: Name of the class.
        model_type: Model type of its config.
        sections: Sections of the model file with the class, see `model_files`.
        transformers_version: Version of transformers that was introspected.
    """
    values = sections["classes"][class_name]
    if "introspect" in values:
        return ClassRecord(class_name, model_type, values["introspect"], None)
    prefix = f"{values['body_below']}." if "body_below" in values else ""
    names = [*values.get("names", ()), *(prefix + name for name in sections["bodies"][values["body"]])]

    def structure_from(own: Mapping[str, Any]) -> Structure:
        return decode_structure(own, sections["structures"][own["body"]] if "body" in own else {}, prefix)

    architecture = Architecture(
        class_name=class_name,
        model_type=model_type,
        ties=tuple(_decode_tie(tie) for tie in values.get("ties", ())),
        name_patterns=frozenset(names),
        base_prefix=values["base_prefix"],
        keep_in_fp32=tuple(values.get("keep_in_fp32", ())),
        keep_in_fp32_strict=tuple(values.get("keep_in_fp32_strict", ())),
        ties_flag_editable=values["ties_flag_editable"],
        has_output_embeddings=values["has_output_embeddings"],
        known_from="table",
        transformers_version=transformers_version,
        ignored=tuple(values.get("ignored", ())),
        structure=structure_from(values.get("structure", {})),
    )
    sub_models = {key: tuple(types) for key, types in values.get("sub_models", {}).items()}
    structures = {key: structure_from(own) for key, own in values.get("structures_by_text_model", {}).items()}
    layers = decode_shared(values["shared_layers"]) if "shared_layers" in values else None
    return ClassRecord(class_name, model_type, "", architecture, sub_models, structures, layers)


def _decode_tie(values: Mapping[str, Any]) -> TiePair:
    flag = TieFlag(tuple(tuple(key.split(".")) for key in values["flag_keys"]), values["flag_truth"])
    namings = tuple((target, source) for target, source in values["namings"])
    return TiePair(namings, flag, values.get("is_primary", True))
