"""Trainers that know nothing of ckptx: each shipped script as it is, and with one line that is a known mistake.

    python benchmarks/trainers.py [--ram /dev/shm] [--results DIR] [NAME ...]

A row is one command, `ckptx robustness RECIPE`, on a copy of the recipes in which that line is changed. Nothing of a
script asks for ckptx, so what names the mistake is what lies in its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure import CKPTX, HERE, publish, table

from ckptx.robustness.foreign import SHIPPED

SCRIPTS = {"fsdp2_script": "fsdp2.py", "accelerate": "accelerate_loop.py", "transformers_trainer": "trainer.py"}


class Mistake(NamedTuple):
    """What is changed in a script.

    Attributes:
        says: What it is.
        edits: The text that is there once, and what stands there instead.
        phase: The phase that names it; a mistake in what no checkpoint holds shows at the end alone.
        oracles: Those that have to fail there; others may, as a step spreads a fault.
    """

    says: str
    edits: Sequence[tuple[str, str]]
    phase: str
    oracles: frozenset[str]


_EARLY = """    batches = iter(loader)  # it draws a random number, so it comes before random numbers are restored
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
_AGAIN, _END = "saved again", "resumed"

MISTAKES: dict[str, dict[str, Mistake]] = {
    "fsdp2_script": {
        "iterator": Mistake(
            "the iterator of the loader is made after random numbers were restored",
            [(_EARLY, _LATE)], _AGAIN, frozenset({"rng"}),
        ),
        "scheduler": Mistake(
            "the scheduler is not loaded",
            [('        self.scheduler.load_state_dict(state["scheduler"])\n', "")], _AGAIN, frozenset({"scheduler"}),
        ),
        "data": Mistake(
            "the place in the data is not loaded",
            [('        self.sampler.load_state_dict(state["sampler"])\n', "")], _AGAIN, frozenset({"batch"}),
        ),
        "optimizer": Mistake(
            "the optimizer is not set: `dcp.load` has filled its moments in place, its groups are new",
            [(_SET, _SET_MODEL)], _AGAIN, frozenset({"group", "rate"}),
        ),
    },
    "accelerate": {
        "iterator": Mistake(
            "a batch is looked at after `load_state`, through a loader without a generator of its own",
            [(_GENERATOR, ")\n    optimizer"), (_LOAD, _LOAD + "        next(iter(loader))\n")],
            _AGAIN, frozenset({"rng"}),
        ),
        "scheduler": Mistake(
            "the scheduler is not given to `prepare`, so that it is not saved",
            [(_PREPARED, "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")],
            _END, frozenset({"group", "rate"}),
        ),
        "data": Mistake(
            "`skip_first_batches` is forgotten",
            [("accelerator.skip_first_batches(loader, done) if done else loader", "loader")],
            _END, frozenset({"model", "moments"}),
        ),
        "optimizer": Mistake(
            "the state of the optimizer is thrown away after `load_state`",
            [(_LOAD, _LOAD + "        optimizer.optimizer.state.clear()\n")], _AGAIN, frozenset({"moments"}),
        ),
    },
    "transformers_trainer": {
        "iterator": Mistake(
            "random numbers are not restored",
            [(_TRAIN, "    trainer._load_rng_state = lambda checkpoint: None\n" + _TRAIN)], _END, frozenset({"rng"}),
        ),
        "scheduler": Mistake(
            "the schedule begins anew",
            [(
                _TRAIN,
                f"    load = {_LOADER}\n    {_LOADER} = lambda folder: (\n"
                '        load(folder), setattr(trainer.lr_scheduler, "last_epoch", 0)\n    )\n' + _TRAIN,
            )],
            _END, frozenset({"scheduler", "rate"}),
        ),
        "data": Mistake(
            "`ignore_data_skip`: the data begins anew",
            [("        seed=0,\n", "        seed=0,\n        ignore_data_skip=True,\n")],
            _END, frozenset({"model", "moments"}),
        ),
        "optimizer": Mistake(
            "optimizer and scheduler are not loaded",
            [(_TRAIN, f"    {_LOADER} = lambda folder: None\n" + _TRAIN)], _END, frozenset({"adam step", "moments"}),
        ),
    },
}  # fmt: skip

Row = dict[str, Any]


def main() -> None:
    """Runs the commands, and writes trainers.json and trainers.md; fails where one does not say what it has to."""
    names = [f"{recipe}:{which}" for recipe, found in MISTAKES.items() for which in ("none", *found)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all when left out")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(names)}")
    rows = []
    for name in arguments.names or names:
        with tempfile.TemporaryDirectory(dir=arguments.ram, prefix="ckptx-bench-") as directory:
            rows.append(judged(*name.split(":"), Path(directory)))
        print(f"  {name}: {_cells(rows[-1])}", file=sys.stderr, flush=True)
    columns = ("recipe", "mistake", "exit", "needed", "phases and oracles that fail", "seconds")
    title = "Trainers that know nothing of ckptx, as they are and with a mistake"
    publish(arguments.results, "trainers", {"rows": rows}, [table(title, columns, list(map(_cells, rows)))])
    raise SystemExit(not all(row["is_named"] for row in rows))


def judged(recipe: str, which: str, work: Path) -> Row:
    """One command, and what it said."""
    recipes = work / "recipes"
    shutil.copytree(SHIPPED, recipes)
    mistake = MISTAKES[recipe].get(which)
    script = recipes / "scripts" / SCRIPTS[recipe]
    text = script.read_text(encoding="utf-8")
    for old, new in mistake.edits if mistake is not None else ():
        if text.count(old) != 1:
            raise SystemExit(f"{recipe}, {which}: {old!r} stands {text.count(old)} times in {script.name}")
        text = text.replace(old, new)
    script.write_text(text, encoding="utf-8")
    command = [*CKPTX, "robustness", str(recipes / f"{recipe}.yaml"), "--out", str(work / "out"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"{recipe}, {which}: exit {ended.returncode}: {ended.stderr[-2000:]}")
    report = json.loads(ended.stdout)
    failed = {
        phase["name"]: [each["name"] for each in phase["oracles"] if not each["ok"]]
        for phase in report["phases"]
        if phase["ok"] is False
    }
    if mistake is None:
        is_named = ended.returncode == 0 and not failed
    else:
        is_named = ended.returncode == 1 and mistake.oracles <= set(failed.get(mistake.phase, ()))
    return {
        "recipe": recipe, "mistake": which, "says": mistake.says if mistake is not None else "as it is",
        "needed": f"{mistake.phase}: {', '.join(sorted(mistake.oracles))}" if mistake is not None else "",
        "exit": ended.returncode, "failed": failed, "is_named": is_named, "seconds": report["seconds"],
    }  # fmt: skip


def _cells(row: Row) -> Sequence[str]:
    failed = "; ".join(f"{phase}: {', '.join(oracles)}" for phase, oracles in row["failed"].items())
    return row["recipe"], row["says"], str(row["exit"]), row["needed"], failed, f"{row['seconds']:.0f}"


if __name__ == "__main__":
    main()
