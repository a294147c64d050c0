"""Compare the numbers in printed reports with the JSON document and with the files.

Files are read with safetensors and torch's DCP, without ckptx.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptx.cli.main import cli
from tests.support.runner import CliRunner

_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float64: "F64", torch.int8: "I8",
}  # fmt: skip
_UNITS = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
SIZE = r"\d+(?:\.\d+)? (?:B|KiB|MiB|GiB|TiB)"


class DirectoryContents(NamedTuple):
    """Contents of a checkpoint directory.

    Attributes:
        dtypes: Dtype by tensor name.
        aliases: Names that share the bytes of an earlier name.
        nbytes: Size of each tensor in bytes.
        chunks: Number of stored chunks of all tensors.
        files: Size of each file in bytes.
    """

    dtypes: dict[str, str]
    aliases: set[str]
    nbytes: dict[str, int]
    chunks: int
    files: dict[str, int]

    @property
    def size(self) -> int:
        return sum(self.files.values())


def read_contents(root: Path) -> DirectoryContents:
    """Count the contents of a checkpoint in either format."""
    files = {str(file.relative_to(root)): file.stat().st_size for file in root.rglob("*") if file.is_file()}
    return DirectoryContents(*(_of_dcp(root) if (root / ".metadata").exists() else _of_safetensors(root)), files)


def _of_dcp(root: Path) -> tuple[dict[str, str], set[str], dict[str, int], int]:
    read = dcp.FileSystemReader(root).read_metadata()
    entries = {name: each for name, each in read.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
    places: dict[str, set[tuple[str, int]]] = {name: set() for name in entries}
    for index, info in read.storage_data.items():
        if index.fqn in places:
            places[index.fqn].add((info.relative_path, info.offset))
    owners: dict[frozenset[tuple[str, int]], str] = {}
    aliases = {name for name, where in places.items() if owners.setdefault(frozenset(where), name) != name}
    sizes = {name: each.size.numel() * each.properties.dtype.itemsize for name, each in entries.items()}
    return (
        {name: _NAMES[each.properties.dtype] for name, each in entries.items()},
        aliases,
        sizes,
        len(set().union(*places.values())),
    )


def _of_safetensors(root: Path) -> tuple[dict[str, str], set[str], dict[str, int], int]:
    dtypes: dict[str, str] = {}
    nbytes: dict[str, int] = {}
    chunks = set()  # replicas on other ranks count once
    for file in sorted(root.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            info = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118 (a file cannot be iterated over)
                tensor = opened.get_tensor(name)
                dtypes[name] = _NAMES[tensor.dtype]
                chunks.add((name, tuple(info.get(name, {}).get("saved_offsets", ()))))
                nbytes[name] = nbytes.get(name, 0) + tensor.numel() * tensor.element_size()
    return dtypes, set(), nbytes, len(chunks)


class CommandResult(NamedTuple):
    """Outputs of a command.

    Attributes:
        document: Its JSON document.
        text: Its stdout.
        notes: Its stderr.
    """

    document: dict[str, Any]
    text: str
    notes: str


def run(report: Path, *words: object) -> CommandResult:
    """Run a command that writes its document to `report`; a command without a document runs twice."""
    if words[0] in ("inspect", "diff"):
        texts = [
            CliRunner().invoke(cli, [*map(str, words), *more], standalone_mode=False) for more in ((), ("--json",))
        ]
        assert [each.exception for each in texts] == [None, None]
        return CommandResult(json.loads(texts[1].stdout), texts[0].stdout, texts[0].stderr)
    result = CliRunner().invoke(cli, [*map(str, words), "--report", str(report)], standalone_mode=False)
    assert result.exception is None, result.exception
    found = json.loads(report.read_text())
    assert result.return_value == found["exit"], result.stderr
    return CommandResult(found, result.stdout, result.stderr)


def parse_count(text: str) -> int:
    """Parse a number with thousands separators."""
    return int(text.replace(",", ""))


def parse_dtypes(text: str) -> dict[str, int]:
    """Parse the number of tensors of each dtype."""
    found = re.findall(rf"(\w+) \(({NUMBER}) tensors?\)", text)
    assert text == ", ".join(f"{name} ({n} tensor{'' if n == '1' else 's'})" for name, n in found), text
    return {name: parse_count(n) for name, n in found}


def is_size(text: str, nbytes: float, slack: float = 0) -> bool:
    """Return True if a printed size equals `nbytes` within its precision, or within `slack` bytes."""
    number, unit = text.split()
    factor = 1024 ** _UNITS[unit]
    digits = len(number.partition(".")[2])
    return abs(float(number) * factor - nbytes) <= 0.5001 * factor / 10**digits + slack


class Lines:
    """Lines of printed text; a pattern must match each line with a number."""

    def __init__(self, text: str) -> None:
        self.remaining = text.splitlines()

    def one(self, pattern: str) -> re.Match[str]:
        """Remove and return the match of the only line that a pattern matches."""
        (found,) = self.every(pattern)
        return found

    def every(self, pattern: str) -> list[re.Match[str]]:
        """Remove all lines that a pattern matches, and return the matches."""
        found = [(line, match) for line in self.remaining if (match := re.fullmatch(pattern, line))]
        self.remaining = [line for line in self.remaining if all(line is not each for each, _ in found)]
        return [match for _, match in found]

    def end(self) -> None:
        """Check that no remaining line has a number."""
        assert [line for line in self.remaining if re.search(r"\d", line)] == []


def check_conversion(
    said: CommandResult, before: DirectoryContents, after: DirectoryContents | None, *, dst: Path
) -> None:
    """Check every number in the summary of a conversion.

    Args:
        said: Result of the command.
        before: Contents of the source.
        after: Contents of the output; None after a dry run.
        dst: Directory of the output.
    """
    document, lines = said.document, Lines(said.text)
    ledger, target = document["ledger"], document["ledger"]["target"]
    is_dry = bool(document.get("dry_run"))
    head = lines.one(
        rf"(would write |wrote |wrote nothing, the output is complete: )({NUMBER}) tensors?"
        rf"(?: \(({NUMBER})(?: \+ ({NUMBER}) cop(?:y|ies))?(?: \+ ({NUMBER}) alias(?:es)?)?\))?, ({SIZE}) in files"
        rf"(?:, ({SIZE}) of it by an earlier, interrupted run)?"
        rf"(?:; would read ({SIZE})(?: \(a tied tensor once for each copy\))?; ({SIZE}) free on the disk)?"
    )
    verb, tensors, stored, copies, aliases, size, rest, reads, free = head.groups()
    shown = [parse_count(each or "0") for each in (copies, aliases)]
    assert parse_count(tensors) == document["tensors"] == target["tensors"]
    assert shown == [target["copies"], target["aliases"]]
    assert parse_count(stored or tensors) == target["stored"] == parse_count(tensors) - sum(shown)
    assert len(document["aliases"]) == target["aliases"]
    assert is_size(size, document["output_bytes"])
    assert (verb == "would write ") is is_dry and (reads is not None) is is_dry
    if is_dry:
        assert is_size(reads, document["bytes_read"]) and is_size(free, document["free_space"])
        listed = lines.every(
            rf"  (\S+)  ({SIZE})(?:  ({NUMBER}) tensors?)?(?:  rank (\d+) \(stage \d+, dp \d+, tp \d+\))?"
        )
        rows = {row["name"]: row for row in document["files"]}
        for match in listed:
            assert is_size(match[2], rows[match[1]]["bytes"])
            assert parse_count(match[3] or "0") == rows[match[1]]["tensors"]
            ranks = [row["rank"] for row in document["ranks"] if match[1] in row["files"]]
            assert ranks == ([] if match[4] is None else [int(match[4])])
        assert len(listed) == min(len(rows), 20)
        assert sum(row["bytes"] for row in rows.values()) == document["output_bytes"] == document["bytes_written"]
        lines.every(rf"  and {NUMBER} more files, --json lists all")
    elif "complete" in verb:
        assert (document["bytes_written"], document["bytes_read"]) == (0, 0)
    else:
        earlier = document["output_bytes"] - document["bytes_written"]
        assert earlier >= 0 and (rest is not None) is (earlier > 0)
        assert rest is None or is_size(rest, earlier)
    if after is not None:
        assert parse_count(tensors) == len(after.dtypes)
        assert document["output_bytes"] == after.size
        assert {*document["aliases"]} == after.aliases or len(document["aliases"]) == len(after.aliases)
        assert document["dtypes"]["after"] == dict(Counter(after.dtypes.values()))
    _check_source(lines, document, before)
    _check_dtypes(lines, document)
    _check_ties(lines, document, after)
    _check_layout(lines, document, dst if after is not None else None)
    lines.every(r"architecture: .*")
    lines.every(r"config\.json: .*")
    lines.every(r'prefix: ".*" (?:removed from|kept in|added to) names')
    kept = lines.every(rf"not cast by --dtype: ({NUMBER}) tensors? \(.*\)")
    assert [parse_count(match[1]) for match in kept] == (
        [len(document["dtype_unchanged"])] if document.get("dtype_unchanged") else []
    )
    _check_cost(lines, document)
    lines.end()
    assert ledger["source"] == len(before.dtypes)


def _check_source(lines: Lines, document: Mapping[str, Any], before: DirectoryContents) -> None:
    ledger = document["ledger"]
    line = lines.one(rf"source tensors: ({NUMBER}) \((.*)\)")
    parts = Counter[str]()
    for part in line[2].split(", "):
        match = re.fullmatch(
            rf"({NUMBER}) (written|tied to (?:a written one|written ones)|used to dequantize weights|dropped)"
            rf"(?: as ({NUMBER}) tensors?)?",
            part,
        )
        assert match, part
        outcome = match[2].partition(" ")[0]
        parts["decoded" if outcome == "used" else outcome] += parse_count(match[1])
        if match[2] == "written":
            target = ledger["target"]  # tensors that are written unchanged may include copies
            assert parse_count(match[3] or match[1]) in (target["stored"], *([] if match[3] else [target["tensors"]]))
    expected = {outcome: ledger[outcome] for outcome in ("written", "tied", "decoded", "dropped")}
    assert parts == Counter(expected)
    assert parse_count(line[1]) == ledger["source"] == sum(parts.values()) == len(before.dtypes)
    assert len(document["dropped"]) == ledger["dropped"]
    dropped = lines.every(rf"dropped: ({NUMBER}) tensors?(?:, ({SIZE}))? \((.*)\)")
    reasons = Counter(row["reason"] for row in document["dropped"])
    assert {match[3]: parse_count(match[1]) for match in dropped} == reasons
    for match in dropped:
        assert (match[2] is not None) is match[3].startswith("optimizer state")
        if match[2]:
            assert parse_count(match[1]) == sum(name.startswith("optimizer.") for name in before.dtypes)
            assert is_size(match[2], sum(size for name, size in before.nbytes.items() if name.startswith("optimizer.")))
    objects = lines.every(rf"dropped: ({NUMBER}) pickled objects?, ({SIZE})")
    assert len(objects) == bool(document.get("objects", {}).get("bytes"))
    assert all(is_size(match[2], document["objects"]["bytes"]) for match in objects)


def _check_dtypes(lines: Lines, document: Mapping[str, Any]) -> None:
    line = lines.one(r"dtypes: (.*?)(?: -> (.*))?")
    counts = [parse_dtypes(each or line[1]) for each in line.groups()]
    assert counts == [document["dtypes"]["before"], document["dtypes"]["after"]]
    assert all(sum(each.values()) == document["tensors"] for each in counts)


def _check_ties(lines: Lines, document: Mapping[str, Any], after: DirectoryContents | None) -> None:
    words = {"one tensor with two names": "alias", "stored under both names, as copies": "copy"}
    found = lines.every(
        r"tied: (\S+) = (\S+), (one tensor with two names|stored under both names, as copies) \(source: .*\)"
    )
    printed = {(match[1], match[2]): words[match[3]] for match in found}
    found = lines.every(r"tied: (\S+) = (\S+), stored as (\S+) \(source: .*\)")
    stored = {(match[1], match[2]): match[3] for match in found}
    untied = {(match[1], match[2]) for match in lines.every(r"not tied: (\S+), (\S+) \(source: .*\)")}
    for row in document["ties"]:
        names = [name for name in row["output_names"] if name is not None]
        pair = (names[0], names[1]) if len(names) == 2 else (row["name"], row["tied_to"])
        actions = (*words.values(), "single")
        if pair in printed:
            assert printed[pair] == row["action"]
        elif pair in stored:
            assert (row["action"], [stored[pair]]) == ("single", names)
            assert after is None or stored[pair] in after.dtypes
        else:
            assert row["action"] not in actions or len(printed) + len(stored) == 20
            assert (pair in untied) is (row["declared"] and row["action"] not in actions)
        if after is None or row["action"] == "none":
            continue
        assert all(name in after.dtypes for name in names), row
        exact = [name for name in pair if name in after.dtypes]
        if row["action"] == "single":
            assert len(exact) <= 1, row
        elif len(exact) == 2:
            shares = bool({*pair} & {*document["aliases"]})
            assert (row["action"] == "alias") is shares, row
            assert not shares or {*pair} & after.aliases
    aliases = {(match[1], match[2]) for match in lines.every(r"alias: (\S+) = (\S+)")}
    reported = {name for row in document["ties"] for name in row["output_names"]}
    others = {pair for pair in document["aliases"].items() if not reported.issuperset(pair)}
    assert aliases <= others and len(aliases) == min(len(others), 20)


def _check_layout(lines: Lines, document: Mapping[str, Any], dst: Path | None) -> None:
    layout = document.get("layout")
    found = lines.every(
        r"mesh: tp (\d+) x pp (\d+) x dp_shard (\d+) as (?:DCP|sharded safetensors), "
        rf"(?:file bytes per rank: mean ({SIZE}), max|1 rank,) ({SIZE})"
    )
    assert len(found) == (layout is not None)
    if layout is None:
        return
    tp, pp, dp_shard = (int(found[0][index]) for index in (1, 2, 3))
    assert (tp, pp, dp_shard) == (layout["tp"], layout["pp"], layout["dp_shard"])
    sizes = [row["bytes"] for row in document["ranks"]]
    assert len(sizes) == tp * pp * dp_shard
    if dst is not None:
        by_rank = [0] * len(sizes)
        for file in dst.iterdir():
            match = re.fullmatch(r"__(\d+)_\d+\.distcp|shard-(\d+)-model-.*\.safetensors", file.name)
            if match:
                by_rank[int(match[1]) if match[1] else int(match[2]) - 1] += file.stat().st_size
        assert by_rank == sizes
    assert (found[0][4] is None) is (len(sizes) == 1) and is_size(found[0][5], max(sizes))
    assert found[0][4] is None or is_size(found[0][4], sum(sizes) / len(sizes))
    stages = lines.every(r"  stage (\d+): (.*)")
    assert [int(match[1]) for match in stages] == (list(range(pp)) if pp > 1 else [])
    for match in stages:
        spans = [(path, int(a), int(b) + 1) for path, a, b in re.findall(r"([\w.]+)\.(\d+)-(\d+)", match[2])]
        assert [list(each) for each in spans] == layout["stages"][int(match[1])]
    rules = lines.every(
        rf"  TP: ({NUMBER}) tensors? (replicated, not named in the plan \(.*\)|(?:sharded|replicated) by .*)"
    )
    placed = sum(row["tensors"] for row in document["rules"])
    assert sum(parse_count(match[1]) for match in rules) == (placed if tp > 1 else 0)
    sharded = sum(parse_count(match[1]) for match in rules if match[2].startswith("sharded"))
    assert sharded == (sum(row["tensors"] for row in document["rules"] if row["dim"] is not None) if tp > 1 else 0)
    replicated = document.get("replicated")
    assert (replicated is not None) is (tp > 1)
    if replicated is not None:
        assert replicated["tensors"] == placed - sharded
        assert 0 <= replicated["share"] <= 1


def _check_cost(lines: Lines, document: Mapping[str, Any]) -> None:
    line = lines.one(rf"(\d+\.\d\d) s(?:, ({SIZE})/s)?, peak memory(?: of the ([a-z ]+))? ({SIZE})")
    assert abs(float(line[1]) - document["seconds"]) <= 0.00501
    assert is_size(line[4], document["peak_rss"]) and document["peak_rss"] > 1 << 20
    assert (line[3] or "this process") == document["peak_rss_of"]
    if line[2]:
        assert is_size(line[2], document["written_gb_per_s"] * 1e9, slack=500)  # printed with six digits
        assert document["written_gb_per_s"] * 1e9 * document["seconds"] == _near(document["bytes_written"])


def _near(value: float) -> Any:
    import pytest

    return pytest.approx(value, rel=0.02, abs=2000)


def check_inspection(said: CommandResult, found: DirectoryContents, parameters: int | None = None) -> None:
    """Check every number in the output of `inspect`."""
    document, lines = said.document, Lines(said.text)
    lines.remaining = lines.remaining[1:]  # the path
    files = lines.one(rf"  format        [\w .]+, ({NUMBER}) files?")
    assert parse_count(files[1]) == len(document["files"])
    assert all(found.files[name] == size for name, size in document["files"].items())
    tensors = lines.one(
        rf"  tensors       ({NUMBER})(?: \(({NUMBER}) \+ ({NUMBER}) alias(?:es)?\))?"
        rf"(?: in ({NUMBER}) shards)?, ({SIZE})"
    )
    assert parse_count(tensors[1]) == document["tensors"] == len(found.dtypes)
    assert parse_count(tensors[3] or "0") == len(document["aliases"]) == len(found.aliases)
    assert parse_count(tensors[2] or tensors[1]) == document["tensors"] - len(document["aliases"])
    stored = document["tensors"] - len(document["aliases"])
    assert (parse_count(tensors[4]) if tensors[4] else stored) == document["chunks"] == found.chunks
    assert is_size(tensors[5], document["bytes"])
    assert parse_count(lines.one(rf"  parameters    ({NUMBER})")[1]) == document["parameters"]
    assert parameters is None or document["parameters"] == parameters
    counts = parse_dtypes(lines.one(r"  dtypes        (.*)")[1])
    assert counts == document["dtypes"]["before"] == dict(Counter(found.dtypes.values()))
    for match in lines.every(rf"  optimizer     ({NUMBER}) tensors?, ({SIZE})"):
        assert parse_count(match[1]) == document["optimizer"]["tensors"]
        assert is_size(match[2], document["optimizer"]["bytes"])
        names = [name for name in found.dtypes if name.startswith("optimizer.")]
        assert parse_count(match[1]) == len(names)
        assert document["optimizer"]["bytes"] == sum(found.nbytes[name] for name in names if name not in found.aliases)
    groups = lines.every(rf"    (\S+)\s+({NUMBER})\s+({SIZE})")
    others = document["optimizer"]["tensors"] + len(document["other_tensors"])
    assert sum(row["tensors"] for row in document["groups"]) == document["tensors"] - others
    for match, row in zip(groups, document["groups"], strict=False):
        assert (match[1], parse_count(match[2])) == (row["pattern"], row["tensors"]) and is_size(match[3], row["bytes"])
    for pattern in ("architecture", "prefix", "other", "objects", "alias", "tied", "unknown", "other files"):
        lines.every(rf"  {pattern}\s+.*")
    lines.end()


def check_verification(said: CommandResult, compared: int, differing: int, every: int) -> None:
    """Check every number in the output of `verify`.

    Args:
        said: Result of the command.
        compared: Number of tensor pairs with comparable contents.
        differing: Number of tensors that differ.
        every: Number of tensor names on both sides.
    """
    document, lines = said.document, Lines(said.text)
    assert (document["compared"], len(document["differing"])) == (compared, differing)
    if not differing:
        equal = rf"EQUAL: ({NUMBER}) tensors? compared bit for bit, ({SIZE}) read from both checkpoints"
        line = lines.one(equal + uncompared_pattern(document))
        assert parse_count(line[1]) == compared and is_size(line[2], document["bytes_read"])
    else:
        line = lines.one(rf"DIFFERENT: ({NUMBER}) of ({NUMBER}) tensors? differs?" + uncompared_pattern(document))
        assert (parse_count(line[1]), parse_count(line[2]), document["total"]) == (differing, every, every)
        rows = lines.every(r"[\w.]+: (?:content|missing|shape|dtype).*")
        assert len(rows) == min(differing, 20)
        more = lines.every(r"and (\d+) more; --json lists all")
        assert [int(match[1]) for match in more] == ([differing - 20] if differing > 20 else [])
    _check_cost(lines, document)
    lines.end()


def uncompared_pattern(document: Mapping[str, Any]) -> str:
    """Return the pattern of what was not compared, at the end of a verdict."""
    nouns = {"optimizer": "optimizer tensor", "other": "other tensor", "objects": "pickled object"}
    counts = [(document["not_compared"][kind], noun) for kind, noun in nouns.items()]
    text = ", ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts if count)
    return f"; {text} not compared" if text else ""


def check_difference(said: CommandResult, common: int) -> None:
    """Check every number in the output of `diff`."""
    lines = Lines(said.text)
    assert said.document["compared"] == common
    rows = said.document["differing"]
    if rows:
        line = lines.one(rf"DIFFERENT: ({NUMBER}) of ({NUMBER}) tensors? differs?" + uncompared_pattern(said.document))
        only_in_one = sum(row["what"] == "missing" for row in rows)
        assert said.document["total"] == common + only_in_one
        assert (parse_count(line[1]), parse_count(line[2])) == (len(rows), common + only_in_one)
    else:
        equal = rf"EQUAL: ({NUMBER}) tensors? ha(?:s|ve) equal shapes and dtypes"
        assert parse_count(lines.one(equal + uncompared_pattern(said.document))[1]) == common
    assert len(lines.every(r"tied: .*")) == len(said.document["tied_tensors"])
    assert len(lines.every(r"[\w.]+: (?:missing|shape|dtype).*")) == min(20, len(rows))
    more = lines.every(r"and (\d+) more; --json lists all")
    assert [int(match[1]) for match in more] == ([len(rows) - 20] if len(rows) > 20 else [])
    lines.end()
