"""A case of the fuzzer: files and a command, made from a seed or read from the corpus, and the judgement of it."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import zlib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutate
from tests.fuzz.others import Others
from tests.fuzz.sandbox import REFUSED, Outcome, Snapshot, command_line, fault_of, run_child, snapshot
from tests.fuzz.seeds import Files

# SRC, GOOD and DST stand for the mutated checkpoint, the one it was made from in another form, and the output.
COMMANDS = {
    "any": [
        "inspect SRC",
        "inspect SRC --tensors --ranks",
        "inspect SRC --json",
        "inspect SRC --html DST.html",
        "diff SRC GOOD",
        "diff GOOD SRC --json",
        "verify GOOD SRC",
        "verify SRC GOOD --json",
        "reshard SRC DST --tp 2",
        "reshard SRC DST --pp 2 --tp 2 --to dcp",
        "reshard SRC DST --tp 2 --dp-shard 3 --to safetensors",
        "convert dcp2hf SRC DST --base GOOD",
        "convert hf2dcp GOOD DST --base SRC",
        "reshard SRC DST --tp 2 --dry-run",
        "reshard GOOD DST --tp 2 --base SRC",
    ],
    "hf": [
        "convert hf2dcp SRC DST",
        "convert hf2dcp SRC DST --tp 2",
        "convert hf2dcp SRC DST --dtype fp32 --names model",
    ],
    "dcp": [
        "convert dcp2hf SRC DST",
        "convert dcp2hf SRC DST --base none",
        "convert dcp2hf SRC DST --max-shard-size 1KB",
    ],
}
DCP = ("dcp", "written", "cut", "sharded", "experts-cut", "fsdp")


@dataclass(frozen=True, slots=True)
class Case:
    """What is run: a command with placeholders, and the files of SRC."""

    command: str
    files: Files

    @classmethod
    def of_seed(cls, seed: int, known: dict[str, Files]) -> Case:
        """The case of a seed; the same for the same seeds of checkpoints."""
        random = Random(seed)
        kind = random.choice(sorted(known))
        commands = COMMANDS["any"] + COMMANDS["dcp" if kind in DCP else "hf"] * 3
        return cls(random.choice(commands), mutate(random, known[kind]))

    @classmethod
    def read(cls, path: Path) -> Case:
        """A case of the corpus."""
        document = json.loads(path.read_text())
        return cls(
            document["command"],
            {name: zlib.decompress(base64.b85decode(data)) for name, data in document["files"].items()},
        )

    def write(self, path: Path) -> None:
        """Keeps it for the corpus."""
        files = {name: base64.b85encode(zlib.compress(data, 9)).decode() for name, data in self.files.items()}
        path.write_text(json.dumps({"command": self.command, "files": files}, indent=1) + "\n")


class Judge:
    """Runs cases in a directory and says what is wrong with them."""

    def __init__(self, room: Path, good: Files) -> None:
        self._room = room
        _lay(room / "good", good)
        _lay(room / "canary", {"x": b"untouched", "y/z": b"untouched"})
        (room / "log").mkdir()
        (room / "home").mkdir()
        os.environ["HOME"] = str(room / "home")
        self._others = Others()

    def close(self) -> str:
        """Ends what was started; says how many outputs were read by others."""
        self._others.close()
        return f"{self._others.judged} outputs read by others ({self._others.unread} of sources they cannot read)"

    def warm(self, known: dict[str, Files]) -> None:
        """Runs every command once in this process, so that no child has to import and to look up what all need."""
        for kind, files in known.items():
            commands = [*COMMANDS["any"], *COMMANDS["dcp" if kind in DCP else "hf"]]
            for command in commands if kind in ("single", "cut", "sharded") else commands[:1]:
                _lay(self._room / "src", files)
                arguments = [self._places().get(word, word) for word in command.split()]
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    command_line(arguments)()
                self._clear()

    def _places(self) -> dict[str, str]:
        return {word: str(self._room / word.lower()) for word in ("SRC", "GOOD", "DST", "DST.html")}

    def _clear(self) -> None:
        for name in ("src", "dst"):
            shutil.rmtree(self._room / name, ignore_errors=True)
        (self._room / "dst.html").unlink(missing_ok=True)

    def fault(self, case: Case) -> tuple[str | None, int]:
        """What is wrong, or None; and the exit code."""
        room = self._room
        self._clear()
        if not _lay(room / "src", case.files):
            return None, 0
        before = snapshot(room, "log")
        words = case.command.split()
        places = self._places()
        outcome = self._run([places.get(word, word) for word in words])
        after = snapshot(room, "log")
        found = fault_of(outcome, words[0]) or self._outside(before, after, outcome)
        if found is None and outcome.code == 0 and (room / "dst").is_dir():
            found = self._check_output(places["GOOD"] if "GOOD" in words[:3] else places["SRC"], words)
        return found, outcome.code

    def _run(self, arguments: list[str]) -> Outcome:
        return run_child(command_line(arguments), self._room / "log")

    def _outside(self, before: Snapshot, after: Snapshot, outcome: Outcome) -> str | None:
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        foreign = [name for name in changed if name.partition("/")[0] not in ("dst", "dst.html")]
        if foreign:
            return f"changes {sorted(foreign)[0]} at exit {outcome.code}"
        if outcome.code != 0 and any(name.partition("/")[0] == "dst" for name in changed):
            return f"leaves an output at exit {outcome.code}"
        return None

    def _check_output(self, source: str, words: list[str]) -> str | None:
        dtype = words[words.index("--dtype") + 1] if "--dtype" in words else None
        output = str(self._room / "dst")
        if dtype is None:
            outcome = self._run(["-q", "verify", source, output])
            # Beside --base a config of SRC that is spoiled was not asked; verify asks it, and may refuse.
            if outcome.code and not (
                "--base" in words and outcome.code in REFUSED and str(self._room / "dst") not in outcome.said
            ):
                return f"published, and verify says {outcome.code}: {(outcome.said + outcome.printed).strip()[-300:]}"
        elif found := fault_of(self._run(["inspect", output]), "inspect"):
            return found
        difference = self._others.difference(source, output, dtype)
        return f"published, and others read: {difference}" if difference else None


def _lay(root: Path, files: Files) -> bool:
    """Writes files; False when one of them is a directory of another."""
    try:
        for name, data in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
    except OSError:
        return False
    return True
