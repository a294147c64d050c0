"""Checkpoints with the names of many trainers, and what each state in them is: a table that ckptx has no part in."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

RANKS = 3
Tree = dict[str, Any]


def states() -> Tree:
    """Return what a run of three ranks has after a step, without names of any trainer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("embed", torch.nn.Linear(4, 3))
    model.add_module("norm", torch.nn.BatchNorm1d(3))
    model.add_module("head", torch.nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.rand(4, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    return {
        "model": weights,
        "ema": {name: value * 0.5 if value.is_floating_point() else value.clone() for name, value in weights.items()},
        "moments": {names[number]: copy.deepcopy(each) for number, each in state["state"].items()},
        "group": {
            key: value for key, value in state["param_groups"][0].items() if key not in ("params", "param_names")
        },
        "master": {name: value.double() for name, value in model.state_dict().items() if name in names},
        "scheduler": {**scheduler.state_dict()},
        "rng": [_random(rank) for rank in range(RANKS)],
        "step": 3,
        "epoch": 1,
        "samples": 24,
        "sampler": {"epoch": 1, "position": 8},
        "clock": {"done": 3, "tilt": [1, 2]},
    }


def _random(rank: int) -> Tree:
    return {
        "python": random.Random(rank).getstate(),
        "numpy": np.random.RandomState(rank).get_state(),
        "torch": torch.Generator().manual_seed(rank).get_state(),
        "cuda": torch.tensor([rank + 1] + [0] * 15, dtype=torch.uint8),
    }


# ------------------------------------------------------------------------------------------------------------ changes


def _change_moments(found: Tree) -> None:
    for each in found["moments"].values():
        each["exp_avg"] += 1


def _change_adam_step(found: Tree) -> None:
    for each in found["moments"].values():
        each["step"] = torch.zeros_like(each["step"])


def _change_rng(found: Tree) -> None:
    for rank in range(1, RANKS):
        found["rng"][rank]["torch"] = torch.Generator().manual_seed(100 + rank).get_state()


def _change_python(found: Tree) -> None:
    for rank in range(RANKS):
        found["rng"][rank]["python"] = random.Random(100 + rank).getstate()


CHANGES: Mapping[str, Callable[[Tree], None]] = {
    "model": lambda found: found["model"]["embed.weight"].add_(1),
    "ema": lambda found: found["ema"]["head.weight"].add_(1),
    "moments": _change_moments,
    "master": lambda found: found["master"]["head.weight"].add_(1),
    "adam step": _change_adam_step,
    "lr": lambda found: found["group"].update(lr=5e-4),
    "weight decay": lambda found: found["group"].update(weight_decay=0.0),
    "scheduler": lambda found: found["scheduler"].update(last_epoch=0),
    "rng": _change_rng,
    "python rng": _change_python,
    "step": lambda found: found.update(step=0),
    "epoch": lambda found: found.update(epoch=0),
    "samples": lambda found: found.update(samples=0),
    "sampler": lambda found: found["sampler"].update(position=0),
    "sampler epoch": lambda found: found["sampler"].update(epoch=0),
    "clock": lambda found: found["clock"].update(done=0),
}

# What each state is in every style: the oracles that fail, and what the sentence about it says.
ORACLES: Mapping[str, frozenset[str]] = {
    "model": frozenset({"model"}),
    "ema": frozenset({"second model"}),
    "moments": frozenset({"moments"}),
    "master": frozenset({"master weights"}),
    "adam step": frozenset({"adam step"}),
    "lr": frozenset({"param groups", "learning rate"}),
    "weight decay": frozenset({"param groups"}),
    "scheduler": frozenset({"scheduler"}),
    "rng": frozenset({"rng"}),
    "python rng": frozenset({"rng"}),
    "step": frozenset({"step"}),
    "epoch": frozenset({"epoch"}),
    "samples": frozenset({"samples"}),
    "sampler": frozenset({"batch"}),
    "sampler epoch": frozenset({"batch"}),
    "clock": frozenset({"other"}),
}
SENTENCES: Mapping[str, str] = {
    "model": r"parameter values differ \(1 of \d+: \S*embed\.weight\); possible causes: ",
    "ema": r'second model under "\S+" \(an EMA, for example\): not restored .*head',
    "moments": r"optimizer state \(exp_avg\) differs ",
    "master": r"master weight values differ ",
    "adam step": r"step counts of the optimizer differ .*1\.0 in the reference, 0\.0 after the resume",
    "lr": r"learning rate differs \(0\.00097\d+ in the reference, 0\.0005 after the resume\); possible causes: ",
    "weight decay": r"weight decay differs \(0\.1 in the reference, 0\.0 after the resume\); possible causes: ",
    "scheduler": r"scheduler state differs \(\S*last_epoch: 1 in the reference, 0 after the resume",
    "rng": r"RNG state differs on ranks 1-2 .*restored on rank 0 only.*iter\(loader\)",
    "python rng": r"RNG state differs on ranks 0-2 .*: it was not restored",
    "step": r"step counter differs \([^;]+: 3 in the reference, 0 after the resume",
    "epoch": r"epoch counter differs \([^;]+: 1 in the reference, 0 after the resume",
    "samples": r"count of samples or tokens differs \([^;]+: 24 in the reference, 0 after the resume",
    "sampler": r"data position differs ",
    "sampler epoch": r"sampler epoch differs \([^;]+: 1 in the reference, 0 after the resume",
    "clock": r'other: state under "\S+" was not restored as it was saved \(\S*done: 3 in the reference, 0 after',
}

# ------------------------------------------------------------------------------------------------------------- styles


class Style(NamedTuple):
    """Names of a trainer.

    Attributes:
        write: Writes a checkpoint below a folder.
        has: The states that it stores; each can be changed by itself.
        second: Word that a copy of the model lies under.
        unknown: Word that state without a known name lies under.
    """

    write: Callable[[Path, Tree], None]
    has: tuple[str, ...]
    second: str = ""
    unknown: str = ""


_OPTIMIZER = ("moments", "adam step", "lr", "weight decay")


def numbered(found: Tree) -> Tree:
    """Return the state of an optimizer as torch has it: parameters by number."""
    return {
        "state": dict(enumerate(found["moments"].values())),
        "param_groups": [{**found["group"], "params": [*range(len(found["moments"]))]}],
    }


def named(found: Tree) -> Tree:
    """Return the state of an optimizer as get_optimizer_state_dict has it: parameters by name."""
    return {"state": found["moments"], "param_groups": [{**found["group"], "params": [*found["moments"]]}]}


def _dcp(tree: Tree, folder: Path) -> None:
    dcp.save(tree, checkpoint_id=folder, no_dist=True)


def _torchtitan(folder: Path, found: Tree) -> None:
    """Of torchtitan 0.2: parameters without a root, the optimizer flattened by parameter, a loader in bytes."""
    optimizer: Tree = {}
    for name, each in found["moments"].items():
        optimizer |= {f"state.{name}.{key}": value for key, value in each.items()}
        optimizer |= {f"param_groups.{name}.{key}": value for key, value in found["group"].items()}
    _dcp(
        {
            **found["model"],
            "optimizer": optimizer,
            "lr_scheduler": found["scheduler"],
            "train_state": {"step": torch.tensor(found["step"], dtype=torch.int32), "ntokens_seen": found["samples"]},
            "dataloader": {"dp_rank_0": pickle.dumps(found["sampler"]), "world_size": 1},
        },
        folder,
    )


def _accelerate(folder: Path, found: Tree) -> None:
    save_file(found["model"], folder / "model.safetensors")
    torch.save(numbered(found), folder / "optimizer.bin")
    torch.save(found["scheduler"], folder / "scheduler.bin")
    torch.save(found["sampler"], folder / "sampler.bin")
    torch.save(found["clock"], folder / "custom_checkpoint_0.pkl")
    for rank, each in enumerate(found["rng"]):
        state = {
            "step": found["step"],
            "random_state": each["python"],
            "numpy_random_seed": each["numpy"],
            "torch_manual_seed": each["torch"],
            "torch_cuda_manual_seed": [each["cuda"]],
        }
        torch.save(state, folder / f"random_states_{rank}.pkl")


def _transformers(folder: Path, found: Tree) -> None:
    save_file(found["model"], folder / "model.safetensors")
    torch.save(numbered(found), folder / "optimizer.pt")
    torch.save(found["scheduler"], folder / "scheduler.pt")
    for rank, each in enumerate(found["rng"]):
        state = {"python": each["python"], "numpy": each["numpy"], "cpu": each["torch"], "cuda": each["cuda"]}
        torch.save(state, folder / f"rng_state_{rank}.pth")
    trainer = {
        "global_step": found["step"], "epoch": found["epoch"], "num_input_tokens_seen": found["samples"],
        "best_metric": None, "stateful_callbacks": {"Own": {"attributes": found["clock"]}},
    }  # fmt: skip
    (folder / "trainer_state.json").write_text(json.dumps(trainer))


def _deepspeed(folder: Path, found: Tree) -> None:
    """Of DeepSpeed with ZeRO 1: parameters below `module`, flat state of the optimizer in a file for each rank."""
    folder = folder / "global_step3"
    folder.mkdir()
    torch.save(
        {
            "module": found["model"], "lr_scheduler": found["scheduler"], "global_steps": found["step"],
            "global_samples": found["samples"], "skipped_steps": 0, "dp_world_size": 1, "ds_version": "0.16",
            "ds_config": {"optimizer": {"type": "AdamW"}, "train_batch_size": 8}, "clock": found["clock"],
        },
        folder / "mp_rank_00_model_states.pt",
    )  # fmt: skip
    each = found["moments"].values()
    flat = {key: torch.cat([state[key].flatten() for state in each]) for key in ("exp_avg", "exp_avg_sq")}
    step = next(iter(each))["step"]
    state = {
        "loss_scaler": None,
        "zero_stage": 1,
        "base_optimizer_state": {"state": {0: {**flat, "step": step}}, "param_groups": [found["group"]]},
        "single_partition_of_fp32_groups": [torch.cat([value.flatten() for value in found["master"].values()])],
    }
    torch.save({"optimizer_state_dict": state}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def _lightning(folder: Path, found: Tree) -> None:
    torch.save(
        {
            "epoch": found["epoch"],
            "global_step": found["step"],
            "pytorch-lightning_version": "2.5",
            "state_dict": {f"model.{name}": value for name, value in found["model"].items()},
            "loops": {
                "fit_loop": {
                    "epoch_loop.batch_progress": {"total": {"ready": 3, "completed": 3}},
                    "epoch_loop.manual_optimization.optim_step_progress": {"total": {"ready": 0}},
                    "epoch_progress": {"total": {"ready": 1}},
                }
            },
            "callbacks": {"Clock": found["clock"]},
            "optimizer_states": [numbered(found)],
            "lr_schedulers": [found["scheduler"]],
            "hyper_parameters": {"lr": 1e-3, "optimizer": {"name": "adamw"}, "steps": 10},
        },
        folder / "last.ckpt",
    )


def _plain(folder: Path, found: Tree) -> None:
    """Everything in one file, whose name is that of the model."""
    torch.save(
        {
            "model": found["model"], "optimizer": numbered(found), "scheduler": found["scheduler"],
            "ema_model": {"module": found["ema"], "n_averaged": torch.tensor(1)}, "step": found["step"],
            "epoch": found["epoch"], "rng": {f"rank{rank}": each for rank, each in enumerate(found["rng"])},
            "sampler": found["sampler"], "clock": found["clock"],
        },
        folder / "model.pt",
    )  # fmt: skip


def _own(found: Tree) -> Tree:
    return {
        "net": found["model"],
        "opt": named(found),
        "shadow": found["ema"],
        "noise": {f"rank{rank}": each for rank, each in enumerate(found["rng"])},
        "clock": {**found["clock"], "step": found["step"]},
        "feed": found["sampler"],
        "warm": found["scheduler"],
    }


def _own_in_dcp(folder: Path, found: Tree) -> None:
    _dcp(_own(found), folder)


def _own_in_a_file(folder: Path, found: Tree) -> None:
    torch.save(_own(found), folder / "snapshot.pt")


def _own_below_one_object(folder: Path, found: Tree) -> None:
    _dcp({"everything": _own(found)}, folder)


def _strange(found: Tree, optimizer: Tree) -> Tree:
    """Return state under words that no list has."""
    return {
        "zebra": found["model"],
        "adamant": optimizer,
        "polar": found["ema"],
        "dice": list(found["rng"]),
        "tick": found["clock"],
        "trail": found["sampler"],
        "slope": found["scheduler"],
        "precise": {"fp32_params": found["master"]},
    }


def _strange_by_name(folder: Path, found: Tree) -> None:
    _dcp(_strange(found, named(found)), folder)


def _strange_by_number(folder: Path, found: Tree) -> None:
    torch.save(_strange(found, numbered(found)), folder / "all.pt")


def _reversed(folder: Path, found: Tree) -> None:
    """What the optimizer keeps lies in front of the names of parameters, settings in groups of their own."""
    moments = found["moments"]
    kept: Tree = {key: {name: each[key] for name, each in moments.items()} for key in ("exp_avg", "exp_avg_sq")}
    kept["step"] = next(iter(moments.values()))["step"]
    kept["groups"] = [found["group"]]
    _dcp(_strange(found, kept), folder)


def _ranks_in_files(folder: Path, found: Tree) -> None:
    """A file for each rank with its RNG states under their plain names; parameters without a root."""
    _dcp({**found["model"], "adamant": named(found), "precise": {"master": found["master"]}}, folder)
    for rank, each in enumerate(found["rng"]):
        torch.save({**each, "tick": found["clock"]}, folder / f"own_rank{rank}.pt")


_STRANGE = (
    "model",
    "ema",
    *_OPTIMIZER,
    "master",
    "scheduler",
    "rng",
    "python rng",
    "sampler",
    "sampler epoch",
    "clock",
)
STYLES: Mapping[str, Style] = {
    "torchtitan": Style(_torchtitan, ("model", *_OPTIMIZER, "scheduler", "step", "samples", "sampler")),
    "accelerate": Style(
        _accelerate,
        ("model", *_OPTIMIZER, "scheduler", "rng", "python rng", "step", "clock"),
        unknown="done",
    ),
    "transformers": Style(
        _transformers,
        ("model", *_OPTIMIZER, "scheduler", "rng", "python rng", "step", "epoch", "samples", "clock"),
        unknown="trainer_state.stateful_callbacks",
    ),
    "deepspeed": Style(
        _deepspeed, ("model", *_OPTIMIZER, "master", "scheduler", "step", "samples", "clock"), unknown="clock"
    ),
    "lightning": Style(_lightning, ("model", *_OPTIMIZER, "scheduler", "step", "epoch", "clock"), unknown="callbacks"),
    "plain torch": Style(
        _plain,
        ("model", "ema", *_OPTIMIZER, "scheduler", "rng", "python rng", "step", "epoch", "sampler", "clock"),
        "model.ema_model",
        "model.clock",
    ),
    "own names, DCP": Style(
        _own_in_dcp,
        ("model", "ema", *_OPTIMIZER, "scheduler", "rng", "python rng", "step", "sampler", "sampler epoch", "clock"),
        "shadow",
        "clock",
    ),
    "own names, file": Style(
        _own_in_a_file,
        ("model", "ema", *_OPTIMIZER, "scheduler", "rng", "python rng", "step", "sampler", "sampler epoch", "clock"),
        "shadow",
        "clock",
    ),
    "own names below one object": Style(
        _own_below_one_object,
        ("model", "ema", *_OPTIMIZER, "scheduler", "rng", "python rng", "step", "sampler", "sampler epoch", "clock"),
        "everything.shadow",
        "everything.clock",
    ),
    "strange names": Style(_strange_by_name, _STRANGE, "polar", "tick"),
    "strange names, parameters by number": Style(_strange_by_number, _STRANGE, "polar", "tick"),
    "strange names, parameters last": Style(_reversed, _STRANGE, "polar", "tick"),
    "strange names, a file for each rank": Style(
        _ranks_in_files, ("model", *_OPTIMIZER, "master", "rng", "python rng", "clock"), unknown="tick"
    ),
}
