"""What a config is said to switch off or on, held against models that are built from it on the meta device."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from ckptx.architecture.class_table import lookup, shape_rules
from ckptx.architecture.introspection import meta_model
from ckptx.architecture.model_files import class_names
from ckptx.architecture.shape_rules import Switch
from ckptx.mapping.names import pattern_of
from tests.support.import_tool import ROOT
from tests.support.slow import slow_but

MEASURED = [name for name in class_names() if (rules := shape_rules(name)) is not None and rules.switches]
FAST = ["LlamaForCausalLM", "Qwen2MoeForCausalLM", "JambaForCausalLM", "Glm4MoeForCausalLM"]
_CONFIGS = 6  # of each class


@pytest.mark.sampled(4)
@pytest.mark.parametrize("class_name", slow_but(MEASURED, FAST))
def test_no_config_lacks_what_is_there_or_has_what_is_not(class_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to three keys of a small config are changed at random, among those that the class reads."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import config_variants as variants

    known, cls, rules = lookup(class_name), meta_model.find_class(class_name), shape_rules(class_name)
    assert known is not None and rules is not None
    build, chooser, tried = meta_model.default_config_builder(cls), random.Random(class_name), 0
    try:
        base = variants.small_base(cls, build, {})
        with variants.record_reads() as reads:
            meta_model.build_on_meta(cls, build(copy.deepcopy(base)))
    except Exception:
        pytest.skip("cannot be built from the default config")
    changes = list(variants.possible_changes(build(copy.deepcopy(base)), reads))
    for _ in range(_CONFIGS):
        values: dict[str, Any] = base
        try:
            for change in chooser.sample(changes, min(len(changes), chooser.choice((1, 1, 2, 3)))):
                values = variants.with_change(values, build, change)
            config = build(copy.deepcopy(values))
            there = set(map(pattern_of, meta_model.build_on_meta(cls, config).state_dict(keep_vars=True)))
        except Exception:  # no checkpoint has such a config
            continue
        tried += 1
        for document in (json.loads(config.to_json_string()), {**values, "model_type": known.model_type}):
            expected = rules.evaluate(document, known.structure.root, known.name_patterns)
            if expected is not None:
                assert not expected.absent_patterns.keys() & there
                assert expected.added_patterns.keys() <= there
    assert tried


@pytest.mark.parametrize("value", [False, True, None, 0, 1, "false", []])
@pytest.mark.parametrize("effect", ["adds", "adds where given", "may add", "removes"])
def test_a_switch_decides_only_what_was_measured(effect: str, value: object) -> None:
    switch = Switch("attention_bias", effect, False)
    says = switch.excludes({"attention_bias": value})
    assert says is (value is False and effect != "may add")
    assert switch.excludes({}) is (effect == "adds")
    assert switch.is_opposite({"attention_bias": value}) is (value is True)
    assert not switch.is_opposite({})


@pytest.mark.parametrize("class_name", FAST[:2])
def test_the_biases_of_attention_follow_from_the_config(class_name: str) -> None:
    known, rules = lookup(class_name), shape_rules(class_name)
    assert known is not None and rules is not None
    key = "attention_bias" if class_name.startswith("Llama") else "qkv_bias"
    bias = "model.layers.*.self_attn.q_proj.bias"
    off = rules.evaluate({"hidden_size": 8, key: False}, (), known.name_patterns)
    on = rules.evaluate({"hidden_size": 8, key: True}, (), known.name_patterns)
    assert off is not None and on is not None
    assert off.absent_patterns[bias] == key and bias not in on.absent_patterns
