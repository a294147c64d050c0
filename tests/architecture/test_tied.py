"""The tie table, row by row, on hand-made architectures; no torch, no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ckptx.architecture.architecture import ALWAYS_TIED, Architecture, TieFlag, TiePair
from ckptx.architecture.class_table import lookup
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.tied import StoredTensor, TieDecision, resolve_ties, untying_edits
from ckptx.errors import InputError

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BODY = [f"model.layers.{layer}.{leaf}" for layer in range(4) for leaf in ("mlp.up_proj.weight", "mlp.up_proj.bias")]


def causal_lm(flag: TieFlag | None = None, **changes: Any) -> Architecture:
    flag = flag or TieFlag((("tie_word_embeddings",),), "001")
    pair = TiePair(((HEAD, EMBED), (HEAD, "embed_tokens.weight"), ("old_head.weight", "old.embed.weight")), flag)
    values: dict[str, Any] = {
        "class_name": "TinyForCausalLM",
        "model_type": "tiny",
        "ties": (pair,),
        "name_patterns": frozenset(
            {HEAD, EMBED, "model.layers.*.mlp.up_proj.weight", "model.layers.*.mlp.up_proj.bias"}
        ),
        "base_prefix": "model",
        "keep_in_fp32": (),
        "keep_in_fp32_strict": (),
        "ties_flag_editable": True,
        "has_output_embeddings": True,
        "known_from": "table",
        "transformers_version": "0",
    }
    return Architecture(**values | changes)


def disk(*names: str, **special: StoredTensor) -> dict[str, StoredTensor]:
    found = {name: StoredTensor((8, 4), "bf16") for name in (*BODY, *names)}
    return found | special


def never_compared(first: str, second: str) -> bool:
    raise AssertionError(f"compared {first} with {second}")


def decide(
    architecture: Architecture, config: Mapping[str, Any], on_disk: Mapping[str, StoredTensor], **options: Any
) -> list[TieDecision]:
    return resolve_ties(architecture, config, on_disk, options.pop("equal", never_compared), **options)


def only(decisions: list[TieDecision]) -> TieDecision:
    assert len(decisions) == 1
    return decisions[0]


# -------------------------------------------------------------------------- the rows of the table


def test_source_only_declared_is_stored_once_under_the_source() -> None:
    found = only(decide(causal_lm(), TIED, disk(EMBED)))
    assert (found.case, found.action, found.stored) == ("source-only", "alias", EMBED)
    assert (found.target, found.source, found.declared) == (HEAD, EMBED, True)
    assert found.evidence == (
        "lm_head.weight absent, model.embed_tokens.weight present, tie_word_embeddings=true (config.json)"
    )


def test_target_only_declared_makes_the_source_the_alias() -> None:
    found = only(decide(causal_lm(), TIED, disk(HEAD)))
    assert (found.case, found.action, found.stored, found.source) == ("target-only", "alias", HEAD, EMBED)


def test_both_equal_declared_is_stored_once() -> None:
    compared = []

    def equal(first: str, second: str) -> bool:
        compared.append((first, second))
        return True

    found = only(decide(causal_lm(), TIED, disk(HEAD, EMBED), equal=equal))
    assert (found.case, found.action, found.stored) == ("equal", "alias", EMBED)
    assert compared == [(HEAD, EMBED)]


def test_both_different_declared_keeps_both_and_edits_the_config() -> None:
    architecture = causal_lm()
    found = decide(architecture, TIED, disk(HEAD, EMBED), equal=lambda *_: False)
    assert (only(found).case, only(found).action, only(found).stored) == ("different", "keep-both", None)
    edits = untying_edits(architecture, TIED, found)
    assert dict(edits.values) == {("tie_word_embeddings",): False}
    assert "tie_word_embeddings written as false" in edits.note


@pytest.mark.parametrize("head", [StoredTensor((9, 4), "bf16"), StoredTensor((8, 4), "f32")], ids=["shape", "dtype"])
def test_mismatched_shape_or_dtype_keeps_both_without_comparing(head: StoredTensor) -> None:
    found = only(decide(causal_lm(), TIED, {**disk(EMBED), HEAD: head}))
    assert (found.case, found.action) == ("mismatched", "keep-both")


def test_both_undeclared_are_two_plain_tensors_and_never_compared() -> None:
    architecture = causal_lm()
    found = decide(architecture, UNTIED, disk(HEAD, EMBED))
    assert (only(found).case, only(found).action, only(found).declared) == ("undeclared", "keep-both", False)
    assert not untying_edits(architecture, UNTIED, found).values


@pytest.mark.parametrize(("there", "missing"), [(EMBED, HEAD), (HEAD, EMBED)])
def test_one_only_undeclared_is_refused_and_names_the_option(there: str, missing: str) -> None:
    with pytest.raises(InputError, match="--tie-missing") as refusal:
        decide(causal_lm(), UNTIED, disk(there))
    assert str(refusal.value).startswith(f"{missing}: not in the checkpoint")


def test_one_only_undeclared_with_tie_missing_is_an_undeclared_alias() -> None:
    found = only(decide(causal_lm(), UNTIED, disk(EMBED), tie_missing=True))
    assert (found.action, found.stored, found.declared) == ("alias", EMBED, False)


def test_tie_missing_leaves_two_present_tensors_alone() -> None:
    found = only(decide(causal_lm(), UNTIED, disk(EMBED, HEAD), tie_missing=True))
    assert found.action == "keep-both"


@pytest.mark.parametrize("config", [TIED, UNTIED])
@pytest.mark.parametrize("tie_missing", [False, True])
def test_neither_is_refused_whatever_the_config_says(config: dict[str, bool], tie_missing: bool) -> None:
    with pytest.raises(InputError, match=r"neither is in the checkpoint.*--tie-missing"):
        decide(causal_lm(), config, disk(), tie_missing=tie_missing)


# ------------------------------------------------------------------------------- what is no error


def test_a_base_model_class_has_no_pair_to_miss() -> None:
    llama = lookup("LlamaModel", "llama")
    assert llama is not None
    assert decide(llama, {}, {"embed_tokens.weight": StoredTensor((8, 4), "bf16")}) == []


def test_names_without_the_base_prefix_are_a_base_model_without_its_head() -> None:
    names = {name.removeprefix("model."): StoredTensor((8, 4), "bf16") for name in (*BODY, EMBED)}
    found = only(decide(causal_lm(), UNTIED, names))
    assert (found.case, found.action, found.source) == ("base-model", "none", "embed_tokens.weight")


def test_a_quantized_head_is_not_a_missing_head() -> None:
    found = only(decide(causal_lm(), UNTIED, disk(EMBED, "lm_head.qweight", "lm_head.scales")))
    assert (found.case, found.action) == ("other-form", "none")


def test_a_checkpoint_of_something_else_is_not_judged() -> None:
    names = {f"base_model.layers.{layer}.lora_A.weight": StoredTensor((8, 4), "bf16") for layer in range(4)}
    assert only(decide(causal_lm(), TIED, names)).case == "missing"


def test_an_unknown_class_is_never_refused() -> None:
    unknown = find_architecture({"architectures": ["XForCausalLM"], "auto_map": {"AutoModel": "x.X"}})
    assert unknown is not None and unknown.known_from == "suffix table"
    assert only(decide(unknown, {}, disk(EMBED))).action == "none"
    tied = only(decide(unknown, {"text_config": TIED}, disk(EMBED)))
    assert (tied.action, tied.target) == ("alias", HEAD)


# -------------------------------------------------------------------------------------- namings


def test_names_are_spelled_in_the_dialect_of_the_disk() -> None:
    found = only(decide(causal_lm(), TIED, disk("old_head.weight", "old.layers.0.bias")))
    assert (found.target, found.source, found.stored) == (
        "old_head.weight",
        "old.embed.weight",
        "old_head.weight",
    )


def test_an_absent_source_takes_the_dialect_of_its_neighbours() -> None:
    gemma = lookup("Gemma3ForConditionalGeneration")
    assert gemma is not None
    names = ["language_model.lm_head.weight"]
    names += [f"language_model.model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    found = only(decide(gemma, {}, {name: StoredTensor((8, 4), "bf16") for name in names}))
    assert found.source == "language_model.model.embed_tokens.weight"


def test_an_unknown_prefix_in_front_of_both_names_is_found() -> None:
    both = disk("wrapped." + EMBED, "wrapped." + HEAD)
    found = only(decide(causal_lm(), TIED, both, equal=lambda *_: True))
    assert (found.target, found.source) == ("wrapped." + HEAD, "wrapped." + EMBED)
    found = only(decide(causal_lm(), TIED, disk("wrapped." + EMBED)))
    assert (found.target, found.stored) == ("wrapped." + HEAD, "wrapped." + EMBED)


def test_two_unknown_prefixes_are_not_guessed_between() -> None:
    with pytest.raises(InputError, match="neither"):
        decide(causal_lm(), TIED, disk("first." + HEAD, "second." + EMBED))


# ---------------------------------------------------------------------------- more than two names


def t5(*names: str, **options: Any) -> dict[str, TieDecision]:
    architecture = lookup("T5ForConditionalGeneration", "t5")
    assert architecture is not None
    body = [f"encoder.block.{i}.layer.0.SelfAttention.q.weight" for i in range(8)]
    on_disk = {name: StoredTensor((8, 4), "f32") for name in (*body, *names)}
    found = decide(architecture, options.pop("config", {}), on_disk, **options)
    return {each.target: each for each in found}


def test_t5_ties_four_names_to_one_tensor() -> None:
    found = t5("shared.weight")
    assert set(found) == {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD}
    assert {each.stored for each in found.values()} == {"shared.weight"}


def test_t5_1_1_keeps_its_own_head_although_the_class_always_ties() -> None:
    found = t5("shared.weight", HEAD, config=UNTIED, equal=lambda *_: False)
    assert found[HEAD].case == "different"
    assert found["encoder.embed_tokens.weight"].stored == "shared.weight"


def test_t5_flag_is_never_edited() -> None:
    architecture = lookup("T5ForConditionalGeneration")
    assert architecture is not None and not architecture.ties_flag_editable
    found = list(t5("shared.weight", HEAD, equal=lambda *_: False).values())
    edits = untying_edits(architecture, {}, found)
    assert not edits.values and "T5ForConditionalGeneration computes with it" in edits.note


def test_a_third_name_stands_for_a_missing_source() -> None:
    found = t5("decoder.embed_tokens.weight")
    assert found["decoder.embed_tokens.weight"].case == "target-only"
    assert found[HEAD].case == found["encoder.embed_tokens.weight"].case == "third-name"
    assert {each.stored for each in found.values()} == {"decoder.embed_tokens.weight"}


def test_two_targets_without_their_source_are_compared_with_each_other() -> None:
    compared = []

    def equal(first: str, second: str) -> bool:
        compared.append({first, second})
        return False

    found = t5("decoder.embed_tokens.weight", "encoder.embed_tokens.weight", equal=equal)
    assert compared == [{"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}]
    assert sorted(each.case for each in found.values()) == ["different", "target-only", "third-name"]


def bert(config: Mapping[str, Any], *names: str, **options: Any) -> dict[str, TieDecision]:
    architecture = lookup("BertForMaskedLM", "bert")
    assert architecture is not None
    body = [f"bert.encoder.layer.{i}.output.dense.weight" for i in range(8)]
    on_disk = {name: StoredTensor((8, 4), "f32") for name in (*body, *names)}
    return {each.target: each for each in decide(architecture, config, on_disk, **options)}


WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"


def test_bert_ties_the_bias_of_its_head_too() -> None:
    found = bert({}, WORDS, "cls.predictions.bias")
    assert found[f"{DECODER}.weight"].stored == WORDS
    assert found[f"{DECODER}.bias"].stored == "cls.predictions.bias"


def test_bert_without_its_head_only_lacks_the_bias() -> None:
    found = bert({}, WORDS)
    assert (found[f"{DECODER}.bias"].case, found[f"{DECODER}.bias"].action) == ("missing", "none")


def test_an_untied_bert_needs_the_bias_that_forward_reads() -> None:
    with pytest.raises(InputError, match=r"cls\.predictions\.decoder\.bias: not in the checkpoint"):
        bert(UNTIED, WORDS, f"{DECODER}.weight", "cls.predictions.bias")
    found = bert(UNTIED, WORDS, f"{DECODER}.weight", f"{DECODER}.bias")
    assert found[f"{DECODER}.bias"].action == "none"


def test_an_edit_that_would_untie_another_pair_is_not_made() -> None:
    architecture = lookup("BertForMaskedLM")
    assert architecture is not None
    found = bert({}, WORDS, f"{DECODER}.weight", "cls.predictions.bias", equal=lambda *_: False)
    edits = untying_edits(architecture, {}, list(found.values()))
    assert not edits.values and f"{DECODER}.bias still needs it" in edits.note


@pytest.mark.parametrize(
    ("class_name", "source", "target"),
    [
        ("WhisperForConditionalGeneration", "model.decoder.embed_tokens.weight", "proj_out.weight"),
        ("MambaForCausalLM", "backbone.embeddings.weight", "lm_head.weight"),
        ("GPT2LMHeadModel", "wte.weight", "lm_head.weight"),
        ("GPT2LMHeadModel", "transformer.wte.weight", "lm_head.weight"),
    ],
)
def test_classes_that_tie_by_default_need_no_key_in_the_config(class_name: str, source: str, target: str) -> None:
    architecture = lookup(class_name)
    assert architecture is not None
    found = only(decide(architecture, {}, {source: StoredTensor((8, 4), "f32")}))
    assert (found.action, found.target, found.stored) == ("alias", target, source)
    assert found.evidence.endswith("tie_word_embeddings absent from config.json, class default true")


def test_nested_flags_are_edited_with_the_root() -> None:
    flag = TieFlag((("tie_word_embeddings",), ("text_config", "tie_word_embeddings")), "001001111")
    config = {"text_config": {"tie_word_embeddings": True, "hidden_size": 8}}
    architecture = causal_lm(flag)
    found = decide(architecture, config, disk(HEAD, EMBED), equal=lambda *_: False)
    assert set(untying_edits(architecture, config, found).values) == set(flag.paths)
    assert config == {"text_config": {"tie_word_embeddings": True, "hidden_size": 8}}


def test_every_refusal_of_a_checkpoint_is_reported_at_once() -> None:
    pair = TiePair((("second.weight", "other.weight"),), ALWAYS_TIED)
    two = causal_lm(ties=(causal_lm().ties[0], pair))
    with pytest.raises(InputError) as refusal:
        decide(two, UNTIED, disk(EMBED))
    assert "lm_head.weight: not in" in str(refusal.value) and "second.weight, other.weight" in str(refusal.value)
