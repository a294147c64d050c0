"""A trainer in a few lines of plain Python, for tests of how trainers are run and judged; it takes 0.1 seconds.

Its parameter is a number that grows by the data, a moment and a random number; `--fault` names what it does wrong, and
`--tamper RUN|FILE|CHANGE` what it does to a file of the run that did not stop when it has ended.
"""

import argparse
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path


def safetensors(path, tensors):
    """Writes floats of 64 bits."""
    header, body = {}, b""
    for name, value in tensors.items():
        header[name] = {"dtype": "F64", "shape": [1], "data_offsets": [len(body), len(body) + 8]}
        body += struct.pack("<d", value)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def read(path):
    """Reads them."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    at = {name: 8 + length + each["data_offsets"][0] for name, each in json.loads(data[8 : 8 + length]).items()}
    return {name: struct.unpack_from("<d", data, begin)[0] for name, begin in at.items()}


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--steps", type=int)
parser.add_argument("--total", type=int)
parser.add_argument("--save-at", type=int)
parser.add_argument("--resume", type=Path)
parser.add_argument("--fault", default="")
parser.add_argument("--tamper", default="||")
parser.add_argument("--width", type=int, default=1)
args = parser.parse_args()
fault = args.fault
tampering, place, change = args.tamper.split("|")
run = args.out.name
if fault == "writes elsewhere" and args.resume:
    args.out = args.resume.parent

if fault == "fails" or (fault == "fails to resume" and args.resume):
    print("loading")
    raise ValueError("no such key: optim")
if fault == "hangs":
    (args.out / "pid").write_text(str(os.getpid()))
    time.sleep(600)

random.seed(7)
weight, moment, step, seen, position = 1.0, 0.0, 0, 0, 0
if args.resume and not fault.startswith("scratch"):
    state = json.loads((args.resume / "state.json").read_text())
    weight, moment = (
        read(args.resume / "model.safetensors")["w"],
        read(args.resume / "optimizer.safetensors")["exp_avg"],
    )
    step, seen = state["step"], state["sampler"]["seen"]
    version, inner, gauss = state["rng"]
    random.setstate((version, tuple(inner), gauss))
    if fault == "files":  # with "position", it is not restored
        position = int((args.resume / "some" / "where" / "deep" / "position").read_text())
    if fault == "iterator":
        random.random()
    elif fault == "data":
        seen = 0
    elif fault.startswith("moments"):
        moment = 0.0
if fault == "noise" and not args.resume:
    weight += 1e-9 * (time.time() % 1)


def save():
    """Saves."""
    folder = args.out / f"step-{step:0{args.width}d}"
    folder.mkdir(exist_ok=fault == "writes elsewhere")
    if tampering:
        (args.out / "latest").unlink(missing_ok=True)
        (args.out / "latest").symlink_to(folder.name)
    safetensors(folder / "model.safetensors", {"w": weight})
    safetensors(folder / "optimizer.safetensors", {"exp_avg": moment})
    state = {"step": step, "sampler": {"seen": seen}, "rng": random.getstate(), "timestamp": time.time()}
    (folder / "state.json").write_text(json.dumps(state))
    if fault == "history":  # not compared, as it is the name of an index
        text = (args.out / "losses.jsonl").read_text() if (args.out / "losses.jsonl").exists() else ""
        rows = [json.loads(line) for line in text.splitlines()]
        (folder / "losses.index.json").write_text(json.dumps(rows))
    if fault in ("files", "position"):
        (folder / "some" / "where" / "deep").mkdir(parents=True)
        (folder / "some" / "where" / "deep" / "position").write_text(str(position))
        (folder / "log.txt").write_text(f"{time.time()} {args.out}")
        (folder / f"trace-{time.time_ns()}.log").write_text("began")
        (folder / "train_config.json").write_text(json.dumps({"steps": args.steps, "out": str(args.out)}))


saved = None
while step < args.steps:
    if fault == "late iterator" and step == args.save_at:  # made when the first batch is asked for
        random.random() if args.resume else None
    seen += 2
    position += 3
    moment = 0.9 * moment + 0.1 * seen
    weight += moment * random.random() / args.total
    step += 1
    loss = float("nan") if fault == "nan" else weight
    print(f"step {step} loss {loss!r}")
    if fault != "no losses" and not (fault == "scratch, hidden" and args.resume and step <= args.save_at):
        with open(args.out / "losses.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")
    if step == args.save_at:
        save()
        saved = step
if saved != step and fault != "no checkpoint":
    save()
    saved = step
if "history" in fault:
    history = [json.loads(line) for line in (args.out / "losses.jsonl").read_text().splitlines()]
    before = json.loads((args.resume / "losses.index.json").read_text()) if args.resume and fault == "history" else []
    (args.out / "trainer_state.json").write_text(json.dumps({"log_history": before + history}))
if fault == "moments written back" and saved == args.save_at and args.resume:
    shutil.copytree(args.out / f"step-{saved}", args.resume, dirs_exist_ok=True)
if fault == "leaves a child":
    subprocess.Popen(["sleep", "611"], start_new_session=True)
if run == tampering:
    from tampering import tamper

    tamper(args.out.parent / "uninterrupted" / place, change)
sys.exit(3 if fault == "exits" else 0)
