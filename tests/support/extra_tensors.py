"""Names of extra tensors that checkpoints may contain and a class does not have, by their kind in the table."""

from __future__ import annotations

Shape = tuple[int, ...]

# Names in checkpoints, in addition to the tensors of a tiny Llama.
EXAMPLES: dict[str, list[tuple[str, Shape]]] = {
    "rotary buffer": [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,)),
        ("model.rotary_emb.inv_freq", (4,)),
        ("model.rotary_emb.sliding_attention_inv_freq", (4,)),
        ("model.layers.0.self_attn.rotary_emb.cos_cached", (1, 1, 8, 4)),
        ("transformer.rotary_pos_emb.inv_freq", (4,)),
    ],
    "causal mask": [
        ("model.layers.0.self_attn.bias", (1, 1, 8, 8)),
        ("transformer.h.0.attn.attention.bias", (1, 1, 8, 8)),
        ("transformer.h.0.attn.causal_mask", (1, 1, 8, 8)),
    ],
    "value of masked scores": [
        ("model.layers.0.self_attn.masked_bias", ()),
        ("transformer.h.0.attn.masked_bias", ()),
    ],
    "ids": [("model.embeddings.position_ids", (1, 8)), ("model.layers.0.token_type_ids", (1, 8))],
    "table of positions": [
        ("model.layers.0.self_attn.relative_position_index", (8, 8)),
        ("model.embed_positions.weights", (8, 4)),
        ("model.embed_positions._float_tensor", (1,)),
    ],
    "version": [("model.decoder.version", (1,)), ("model.layers.0.version", ())],
    "MTP layer": [
        ("mtp.fc.weight", (2, 2)),
        ("mtp.layers.0.self_attn.q_norm.weight", (2,)),
        ("model.mtp_layers.0.self_attn.q_norm.weight", (2,)),
        ("model.mtp_block.0.mlp.up_proj.weight", (2, 2)),
    ],
    "extra state": [("model.layers.0.self_attn.q_proj._extra_state", (8,))],
    "packed weight": [
        (f"model.layers.0.self_attn.q_proj.{leaf}", (2, 2))
        for leaf in (
            "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_scale",
            "weight_scale_inv", "weight_scale_2", "weight_zero_point", "weight_global_scale", "SCB", "weight_format",
            "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.quant_state.bitsandbytes__nf4",
            "codes", "codebooks",
        )
    ],
    "scale of a parameter": [
        ("model.layers.0.mlp.up_proj.weight_blocks", (2, 2)),
        ("model.layers.0.mlp.up_proj.weight_scales", (2, 2)),
        ("model.layers.0.mlp.up_proj.scale", (2, 2)),
    ],
    "scale of activations": [
        ("model.layers.0.self_attn.k_scale", ()),
        ("model.layers.0.self_attn.k_proj.k_scale", ()),
        ("model.layers.0.self_attn.kv_scale", ()),
        ("model.layers.0.self_attn.q_proj.input_scale", ()),
        ("model.layers.0.self_attn.q_proj.input_quantizer._amax", ()),
        ("model.layers.0.mlp.act.scales", (2,)),
    ],
}  # fmt: skip
