"""Write models of `fixtures/megatron/`: each as a Hugging Face checkpoint and as megatron-core saves it.

    pip install --target build/judges --no-deps megatron-core==0.16.1 einops
    PYTHONPATH=.:build/judges python tools/build_megatron_models.py

`hf/` has random weights; `torch_dist/` has the same weights in Megatron's layout, by formulas in torch operations,
saved on two ranks. The script does not use ckptx, and runs without a GPU.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from tests.support.megatron_models import config_of, save_model, write_with_megatron

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "megatron"
# Directory -> class, settings of the config, TP, PP, and how layers are stored.
MODELS = {
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 16, "head_dim": 4, "num_hidden_layers": 2}, 2, 1, "stacked"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 2, "num_experts": 2}, 1, 2, "layers"),
}


def main() -> None:
    """Write every model."""
    for name, (class_name, settings, tp, pp, style) in MODELS.items():
        shutil.rmtree(FIXTURES / name, ignore_errors=True)
        save_model(FIXTURES / name / "hf", config_of(class_name, **settings))
        write_with_megatron(FIXTURES / name / "hf", FIXTURES / name / "torch_dist", tp=tp, pp=pp, style=style)
        forget_path(FIXTURES / name / "torch_dist")


def forget_path(checkpoint: Path) -> None:
    """Replace the path of this machine, which torch records in `.metadata`."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    assert metadata.storage_meta is not None
    metadata.storage_meta.checkpoint_id = checkpoint.name
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


if __name__ == "__main__":
    main()
