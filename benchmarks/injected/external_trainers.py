"""Third-party trainers that do not use ckptx, and one-line mistakes in each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.injected.trainers import Mistake

EXTERNAL = Path(__file__).with_name("external")
SCRIPTS = {"mesh": "mesh.py", "accumulation": "accumulation.py", "averaged": "averaged.py"}
_SAVED, _RESUMED = "load and save", "resumed"


def _set(*oracles: str) -> frozenset[str]:
    return frozenset(oracles)


# `phase` is the first one that fails. The reported cause must match the expression or be "unknown".
MISTAKES: Mapping[str, Mapping[str, Mistake]] = {
    "mesh": {
        "optimizer": Mistake(
            "the optimizer is not set; `dcp.load` has filled its moments in place",
            [('        set_optimizer_state_dict(net, opt, loaded["opt"])\n', "")],
            _SAVED, _set(), "optimizer|learning rate|group",
        ),
        "scheduler": Mistake(
            "the schedule is not restored",
            [('        pace.load_state_dict(loaded["pace"])\n', "")], _SAVED, _set(), "schedul",
        ),
        "rng": Mistake(
            "random numbers of rank 0 are restored on all ranks",
            [(
                'torch.set_rng_state(loaded["dice"][f"rank{rank}"])',
                'dist.broadcast(loaded["dice"][f"rank{rank}"], 0); torch.set_rng_state(loaded["dice"][f"rank{rank}"])',
            )],
            _SAVED, _set(), "random numbers|RNG",
        ),
        "rate": Mistake(
            "the learning rate is set from the configuration again",
            [(
                '        clock = loaded["clock"]\n',
                '        clock = loaded["clock"]; opt.param_groups[0]["lr"] = RATE\n',
            )],
            _SAVED, _set(), "learning rate",
        ),
        "betas": Mistake(
            "other betas are set after the optimizer was restored",
            [(
                '        clock = loaded["clock"]\n',
                '        clock = loaded["clock"]; opt.param_groups[0]["betas"] = (0.9, 0.999)\n',
            )],
            _SAVED, _set(), "betas|hyperparameter|param_groups|parameter group",
        ),
        "early weights": Mistake(
            "weights are saved before the step of the optimizer",
            [
                ("        opt.step()\n", ""),
                ("            saved = clock\n", "            saved = clock\n        opt.step()\n"),
            ],
            _RESUMED, _set(), "before|step",
        ),
    },
    "accumulation": {
        "scheduler": Mistake(
            "the schedule is not given to `prepare`, so that it is not saved",
            [(
                "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )],
            _RESUMED, _set("param groups", "learning rate"), "schedul|learning rate",
        ),
        "counter": Mistake(
            "the count of accumulated batches is not restored",
            [('        self.batch = state["batch"]\n', "")], _SAVED, _set(), "data|batch|counter|samples",
        ),
        "weight decay": Mistake(
            "weight decay is set from a configuration that has changed",
            [(
                "        accelerator.load_state(args.source)\n",
                '        accelerator.load_state(args.source); optimizer.param_groups[0]["weight_decay"] = 0.01\n',
            )],
            _SAVED, _set("param groups"), "weight decay|weight_decay|hyperparameter|param_groups|parameter group",
        ),
        "data": Mistake(
            "batches that were seen are not skipped",
            [("accelerator.skip_first_batches(loader, counter.batch)", "loader")],
            _RESUMED, _set("model"), "data|batch|samples",
        ),
        "early schedule": Mistake(
            "the checkpoint is saved before the step of the schedule",
            [
                ("            scheduler.step()\n", ""),
                (
                    "            if counter.step == args.steps:\n",
                    "            scheduler.step()\n            if counter.step == args.steps:\n",
                ),
            ],
            _RESUMED, _set(), "schedul|learning rate|before",
        ),
        "optimizer": Mistake(
            "the state of the optimizer is thrown away after `load_state`",
            [(
                "        accelerator.load_state(args.source)\n",
                "        accelerator.load_state(args.source); optimizer.optimizer.state.clear()\n",
            )],
            _SAVED, _set("moments", "adam step"), "optimizer",
        ),
    },
    "averaged": {
        "average": Mistake(
            "the average of the weights is not restored",
            [('        ema.load_state_dict(state["ema"])\n', "")], _SAVED, _set(), "EMA|ema|average",
        ),
        "place": Mistake(
            "the place in the epoch is not restored",
            [('        deck.drawn = state["deck"]["drawn"]\n', "")], _SAVED, _set(), "data|sampler|batch|samples|deck",
        ),
        "epoch": Mistake(
            "the epoch of the sampler is not restored",
            [('        deck.epoch = state["deck"]["epoch"]\n', "")], _SAVED, _set(), "data|sampler|epoch|batch|samples",
        ),
        "off by one": Mistake(
            "the counter of steps is one too high",
            [('        step = state["step"]\n', '        step = state["step"] + 1\n')], _SAVED, _set("step"), "step",
        ),
        "rng": Mistake(
            "random numbers are not restored",
            [('        torch.set_rng_state(state["torch_rng"])\n', "")], _SAVED, _set("rng"), "random numbers|RNG",
        ),
        "early weights": Mistake(
            "the checkpoint is saved before the step of the optimizer",
            [
                ("        optimizer.step()\n", ""),
                (
                    "            saved = step\n",
                    "            saved = step\n        optimizer.step()\n",
                ),
            ],
            _RESUMED, _set(), "before|step",
        ),
    },
}  # fmt: skip
