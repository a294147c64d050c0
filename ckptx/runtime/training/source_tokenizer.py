"""Build a tokenizer for a model with random weights: bytes, special tokens of its config, and a chat template.

It depends on the config only, and can encode any text. Stock transformers reads it.
"""

from __future__ import annotations

from typing import Any

from ckptx.errors import UsageError, missing_package
from ckptx.runtime.model.shrink_config import parts

_BYTES = 256
# Tokens that a chat requires, even if the config does not name them.
_ROLES = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>"}
MOST_TOKENS = _BYTES + len(_ROLES)  # without other special tokens of a config

# `{% generation %}` marks the answer and its end token. An image is one token, which data sets replace by many.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}"
    "{{ 'Q:' + message['content'] + '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)


def make_tokenizer(config: Any) -> Any:
    """Return a fast tokenizer for a config; missing ids for padding, begin and end are set in the config.

    Args:
        config: A `PreTrainedConfig`; its text part is changed in place if it lacks one of the three.

    Raises:
        UsageError: The vocabulary is too small for bytes.
        EnvironmentProblem: The package `tokenizers` is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_package("a tokenizer for random weights", error) from error
    text = config.get_text_config(decoder=True)
    named = _named(config)
    free = [each for each in range(int(text.vocab_size)) if each not in named.values()]
    lacking = [role for role in _ROLES.values() if role not in named]
    if len(free) < _BYTES + len(lacking):
        raise UsageError(
            f"model.config: vocab_size is {text.vocab_size}, of which {len(named)} are special tokens; a byte "
            f"tokenizer requires {_BYTES + len(lacking)} more than these; set vocab_size to {len(named) + MOST_TOKENS}"
        )
    rest = iter(free)
    for key, role in _ROLES.items():
        if role in lacking:
            named[role] = next(rest)
            setattr(text, f"{key}_token_id", named[role])
    symbols = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), rest, strict=False))
    tokenizer = Tokenizer(models.BPE(vocab={**named, **symbols}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        extra_special_tokens=[each for each in named if each not in _ROLES.values()], chat_template=_TEMPLATE,
    )  # fmt: skip


def _named(config: Any) -> dict[str, int]:
    """Return the ids of the special tokens that a config names, by token; `image_token_id` becomes <image>."""
    found: dict[str, int] = {}
    known: set[int] = set()
    text = config.get_text_config(decoder=True)
    for part in (text, *parts(config)):  # the text part first: it determines padding, begin and end
        for key, value in sorted(vars(part).items()):
            for ending in ("_token_id", "_token_index", "_token_ids", "_bos_id", "_eos_id"):
                if not key.endswith(ending):
                    continue
                ids = value if isinstance(value, list | tuple) else [value]
                ids = [each for each in ids if isinstance(each, int) and 0 <= each < text.vocab_size]
                for at, each in enumerate(ids):
                    name = f"<{key.removesuffix(ending)}>" if not at else f"<{key.removesuffix(ending)}_{at}>"
                    if each not in known and name not in found:
                        found[name] = each
                        known.add(each)
                break
    return found
