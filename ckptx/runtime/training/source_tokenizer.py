"""Build a tokenizer for a model with random weights: bytes, special tokens of its config, and a chat template.

The tokenizer depends on the config only, and can encode any text. Stock transformers reads it.
"""

from __future__ import annotations

from typing import Any

from ckptx.errors import UsageError, missing_package
from ckptx.runtime.model.shrink_config import iter_configs

_BYTES = 256
# Tokens that a chat requires, even if the config does not name them.
_REQUIRED_TOKENS = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>"}
BYTE_VOCABULARY_SIZE = _BYTES + len(_REQUIRED_TOKENS)  # without other special tokens of a config

# `{% generation %}` marks the answer and its end token. There are no images in it: `Encoder` inserts their tokens.
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
        config: A `PreTrainedConfig`; its text config is changed in place if it lacks one of the three.

    Raises:
        UsageError: The vocabulary is too small for bytes.
        EnvironmentProblem: The package `tokenizers` is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_package("a tokenizer for random weights", error) from error
    text_config = config.get_text_config(decoder=True)
    special_tokens = _find_special_tokens(config)
    free_ids = [each for each in range(int(text_config.vocab_size)) if each not in special_tokens.values()]
    missing_tokens = [each for each in _REQUIRED_TOKENS.values() if each not in special_tokens]
    if len(free_ids) < _BYTES + len(missing_tokens):
        raise UsageError(
            f"model.config: vocab_size is {text_config.vocab_size}, of which {len(special_tokens)} are special tokens; "
            f"a byte tokenizer requires {_BYTES + len(missing_tokens)} more than these; set vocab_size to "
            f"{len(special_tokens) + BYTE_VOCABULARY_SIZE}"
        )
    remaining_ids = iter(free_ids)
    for key, token in _REQUIRED_TOKENS.items():
        if token in missing_tokens:
            special_tokens[token] = next(remaining_ids)
            setattr(text_config, f"{key}_token_id", special_tokens[token])
    symbols = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), remaining_ids, strict=False))
    tokenizer = Tokenizer(models.BPE(vocab={**special_tokens, **symbols}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        extra_special_tokens=[each for each in special_tokens if each not in _REQUIRED_TOKENS.values()],
        chat_template=_TEMPLATE,
    )  # fmt: skip


def _find_special_tokens(config: Any) -> dict[str, int]:
    """Return token -> id for the special tokens that a config names; `image_token_id` becomes <image>.

    The name of a second id under one key, as in a list of `eos_token_id`, ends with its index: <eos_1>.
    """
    special_tokens: dict[str, int] = {}
    known_ids: set[int] = set()
    text_config = config.get_text_config(decoder=True)
    # The text config is first, so that it determines padding, begin and end.
    for nested_config in (text_config, *iter_configs(config)):
        for key, value in sorted(vars(nested_config).items()):
            for ending in ("_token_id", "_token_index", "_token_ids", "_bos_id", "_eos_id"):
                if not key.endswith(ending):
                    continue
                token_ids = value if isinstance(value, list | tuple) else [value]
                token_ids = [each for each in token_ids if isinstance(each, int) and 0 <= each < text_config.vocab_size]
                for index, each in enumerate(token_ids):
                    name = f"<{key.removesuffix(ending)}>" if not index else f"<{key.removesuffix(ending)}_{index}>"
                    if each not in known_ids and name not in special_tokens:
                        special_tokens[name] = each
                        known_ids.add(each)
                break
    return special_tokens
