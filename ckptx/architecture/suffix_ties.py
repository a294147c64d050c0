"""Tied names of classes that cannot be built, so that they cannot be read from transformers.

They are used only for a class that neither the table nor the installed transformers has, or that is remote code without
permission to run it. Each entry has a target (alias), the source that it is tied to, and the models with this pair. In
a checkpoint, both names may have the same prefix (``language_model.lm_head.weight``).
"""

from __future__ import annotations

from ckptx.architecture.architecture import FROM_SUFFIX_TABLE, Architecture, TieFlag, TiePair

# (target, source, models that the pair is known from)
SUFFIX_TIES: tuple[tuple[str, str, str], ...] = (
    ("lm_head.weight", "model.embed_tokens.weight", "the Llama layout, which most published remote code follows"),
    ("lm_head.weight", "transformer.wte.weight", "the GPT-2 layout: Qwen 1, MPT, Falcon forks"),
    ("output.weight", "model.tok_embeddings.weight", "InternLM 2"),
    ("output.weight", "tok_embeddings.weight", "the original Llama release and its direct descendants"),
    ("transformer.output_layer.weight", "transformer.embedding.word_embeddings.weight", "ChatGLM 2 to 4"),
    ("lm_head.weight", "transformer.word_embeddings.weight", "the Bloom layout"),
    ("lm_head.weight", "backbone.embeddings.weight", "Mamba forks"),
    ("lm_head.weight", "backbone.embedding.weight", "the original Mamba release"),
    ("embed_out.weight", "gpt_neox.embed_in.weight", "the GPT-NeoX layout"),
    ("lm_head.weight", "model.decoder.embed_tokens.weight", "the OPT layout"),
)

# The flag at the root decides, or if it is absent that in text_config; untied if both are absent, as in transformers 5.
SUFFIX_FLAG = TieFlag((("tie_word_embeddings",), ("text_config", "tie_word_embeddings")), "001000111")


def suffix_architecture(class_name: str, model_type: str) -> Architecture:
    """Return a fallback for an unknown class: one candidate pair, and no other names.

    Its ``match_fraction`` is 0.0, and ``resolve_ties`` raises no error about a missing name, which proves nothing if
    the names of the class are unknown.
    """
    pair = TiePair(tuple((target, source) for target, source, _ in SUFFIX_TIES), SUFFIX_FLAG)
    return Architecture(
        class_name=class_name,
        model_type=model_type,
        ties=(pair,),
        name_patterns=frozenset(),
        base_prefix="",
        keep_in_fp32=(),
        keep_in_fp32_strict=(),
        ties_flag_editable=True,
        has_output_embeddings=False,
        known_from=FROM_SUFFIX_TABLE,
        transformers_version="",
    )
