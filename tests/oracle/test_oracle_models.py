"""Models of real transformers classes, there and back: stock torch and `from_pretrained` say whether it is right.

For every class: HF -> DCP -> HF with the manifest (the same files), and without it (a model that loads the same).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptx
from ckptx.report.documents.conversion import ConversionReport
from tests.support.models import (
    EVERY,
    RECIPES,
    WIDE,
    Recipe,
    assert_same_outputs,
    load,
    outputs,
    read_hf,
    write,
)
from tests.support.slow import slow_but
from tests.support.torch_dcp import assert_same_tensors, file_bytes, metadata, payload_bytes, raw
from tests.support.torch_dcp import load as stock_load


class Converted(NamedTuple):
    """One model in all its forms; `bare` is the DCP without its manifest."""

    name: str
    recipe: Recipe
    hf: Path
    dcp: Path
    back: Path
    bare: Path
    from_bare: Path
    reports: list[ConversionReport]
    logits: list[torch.Tensor]

    @property
    def names(self) -> set[str]:
        return set(read_hf(self.hf))

    @property
    def absent(self) -> set[str]:
        """Tied names that the files of the HF checkpoint leave out."""
        return set(self.recipe.aliases) - self.names


NAMES = slow_but((*RECIPES, *WIDE), RECIPES)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converted]:
    recipe = EVERY[request.param]
    root = tmp_path_factory.mktemp(request.param)
    hf, dcp, back, bare, from_bare = (root / name for name in ("hf", "dcp", "back", "bare", "from_bare"))
    write(recipe, hf)
    reports = [ckptx.convert("hf2dcp", hf, dcp), ckptx.convert("dcp2hf", dcp, back)]
    shutil.copytree(dcp, bare)
    (bare / "ckptx.json").unlink()
    reports.append(ckptx.convert("dcp2hf", bare, from_bare))
    yield Converted(request.param, recipe, hf, dcp, back, bare, from_bare, reports, outputs(load(hf), recipe.inputs()))
    shutil.rmtree(root)


@pytest.mark.sampled(6)
def test_stock_dcp_load_gives_the_bytes_of_every_name_on_disk(model: Converted) -> None:
    expected = read_hf(model.hf)
    assert_same_tensors(stock_load(model.dcp, expected), expected)


def test_dcp_holds_the_names_on_disk_and_the_tied_names_and_no_other(model: Converted) -> None:
    assert set(metadata(model.dcp)) == model.names | set(model.recipe.aliases)


def test_aliases_load_from_the_same_bytes_of_the_same_file(model: Converted) -> None:
    assert model.reports[0].aliases == dict(model.recipe.aliases)
    storage = dcp.FileSystemReader(model.dcp).read_metadata().storage_data
    places = {index.fqn: (info.relative_path, info.offset, info.length) for index, info in storage.items()}
    for alias, stored in model.recipe.aliases.items():
        tensors = stock_load(model.dcp, [alias, stored])
        assert raw(tensors[alias]) == raw(tensors[stored])
        assert places[alias] == places[stored]
    assert payload_bytes(model.dcp) == sum(length for _, _, length in set(places.values()))


def test_dcp_to_torch_save_gives_the_same_tensors(model: Converted, tmp_path: Path) -> None:
    dcp_to_torch_save(model.dcp, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    expected = read_hf(model.hf)
    for alias, stored in model.recipe.aliases.items():
        expected.setdefault(alias, expected[stored])
    assert_same_tensors(found, expected)


def test_way_back_gives_the_same_files(model: Converted) -> None:
    before, after = file_bytes(model.hf), file_bytes(model.back)
    assert after.pop("ckptx.json")
    assert after == before


def test_way_back_without_manifest_gives_the_same_tensors(model: Converted) -> None:
    expected = read_hf(model.hf)
    for alias in model.recipe.aliases:
        expected.pop(alias, None)  # of tied names `save_pretrained` writes the source alone
    assert_same_tensors(read_hf(model.from_bare), expected)


def test_logits_are_the_same_bit_for_bit(model: Converted) -> None:
    assert_same_outputs(outputs(load(model.back), model.recipe.inputs()), model.logits)


def test_logits_without_manifest_are_the_same_bit_for_bit(model: Converted) -> None:
    assert_same_outputs(outputs(load(model.from_bare), model.recipe.inputs()), model.logits)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("other", ["dcp", "back", "bare", "from_bare"])
def test_verify_and_diff_call_every_form_equal(model: Converted, other: str) -> None:
    path = getattr(model, other)
    for report in (ckptx.verify(model.hf, path), ckptx.verify(path, model.hf), ckptx.diff(model.hf, path)):
        assert (report.exit, report.differing) == (0, [])
        assert report.compared >= len(model.names) - len(model.recipe.aliases)


def test_every_tensor_is_accounted_for(model: Converted) -> None:
    for report in model.reports:
        ledger = report.ledger
        assert ledger["source"] == ledger["written"] + ledger["tied"]
        assert ledger["dropped"] == len(report.dropped) == 0
    assert model.reports[0].ledger["source"] == len(model.names)


def test_every_name_on_disk_is_known(model: Converted) -> None:
    for report in model.reports:
        assert list(report.unknown_tensors or ()) == []
