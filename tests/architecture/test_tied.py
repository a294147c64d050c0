"""The tie table, row by row, on hand-made architectures; no torch, no files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest

from ckptx.architecture.architecture import ALWAYS_TIED, NEVER_TIED, Architecture, TieFlag, TiePair
from ckptx.architecture.class_table import lookup
from ckptx.architecture.lookup import find_architecture
from ckptx.architecture.tied import StoredTensor, TieDecision, UntyingEdits, resolve_ties, untying_edits
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
    assert (found.stored, found.action, found.stored_name) == ("tied-to-only", "alias", EMBED)
    assert (found.target, found.source, found.declared) == (HEAD, EMBED, True)
    assert found.evidence == (
        "lm_head.weight absent, model.embed_tokens.weight present, tie_word_embeddings=true (config.json)"
    )


def test_target_only_declared_makes_the_source_the_alias() -> None:
    found = only(decide(causal_lm(), TIED, disk(HEAD)))
    assert (found.stored, found.action, found.stored_name, found.source) == ("name-only", "alias", HEAD, EMBED)


def test_both_equal_declared_is_stored_once() -> None:
    compared = []

    def equal(first: str, second: str) -> bool:
        compared.append((first, second))
        return True

    found = only(decide(causal_lm(), TIED, disk(HEAD, EMBED), equal=equal))
    assert (found.stored, found.action, found.stored_name) == ("equal", "alias", EMBED)
    assert compared == [(HEAD, EMBED)]


def test_both_different_declared_keeps_both_and_edits_the_config() -> None:
    architecture = causal_lm()
    found = decide(architecture, TIED, disk(HEAD, EMBED), equal=lambda *_: False)
    assert (only(found).stored, only(found).action, only(found).stored_name) == ("different", "keep-both", None)
    edits = untying_edits(architecture, TIED, found)
    assert dict(edits.values) == {("tie_word_embeddings",): False}
    assert "tie_word_embeddings written as false" in edits.note


@pytest.mark.parametrize("head", [StoredTensor((9, 4), "bf16"), StoredTensor((8, 4), "f32")], ids=["shape", "dtype"])
def test_mismatched_shape_or_dtype_keeps_both_without_comparing(head: StoredTensor) -> None:
    found = only(decide(causal_lm(), TIED, {**disk(EMBED), HEAD: head}))
    assert (found.stored, found.action) == ("mismatched", "keep-both")


def test_both_undeclared_are_two_plain_tensors_and_never_compared() -> None:
    architecture = causal_lm()
    found = decide(architecture, UNTIED, disk(HEAD, EMBED))
    assert (only(found).stored, only(found).action, only(found).declared) == ("undeclared", "keep-both", False)
    assert untying_edits(architecture, UNTIED, found) == UntyingEdits({}, "")


@pytest.mark.parametrize(("there", "missing"), [(EMBED, HEAD), (HEAD, EMBED)])
def test_one_only_undeclared_is_refused_and_names_the_option(there: str, missing: str) -> None:
    with pytest.raises(InputError, match="--tie-missing") as refusal:
        decide(causal_lm(), UNTIED, disk(there))
    assert str(refusal.value).startswith(f"{missing}: not in the checkpoint")
    assert "; convert the checkpoint with --tie-missing to use" in str(refusal.value)  # verify has no such option


def test_one_only_undeclared_with_tie_missing_is_an_undeclared_alias() -> None:
    found = only(decide(causal_lm(), UNTIED, disk(EMBED), tie_missing=True))
    assert (found.action, found.stored_name, found.declared) == ("alias", EMBED, False)


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
    assert (found.stored, found.action, found.source) == ("base-model", "none", "embed_tokens.weight")


def test_a_quantized_head_is_not_a_missing_head() -> None:
    found = only(decide(causal_lm(), UNTIED, disk(EMBED, "lm_head.qweight", "lm_head.scales")))
    assert (found.stored, found.action) == ("other-form", "none")


def test_a_checkpoint_of_something_else_is_not_judged() -> None:
    names = {f"base_model.layers.{layer}.lora_A.weight": StoredTensor((8, 4), "bf16") for layer in range(4)}
    assert only(decide(causal_lm(), TIED, names)).stored == "missing"


def test_an_unknown_class_is_never_refused() -> None:
    unknown = find_architecture({"architectures": ["XForCausalLM"], "auto_map": {"AutoModel": "x.X"}})
    assert unknown is not None and unknown.known_from == "suffix table"
    assert only(decide(unknown, {}, disk(EMBED))).action == "none"
    tied = only(decide(unknown, {"text_config": TIED}, disk(EMBED)))
    assert (tied.action, tied.target) == ("alias", HEAD)


def test_the_name_of_a_head_of_an_unknown_class_is_not_invented() -> None:
    unknown = find_architecture({"architectures": ["XForCausalLM"], "auto_map": {"AutoModel": "x.X"}})
    assert unknown is not None
    wte = "transformer.wte.weight"
    for stored in (disk(wte), disk(HEAD, "transformer.wpe.weight")):
        found = only(decide(unknown, TIED, stored))
        assert (found.stored, found.action, found.declared) == ("guessed", "none", False)
    forced = only(decide(unknown, TIED, disk(wte), tie_missing=True))
    assert (forced.action, forced.target, forced.stored_name) == ("alias", HEAD, wte)
    both = only(decide(unknown, TIED, disk(wte, HEAD), equal=lambda *_: True))
    assert (both.stored, both.action) == ("equal", "alias")


# -------------------------------------------------------------------------------------- namings


def test_names_are_spelled_in_the_dialect_of_the_disk() -> None:
    found = only(decide(causal_lm(), TIED, disk("old_head.weight", "old.layers.0.bias")))
    assert (found.target, found.source, found.stored_name) == (
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
    assert (found.target, found.stored_name) == ("wrapped." + HEAD, "wrapped." + EMBED)


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
    assert {each.stored_name for each in found.values()} == {"shared.weight"}


def test_t5_1_1_keeps_its_own_head_although_the_class_always_ties() -> None:
    found = t5("shared.weight", HEAD, config=UNTIED, equal=lambda *_: False)
    assert found[HEAD].stored == "different"
    assert found["encoder.embed_tokens.weight"].stored_name == "shared.weight"


def test_t5_flag_is_never_edited() -> None:
    architecture = lookup("T5ForConditionalGeneration")
    assert architecture is not None and not architecture.ties_flag_editable
    found = list(t5("shared.weight", HEAD, equal=lambda *_: False).values())
    edits = untying_edits(architecture, {}, found)
    assert not edits.values and "T5ForConditionalGeneration computes with it" in edits.note


def test_a_third_name_stands_for_a_missing_source() -> None:
    found = t5("decoder.embed_tokens.weight")
    assert found["decoder.embed_tokens.weight"].stored == "name-only"
    assert found[HEAD].stored == found["encoder.embed_tokens.weight"].stored == "third-name"
    assert {each.stored_name for each in found.values()} == {"decoder.embed_tokens.weight"}


def test_two_targets_without_their_source_are_compared_with_each_other() -> None:
    compared = []

    def equal(first: str, second: str) -> bool:
        compared.append({first, second})
        return False

    found = t5("decoder.embed_tokens.weight", "encoder.embed_tokens.weight", equal=equal)
    assert compared == [{"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}]
    assert sorted(each.stored for each in found.values()) == ["different", "name-only", "third-name"]


def bert(config: Mapping[str, Any], *names: str, **options: Any) -> dict[str, TieDecision]:
    architecture = lookup("BertForMaskedLM", "bert")
    assert architecture is not None
    body = [f"bert.encoder.layer.{i}.output.dense.weight" for i in range(8)]
    on_disk = {name: StoredTensor((8, 4), "f32") for name in (*body, *names)}
    return {each.target: each for each in decide(architecture, config, on_disk, **options)}


WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"


def test_bert_ties_the_bias_of_its_head_too() -> None:
    found = bert({}, WORDS, "cls.predictions.bias")
    assert found[f"{DECODER}.weight"].stored_name == WORDS
    assert found[f"{DECODER}.bias"].stored_name == "cls.predictions.bias"


def test_bert_without_its_head_only_lacks_the_bias() -> None:
    found = bert({}, WORDS)
    assert (found[f"{DECODER}.bias"].stored, found[f"{DECODER}.bias"].action) == ("missing", "none")


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
    assert (found.action, found.target, found.stored_name) == ("alias", target, source)
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


# --------------------------------------------------------------------------------------- every combination

ROOT, NESTED = ("tie_word_embeddings",), ("text_config", "tie_word_embeddings")
READS_ROOT, READS_NESTED = TieFlag((ROOT,), "001"), TieFlag((NESTED,), "001")
READS_BOTH = TieFlag((ROOT, NESTED), "001001111")
SECOND = "second.weight"
FLAGS = (ALWAYS_TIED, NEVER_TIED, READS_ROOT)


def two_pairs(first: TieFlag, second: TieFlag) -> Architecture:
    """Two targets of one source; the second pair is not that of the embeddings."""
    patterns = causal_lm().name_patterns | {SECOND}
    return causal_lm(
        ties=(TiePair(((HEAD, EMBED),), first), TiePair(((SECOND, EMBED),), second, is_primary=False)),
        name_patterns=patterns,
    )


def presences() -> list[tuple[str, ...]]:
    names = (EMBED, HEAD, SECOND)
    return [present for count in range(4) for present in combinations(names, count)]


@pytest.mark.parametrize("present", presences(), ids="+".join)
@pytest.mark.parametrize(("first", "second"), product(FLAGS, FLAGS))
@pytest.mark.parametrize("tie_missing", [False, True])
@pytest.mark.parametrize("is_equal", [False, True])
def test_an_alias_is_of_a_stored_name_that_a_tie_leads_to(
    present: tuple[str, ...], first: TieFlag, second: TieFlag, tie_missing: bool, is_equal: bool
) -> None:
    """A target whose pair is not tied has values of its own, and stands for no missing source."""
    architecture = two_pairs(first, second)
    found = decide(
        architecture, TIED, disk(*present), equal=lambda *_: is_equal, tie_missing=tie_missing, accepted_problems=[]
    )
    is_tied = {HEAD: tie_missing or first.is_set(TIED), SECOND: tie_missing or second.is_set(TIED)}
    candidates = [EMBED] if EMBED in present else [name for name in (HEAD, SECOND) if name in present and is_tied[name]]
    for decision, flag in zip(found, (first, second), strict=True):
        target = decision.target
        both = target in present and EMBED in present
        may_be_alias = is_tied[target] and bool(candidates) and (flag.is_set(TIED) or not both)
        others = [name for name in candidates if name != target]
        differs = target in present and bool(others) and candidates[0] != target and not is_equal
        assert (decision.action == "alias") == (may_be_alias and not differs)
        assert decision.stored_name == (candidates[0] if decision.action == "alias" else None)
        assert decision.declared is flag.is_set(TIED)


CONFIGS: list[dict[str, Any]] = [
    {**root, **nested}
    for root in ({}, TIED, UNTIED)
    for nested in ({}, {"text_config": {}}, {"text_config": TIED}, {"text_config": UNTIED}, {"text_config": None})
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("flag", [ALWAYS_TIED, READS_ROOT, READS_NESTED, READS_BOTH], ids=lambda flag: str(flag.paths))
def test_flags_of_different_tensors_are_written_wherever_a_loader_may_read_them(
    flag: TieFlag, config: dict[str, Any]
) -> None:
    """In the text config, too, even if this class reads the root: the text model may be loaded alone."""
    architecture = causal_lm(flag)
    before = copy.deepcopy(config)
    found = decide(architecture, config, disk(HEAD, EMBED), equal=lambda *_: False)
    edits = untying_edits(architecture, config, found)
    expected = {ROOT, *flag.paths} | ({NESTED} if isinstance(config.get("text_config"), dict) else set())
    assert dict(edits.values) == (dict.fromkeys(expected, False) if only(found).declared else {})
    assert config == before
    assert all(".".join(path) in edits.note for path in edits.values)


@pytest.mark.parametrize("is_primary", [True, False])
@pytest.mark.parametrize("leaf", ["weight", "bias"])
@pytest.mark.parametrize("has_target", [True, False])
def test_only_the_second_name_of_a_secondary_bias_may_be_absent(is_primary: bool, leaf: str, has_target: bool) -> None:
    target, source = f"decoder.{leaf}", f"head.{leaf}"
    architecture = causal_lm(ties=(TiePair(((target, source),), NEVER_TIED, is_primary=is_primary),))
    problems: list[str] = []
    found = only(decide(architecture, UNTIED, disk(target if has_target else source), accepted_problems=problems))
    assert (found.action, found.stored) == ("none", "name-only" if has_target else "tied-to-only")
    may_be_absent = has_target and not is_primary and leaf == "bias"
    assert len(problems) == (0 if may_be_absent else 1)
    assert all(each.startswith(source if has_target else target) for each in problems)


REASON = "tie_word_embeddings=false (config.json)"
OF_UNTIED: dict[tuple[str, ...], TieDecision] = {
    (): TieDecision(HEAD, EMBED, "missing", "none", None, False, f"{HEAD} and {EMBED} absent, {REASON}"),
    (HEAD,): TieDecision(HEAD, EMBED, "name-only", "none", None, False, f"{EMBED} absent, {REASON}"),
    (EMBED,): TieDecision(HEAD, EMBED, "tied-to-only", "none", None, False, f"{HEAD} absent, {REASON}"),
    (HEAD, EMBED): TieDecision(
        HEAD, EMBED, "undeclared", "keep-both", None, False, f"{HEAD} and {EMBED} both present, {REASON}"
    ),
}


@pytest.mark.parametrize("known_from", ["table", "suffix table"])
@pytest.mark.parametrize("present", OF_UNTIED)
def test_missing_names_of_an_untied_pair_are_problems_only_of_a_known_class(
    present: tuple[str, ...], known_from: str
) -> None:
    problems = ["an earlier problem"]
    architecture = causal_lm(known_from=known_from)
    assert only(decide(architecture, UNTIED, disk(*present), accepted_problems=problems)) == OF_UNTIED[present]
    missing = [name for name in (HEAD, EMBED) if name not in present]
    assert problems[0] == "an earlier problem"
    if not missing or known_from == "suffix table":
        assert not problems[1:]
    else:
        (problem,) = problems[1:]
        assert problem.startswith(f"{', '.join(missing)}: ") and "TinyForCausalLM" in problem


@pytest.mark.parametrize("text_config", [None, {}, {"tie_word_embeddings": True}])
def test_the_flag_of_the_text_model_is_edited_wherever_there_is_a_text_model(
    text_config: dict[str, Any] | None,
) -> None:
    config = TIED if text_config is None else {**TIED, "text_config": text_config}
    found = decide(causal_lm(), config, disk(HEAD, EMBED), equal=lambda *_: False)
    paths = {("tie_word_embeddings",)} | (
        {("text_config", "tie_word_embeddings")} if text_config is not None else set()
    )
    edits = untying_edits(causal_lm(), config, found)
    assert dict(edits.values) == dict.fromkeys(paths, False)
    assert edits.note == f"{', '.join(sorted(map('.'.join, paths)))} written as false: the tensors differ"
