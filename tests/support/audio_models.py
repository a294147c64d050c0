"""Small models of every audio class, with the smallest settings that the class allows."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.support.models import VOCAB

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
}
GEMMA4 = {
    **TEXT, "head_dim": 8, "global_head_dim": 8, "layer_types": ["full_attention"], "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "num_global_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA4_AUDIO = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 24,
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 16, "default_output_length": 4,
}  # fmt: skip
GEMMA4_TOKENS = {
    "image_token_id": 99, "boi_token_id": 97, "eoi_token_id": 98, "video_token_id": 96, "audio_token_id": 95,
    "boa_token_id": 94, "eoa_token_index": 93,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
OMNI_TOKENS = {"image_token_id": 99, "video_token_id": 98, "vision_start_token_id": 96, "vision_end_token_id": 97}
OMNI_TOKENS |= {"audio_token_id": 95, "audio_start_token_id": 94, "audio_end_token_id": 93}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
GRANITE_ENCODER = {
    "input_dim": 8, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "output_dim": 6, "context_size": 8,
    "max_pos_emb": 16,
}  # fmt: skip
QFORMER = {
    "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "encoder_hidden_size": 32,
}  # fmt: skip
SPEECH = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip


class AudioModel(NamedTuple):
    """A small audio model.

    Attributes:
        classes: Names of the config class and the model class.
        settings: Settings of the config.
        unreached: Names of parameters of the audio encoder that no input reaches, without the prefix `model.`.
    """

    classes: tuple[str, str]
    settings: dict[str, Any]
    unreached: frozenset[str] = frozenset()


AUDIO_MODELS: dict[str, AudioModel] = {
    "audioflamingo3": AudioModel(
        ("AudioFlamingo3Config", "AudioFlamingo3ForConditionalGeneration"),
        {"text_config": TEXT, "audio_config": {**ENCODER, "max_source_positions": 16}, "audio_token_id": 99},
    ),
    "gemma3n": AudioModel(
        ("Gemma3nConfig", "Gemma3nForConditionalGeneration"),
        {
            "text_config": {
                **TEXT, "head_dim": 8, "intermediate_size": [48], "layer_types": ["full_attention"],
                "num_kv_shared_layers": 0, "laurel_rank": 4, "vocab_size_per_layer_input": 80,
                "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0], "pad_token_id": 0,
            },
            "audio_config": {
                "vocab_size": 11, "vocab_offset": 90, "input_feat_size": 8, "hidden_size": 32,
                "conf_num_attention_heads": 4, "conf_num_hidden_layers": 1, "sscp_conv_channel_size": [8, 4],
            },
            "vision_config": {"vocab_size": 10, "vocab_offset": 80, "hidden_size": 32},
            "audio_soft_tokens_per_image": 6, "audio_token_id": 91, "boa_token_id": 89, "eoa_token_id": 90,
            "image_token_id": 81, "boi_token_id": 88, "eoi_token_id": 80,
        },
    ),
    "gemma4": AudioModel(
        ("Gemma4Config", "Gemma4ForConditionalGeneration"),
        {"text_config": GEMMA4, "audio_config": GEMMA4_AUDIO, "vision_config": GEMMA4_VISION, **GEMMA4_TOKENS},
    ),
    "gemma4_unified": AudioModel(
        ("Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration"),
        {
            "text_config": {key: value for key, value in GEMMA4.items() if "per_layer" not in key},
            "audio_config": {"audio_embed_dim": 24},
            "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 16,
                              "output_proj_dims": 32},
            **GEMMA4_TOKENS,
        },
    ),
    "glmasr": AudioModel(
        ("GlmAsrConfig", "GlmAsrForConditionalGeneration"),
        {
            "text_config": TEXT, "audio_token_id": 99,
            "audio_config": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_mel_bins": 8},
        },
    ),
    "granite_speech": AudioModel(
        ("GraniteSpeechConfig", "GraniteSpeechForConditionalGeneration"),
        {
            "text_config": TEXT, "audio_token_index": 99, "has_lora_adapter": False,
            "encoder_config": GRANITE_ENCODER, "projector_config": QFORMER,
        },
    ),
    "granite_speech_plus": AudioModel(
        ("GraniteSpeechPlusConfig", "GraniteSpeechPlusForConditionalGeneration"),
        {
            "text_config": TEXT, "audio_token_index": 99, "has_lora_adapter": False,
            "encoder_config": {**GRANITE_ENCODER, "cat_hidden_layers": [1]},
            "projector_config": {**QFORMER, "encoder_hidden_size": 64},
        },
    ),
    "muse_spark": AudioModel(
        ("MuseSparkConfig", "MuseSparkForConditionalGeneration"),
        {
            "text_config": {**TEXT, "head_dim": 8, "mlp_layer_types": ["dense"], "layer_types": ["full_attention"],
                            "moe_intermediate_size": 24, "moe_hidden_size": 32, "num_local_experts": 4,
                            "num_experts_per_tok": 2},
            "vision_config": {"patch_size": 4, "num_attention_heads": 4, "num_hidden_layers": 1, "hidden_size": 32,
                              "intermediate_size": 48, "pos_emb_height": 4, "pos_emb_width": 4,
                              "max_position_embeddings": 16},
            "audio_config": {"patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1], "num_hidden_layers": 2,
                             "out_hidden_size": 32},
            "out_hidden_size": 128, "projector_hidden_size": 32, "image_token_id": 99, "video_token_id": 98,
            "audio_token_id": 97,
        },
    ),
    "musicflamingo": AudioModel(
        ("MusicFlamingoConfig", "MusicFlamingoForConditionalGeneration"),
        {
            "text_config": TEXT, "audio_token_id": 99, "audio_bos_token_id": 97, "audio_eos_token_id": 98,
            "audio_config": {**ENCODER, "max_source_positions": 16, "model_type": "audioflamingo3_encoder"},
        },
    ),
    "phi4_multimodal": AudioModel(
        ("Phi4MultimodalConfig", "Phi4MultimodalForCausalLM"),
        {
            **TEXT,
            "audio_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_blocks": 3, "num_attention_heads": 4,
                "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 16,
                "nemo_conv_channels": 8, "audio_token_id": 99,
            },
            "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                              "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "image_token_id": 98,
                              "crop_size": 28},
        },
        frozenset(  # another projection, for audio together with images
            f"embed_tokens_extend.audio_embed.{way}_proj_for_vision_speech.{leaf}"
            for way in ("up", "down") for leaf in ("weight", "bias")
        ),
    ),
    "qwen2_5_omni_thinker": AudioModel(
        ("Qwen2_5OmniThinkerConfig", "Qwen2_5OmniThinkerForConditionalGeneration"),
        {
            "text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": QWEN_VISION,
            "audio_config": {**ENCODER, "n_window": 10, "output_dim": 32, "max_source_positions": 16}, **OMNI_TOKENS,
        },
        frozenset({"audio_tower.audio_bos_eos_token.weight"}),  # the forward pass does not use it
    ),
    "qwen2_audio": AudioModel(
        ("Qwen2AudioConfig", "Qwen2AudioForConditionalGeneration"),
        {"text_config": TEXT, "audio_config": {**ENCODER, "max_source_positions": 16}, "audio_token_index": 99},
    ),
    "qwen3_asr": AudioModel(
        ("Qwen3ASRConfig", "Qwen3ASRForConditionalGeneration"),
        {
            "text_config": {**TEXT, "head_dim": 8}, "audio_token_id": 99, "timestamp_token_id": 98,
            "audio_config": {**ENCODER, "n_window": 20, "n_window_infer": 80, "output_dim": 32,
                             "downsample_hidden_size": 8},
        },
    ),
    "qwen3_omni_moe_thinker": AudioModel(
        ("Qwen3OmniMoeThinkerConfig", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        {
            "text_config": {**TEXT, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                            "moe_intermediate_size": 24, "rope_parameters": MROPE},
            "vision_config": QWEN_VISION,
            "audio_config": {**ENCODER, "output_dim": 32, "downsample_hidden_size": 8, "max_source_positions": 16},
            **OMNI_TOKENS,
        },
    ),
    "voxtral": AudioModel(
        ("VoxtralConfig", "VoxtralForConditionalGeneration"),
        {
            "text_config": {**TEXT, "head_dim": 8}, "audio_token_id": 99,
            "audio_config": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 16},
        },
    ),
    "voxtral_realtime": AudioModel(
        ("VoxtralRealtimeConfig", "VoxtralRealtimeForConditionalGeneration"),
        {
            "text_config": {**TEXT, "head_dim": 8},
            "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "num_mel_bins": 8, "head_dim": 8},
        },
    ),
    "moonshine": AudioModel(
        ("MoonshineConfig", "MoonshineForConditionalGeneration"),
        {
            "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
        },
    ),
    "moonshine_streaming": AudioModel(
        ("MoonshineStreamingConfig", "MoonshineStreamingForConditionalGeneration"),
        {
            **TEXT, "num_key_value_heads": 4,
            "encoder_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                               "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_windows": [[4, 2]]},
        },
    ),
    "speech_to_text": AudioModel(
        ("Speech2TextConfig", "Speech2TextForConditionalGeneration"),
        {**SPEECH, "input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 32,
         "max_target_positions": 32},
    ),
    "whisper": AudioModel(
        ("WhisperConfig", "WhisperForConditionalGeneration"),
        {**SPEECH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
    ),
    **{
        f"{stem}ForSpeechToText": AudioModel(
            (f"{stem}Config", f"{stem}ForSpeechToText"),
            {
                "vocab_size": VOCAB, "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1,
                "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
                "decoder_attention_heads": 4, "speech_encoder_layers": 1, "speech_encoder_attention_heads": 4,
                "speech_encoder_intermediate_size": 48, "feature_projection_input_dim": 16,
                "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "conv_depthwise_kernel_size": 3,
                "max_position_embeddings": 64, "max_source_positions": 64,
            },
        )
        for stem in ("SeamlessM4T", "SeamlessM4Tv2")
    },
    "SpeechT5ForSpeechToText": AudioModel(
        ("SpeechT5Config", "SpeechT5ForSpeechToText"),
        {
            "vocab_size": VOCAB, "hidden_size": 32, "encoder_layers": 1, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48, "decoder_layers": 1, "decoder_ffn_dim": 48, "decoder_attention_heads": 4,
            "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4, "max_text_positions": 32, "max_speech_positions": 64,
        },
        frozenset({"speecht5.encoder.prenet.masked_spec_embed"}),  # used only for masked positions in training
    ),
}  # fmt: skip
