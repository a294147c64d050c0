"""Mistakes in the trainer scripts that `ckptx robustness` ships recipes for; each changes one or two lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SCRIPTS = {"fsdp2_script": "fsdp2.py", "accelerate": "accelerate_loop.py", "transformers_trainer": "trainer.py"}


class Mistake(NamedTuple):
    """A mistake in a trainer script.

    Attributes:
        description: Description of the mistake.
        edits: Pairs of a string that occurs once in the script, and its replacement.
        phase: Phase that detects it. If no checkpoint contains the state, only the end of the run shows it.
        oracles: Oracles that must fail in that phase; others may fail too, because a training step spreads a fault.
        cause: Regular expression that the reported cause must match, unless it is "unknown"; "" matches every cause.
    """

    description: str
    edits: Sequence[tuple[str, str]]
    phase: str
    oracles: frozenset[str]
    cause: str = ""

    def matches_cause(self, cause: str) -> bool:
        """Return True if a reported cause is the right one, or is reported as unknown."""
        return cause.startswith("unknown") or re.search(self.cause, cause) is not None


_EARLY = """    batches = iter(loader)  # draws a random number, so create it before the generators are restored
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=args.resume)
"""
_LATE = """    if args.resume:
        dcp.load({"app": app}, checkpoint_id=args.resume)
    batches = iter(loader)
"""
_SET = 'set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])'
_SET_MODEL = 'torch.distributed.checkpoint.state_dict.set_model_state_dict(self.model, state["model"])'
_LOAD = "        accelerator.load_state(args.resume)\n"
_PREPARED = "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)"
_GENERATOR = ", generator=torch.Generator().manual_seed(1))\n    optimizer"
_TRAIN = "    trainer.train("
_LOADER = "trainer._load_optimizer_and_scheduler"
_SAVED, _RESUMED = "load and save", "resumed"

MISTAKES: dict[str, dict[str, Mistake]] = {
    "fsdp2_script": {
        "iterator": Mistake(
            "the iterator of the loader is made after random numbers were restored",
            [(_EARLY, _LATE)], _SAVED, frozenset({"rng"}),
        ),
        "scheduler": Mistake(
            "the scheduler is not loaded",
            [('        self.scheduler.load_state_dict(state["scheduler"])\n', "")], _SAVED, frozenset({"scheduler"}),
        ),
        "data": Mistake(
            "the place in the data is not loaded",
            [('        self.sampler.load_state_dict(state["sampler"])\n', "")], _SAVED, frozenset({"batch"}),
        ),
        "optimizer": Mistake(
            "the optimizer is not set: `dcp.load` has filled its moments in place, its groups are new",
            [(_SET, _SET_MODEL)], _SAVED, frozenset({"param groups", "learning rate"}),
        ),
    },
    "accelerate": {
        "iterator": Mistake(
            "a batch is looked at after `load_state`, through a loader without a generator of its own",
            [(_GENERATOR, ")\n    optimizer"), (_LOAD, _LOAD + "        next(iter(loader))\n")],
            _SAVED, frozenset({"rng"}),
        ),
        "scheduler": Mistake(
            "the scheduler is not given to `prepare`, so that it is not saved",
            [(_PREPARED, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")],
            _RESUMED, frozenset({"param groups", "learning rate"}),
        ),
        "data": Mistake(
            "`skip_first_batches` is forgotten",
            [("accelerator.skip_first_batches(loader, batches_done) if batches_done else loader", "loader")],
            _RESUMED, frozenset({"model", "moments"}),
        ),
        "optimizer": Mistake(
            "the state of the optimizer is thrown away after `load_state`",
            [(_LOAD, _LOAD + "        optimizer.optimizer.state.clear()\n")], _SAVED, frozenset({"moments"}),
        ),
    },
    "transformers_trainer": {
        "iterator": Mistake(
            "random numbers are not restored",
            [(_TRAIN, "    trainer._load_rng_state = lambda checkpoint: None\n" + _TRAIN)],
            _RESUMED, frozenset({"rng"}),
        ),
        "scheduler": Mistake(
            "the schedule begins anew",
            [(
                _TRAIN,
                f"    load = {_LOADER}\n    {_LOADER} = lambda folder: (\n"
                '        load(folder), setattr(trainer.lr_scheduler, "last_epoch", 0)\n    )\n' + _TRAIN,
            )],
            _RESUMED, frozenset({"scheduler", "learning rate"}),
        ),
        "data": Mistake(
            "`ignore_data_skip`: the data begins anew",
            [("        seed=0,\n", "        seed=0,\n        ignore_data_skip=True,\n")],
            _RESUMED, frozenset({"model", "moments"}),
        ),
        "optimizer": Mistake(
            "optimizer and scheduler are not loaded",
            [(_TRAIN, f"    {_LOADER} = lambda folder: None\n" + _TRAIN)],
            _RESUMED, frozenset({"adam step", "moments"}),
        ),
    },
}  # fmt: skip


def inject(recipe: str, mistake: Mistake, recipes: Path) -> None:
    """Make the edits of a mistake in the script of a recipe, in a copy of the directory of recipes.

    Raises:
        ValueError: If a string to replace does not occur exactly once.
    """
    inject_into(recipes / "scripts" / SCRIPTS[recipe], mistake)


def inject_into(script: Path, mistake: Mistake) -> None:
    """Make the edits of a mistake in a copy of a script.

    Raises:
        ValueError: If a string to replace does not occur exactly once.
    """
    text = script.read_text(encoding="utf-8")
    for old, new in mistake.edits:
        if text.count(old) != 1:
            raise ValueError(f"{script.name}: expected {old!r} once, found it {text.count(old)} times")
        text = text.replace(old, new)
    script.write_text(text, encoding="utf-8")
