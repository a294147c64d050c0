"""The fuzzer itself: cases that were kept pass, a few new ones do, and it finds what is injected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from tests.fuzz.cases import Case
from tests.fuzz.mutations import mutate_bytes, mutate_header, mutate_json, mutate_pickle, mutate_zip
from tests.fuzz.others import Others
from tests.fuzz.sandbox import Outcome, fault_of
from tests.fuzz.seeds import EXPERTS, experts, torch_file
from tests.support.checkpoint_writers import llama, safetensors_bytes, write_dcp, write_hf

CORPUS = Path(__file__).parent / "corpus"


def fuzz(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`python -m tests.fuzz`, in a process that has nothing heavy in it."""
    root = Path(__file__).parents[2]
    words = [sys.executable, "-m", "tests.fuzz", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, cwd=root, timeout=300)


def test_every_case_of_the_corpus_passes() -> None:
    done = fuzz("--replay", CORPUS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(list(CORPUS.glob('*.json')))} cases replayed, 0 failed" in done.stdout


def test_new_cases_pass(tmp_path: Path) -> None:
    done = fuzz("--cases", 6, "--seed", 5, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_corpus_is_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.glob("*.json")]
    assert sizes and max(sizes) < 100_000 and sum(sizes) < 2_000_000


@pytest.fixture(scope="module")
def others() -> Iterator[Others]:
    """The judges, who take seconds to come."""
    found = Others()
    yield found
    found.close()


def test_others_find_what_is_changed_lost_new_or_cast_wrongly(others: Others, tmp_path: Path) -> None:
    tensors = llama(1)
    first, second = sorted(name for name, (_, shape, _) in tensors.items() if shape == (8,))[:2]
    swapped = {**tensors, first: tensors[second], second: tensors[first]}
    lost = {name: tensors[name] for name in tensors if name != first}
    dtype, shape, data = tensors[first]
    outputs = {
        "same": (tensors, None, None),
        "prefixed": ({f"model.{name}": tensors[name] for name in tensors}, None, None),
        "swapped": (swapped, None, "with other bytes"),
        "lost": (lost, None, "is in no tensor of the output"),
        "new": ({**tensors, "more": (dtype, shape, bytes(len(data)))}, None, "is in no tensor of the source"),
        "reshaped": ({**tensors, first: (dtype, (2, 4), data)}, None, "[2, 4]"),
        "not cast": (tensors, "fp32", "torch.bfloat16"),
    }
    source, before = write_hf(tmp_path / "source", tensors), (others.judged, others.unread)
    for name, (output, cast, said) in outputs.items():
        for root in (write_hf(tmp_path / f"hf {name}", output), write_dcp(tmp_path / f"dcp {name}", output)):
            found = others.difference(str(source), str(root), cast)
            assert (found is None) if said is None else (found is not None and said in found), (name, found)
    (source / "model.safetensors").write_bytes(b"no header")
    assert others.difference(str(source), str(root), None) is None
    assert (others.judged - before[0], others.unread - before[1]) == (2 * len(outputs), 1)


def test_others_know_experts_apart_and_fused(others: Others, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", experts(), config=EXPERTS)
    swapped = experts()
    first, second = (f"model.layers.0.mlp.experts.{index}.up_proj.weight" for index in range(2))
    swapped[first], swapped[second] = swapped[second], swapped[first]
    other = write_hf(tmp_path / "other", swapped, config=EXPERTS)
    for name, root in (("same", source), ("swapped", other)):
        ckptx.reshard(root, tmp_path / name, tp=2, to="safetensors")
        found = others.difference(str(source), str(tmp_path / name), None)
        assert (found is None) == (name == "same"), found


@pytest.mark.parametrize(
    ("outcome", "command", "said"),
    [
        (Outcome(70, 0.1, "error: x"), "inspect", "exit 70"),
        (Outcome(1, 0.1, "error: x"), "convert", "exit 1"),
        (Outcome(-11, 0.1, ""), "inspect", "signal 11"),
        (Outcome(-14, 10.1, ""), "inspect", "hangs"),
        (Outcome(3, 0.1, "error: a\nb"), "inspect", "2 lines"),
        (Outcome(3, 0.1, "error: \x1b[2J"), "inspect", "control character"),
        (Outcome(0, 0.1, "Traceback"), "inspect", "traceback"),
        (Outcome(7, 0.1, "error: out of memory; run"), "inspect", "needs more than"),
        (Outcome(0, 0.1, "", "{"), "inspect", "no JSON"),
        (Outcome(1, 0.1, ""), "verify", None),
        (Outcome(3, 0.1, "error: a"), "convert", None),
    ],
)
def test_what_counts_as_a_fault(outcome: Outcome, command: str, said: str | None) -> None:
    found = fault_of(outcome, command)
    assert (found is None) if said is None else (found is not None and said in found)


@given(st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_a_mutation_follows_from_its_seed(seed: int) -> None:
    archive, header = torch_file(llama(1)), safetensors_bytes(llama(1))
    for mutation, data in (
        (mutate_json, b'{"a": [1, {"b": "c"}]}'),
        (mutate_header, header),
        (mutate_zip, archive),
        (mutate_pickle, b"\x80\x02}X\x01\0\0\0aK\x01s."),
        (mutate_bytes, b"abc"),
    ):
        assert mutation(Random(seed), data) == mutation(Random(seed), data)


def test_a_case_is_kept_whole(tmp_path: Path) -> None:
    case = Case("inspect SRC", {"a/b": bytes(range(256))})
    case.write(tmp_path / "1.json")
    assert Case.read(tmp_path / "1.json") == case
