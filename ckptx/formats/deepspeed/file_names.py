"""Names of the files that DeepSpeed's engine saves.

    latest                                                  name of the newest directory, as text
    global_step1000/
      mp_rank_00_model_states.pt                            stages 0 to 2: the weights of tensor parallel rank 0
      zero_pp_rank_3_mp_rank_00_model_states.pt             stage 3: buffers and frozen parameters of data rank 3
      bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt        stages 1 to 3: masters and moments of data rank 3

    latest_universal                                        name of the newest universal checkpoint
    global_step1000_universal/                              made by `ds_to_universal`
      mp_rank_00_model_states.pt, ...                       copies of the model states
      zero/optimizer_state.pt                               settings of the optimizer
      zero/model.norm.weight/fp32.pt                        the fp32 master of one parameter
      zero/model.norm.weight/exp_avg.pt                     tensors of the optimizer for it: exp_avg, exp_avg_sq, step

The number after `mp_rank_` is the rank of tensor parallelism: each of these ranks has all of the files above. The files
of the optimizer begin with `bf16_` if bf16 is enabled, and with `fp16_` in older releases.

Source: `deepspeed/runtime/engine.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
UNIVERSAL_DIRECTORY = "zero"
# Files next to the directories of steps, which would be wrong next to converted weights.
COMPANIONS = frozenset({LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py"})
_PARAMETER_FILE = re.compile(rf"(?:[^/]+/)?{UNIVERSAL_DIRECTORY}/([^/]+)/([^/]+)\.pt")
_NUMBER = r"(0|[1-9]\d{0,5})"
_TP_RANK = r"(\d\d|[1-9]\d{2,4})"
_MODEL_FILE = re.compile(rf"mp_rank_{_TP_RANK}_model_states\.pt")
_RANK_FILE = re.compile(rf"((?:bf16_|fp16_)?)zero_pp_rank_{_NUMBER}_mp_rank_{_TP_RANK}_(model|optim)_states\.pt")


class ZeroFile(NamedTuple):
    """The parts of a file name of one data rank.

    Attributes:
        rank: Data parallel rank that wrote the file.
        kind: "model" or "optim".
        prefix: "", "bf16_" or "fp16_".
        name: The name.
        tp_rank: Tensor parallel rank that wrote the file.
    """

    rank: int
    kind: str
    prefix: str
    name: str
    tp_rank: int = 0


def model_file_name(tp_rank: int) -> str:
    """Return the name of the model states of a tensor parallel rank in stages 0 to 2."""
    return f"mp_rank_{tp_rank:02d}_model_states.pt"


MODEL_FILE = model_file_name(0)


def parse_zero_file(name: str) -> ZeroFile | None:
    """Return the parts of a file name of one data rank; None for any other name."""
    match = _RANK_FILE.fullmatch(name)
    return None if match is None else ZeroFile(int(match[2]), match[4], match[1], name, int(match[3]))


def is_model_file(name: str) -> bool:
    """Return True for the model states of one tensor parallel rank in stages 0 to 2."""
    return _MODEL_FILE.fullmatch(name) is not None


def tensor_parallel_rank(name: str) -> int:
    """Return the tensor parallel rank that wrote a file for which `is_deepspeed_file` is True."""
    match = _MODEL_FILE.fullmatch(name)
    if match is not None:
        return int(match[1])
    parsed = parse_zero_file(name)
    assert parsed is not None
    return parsed.tp_rank


def is_deepspeed_file(name: str) -> bool:
    """Return True for a file of a checkpoint without pipeline stages or experts."""
    return is_model_file(name) or parse_zero_file(name) is not None


def step_directory(names: Sequence[str]) -> str:
    """Return the directory of the model states among files of one step: empty, or with a slash at the end.

    At least one base name must be one for which `is_deepspeed_file` is True.
    """
    name = next(name for name in names if is_deepspeed_file(name.rpartition("/")[2]))
    return name[: name.rfind("/") + 1]


def is_parameter_file(name: str) -> bool:
    """Return True for a file of one parameter in a universal checkpoint, with or without the directory of the step."""
    return _PARAMETER_FILE.fullmatch(name) is not None


def parse_parameter_file(name: str) -> tuple[str, str] | None:
    """Return the parameter and the tensor, such as `fp32`, of a file in a universal checkpoint; None for others."""
    match = _PARAMETER_FILE.fullmatch(name)
    return None if match is None else (match[1], match[2])
