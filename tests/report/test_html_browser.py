"""The layout page in a browser: what the script draws, and that no name of a tensor becomes more than text."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from array import array
from pathlib import Path
from urllib.parse import urlencode

import pytest

import ckptx
from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, ShardedChunks, TensorEntry
from ckptx.catalog.region import Region
from ckptx.layout.parallel_dims import ParallelDims
from tests.report.pages import Page
from tests.report.test_html import EVIL, catalog_of, evil, page_of, small
from tests.support.checkpoint_writers import LLAMA, llama, write_hf

pytestmark = pytest.mark.slow

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    assert found, "these tests need a browser; run `apt-get install -y chromium`"
    profile = tmp_path_factory.mktemp("profile")
    return [
        found, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--virtual-time-budget=3000", "--enable-logging=stderr",
    ]  # fmt: skip


def opened(browser: list[str], path: Path, **shown: str) -> Page:
    """The page as it stands after its script ran, with `shown` in its address."""
    url = f"{path.as_uri()}#{urlencode(shown)}"
    run = subprocess.run([*browser, "--dump-dom", url], capture_output=True, timeout=60, check=True)
    assert "CONSOLE" not in (said := run.stderr.decode(errors="replace")), said
    return Page(run.stdout.decode())


def pieces(page: Page) -> list[tuple[float, ...]]:
    """x, y, width, height of the rectangles that are drawn, rounded."""
    return [
        tuple(round(float(rect.attributes[key] or 0)) for key in ("x", "y", "width", "height"))
        for rect in page.all("rect", "shard")
    ]


def test_an_address_opens_a_tensor_and_its_cut_is_drawn_to_scale(browser: list[str], tmp_path: Path) -> None:
    path = tmp_path / "layout.html"
    path.write_text(small()[0])
    page = opened(browser, path, tensor="layers.3.down")
    assert page.all("h3")[-1].text == "layers.3.down"
    # [8, 12] in 600 x 400: four columns by tp, two rows by FSDP, a pixel between them; 64 and 34 are for the ticks.
    columns, rows = [(64 + 150 * i, 149) for i in range(4)], [(34, 199), (234, 199)]
    assert sorted(pieces(page)) == sorted((x, y, w, h) for x, w in columns for y, h in rows)
    held = [cell.attributes["data-h"] for cell in page.all("a", "cell") if cell.has("on")]
    assert held == [str(rank) for rank in range(8, 16)]
    cells = [cell.text for cell in page.all("td")]
    assert cells[:4] == ["rank 8", "[0, 0]", "[4, 3]", "24 B"]
    assert len(cells) == 4 * 8
    assert "4 of 4 tensors with this pattern and sharding" in page.all("div", "steps")[0].text


def test_a_rank_in_the_address_is_described_and_set_off(browser: list[str], tmp_path: Path) -> None:
    path = tmp_path / "layout.html"
    path.write_text(small()[0])
    page = opened(browser, path, tensor="layers.0.up", rank="5")
    assert page.by_id("holder").text.startswith("rank 5, stage 0, dp 1, tp 1 \u00b7 96 B \u00b7 4 tensors")
    faint = [rect.has("faint") for rect in page.all("rect", "shard")]
    assert (faint.count(True), faint.count(False)) == (7, 1)


def test_without_an_address_a_cut_tensor_is_shown(browser: list[str], tmp_path: Path) -> None:
    path = tmp_path / "layout.html"
    path.write_text(small()[0])
    page = opened(browser, path)
    assert len(pieces(page)) == 8
    assert not any(cell.has("on") for cell in page.all("a", "cell"))


def test_a_tensor_cut_along_three_dims_is_drawn_in_slices(browser: list[str], tmp_path: Path) -> None:
    corners = list(itertools.product((0, 2), repeat=3))
    blocks = tuple(Block(rank_in_stage, Region(corner, (2, 2, 2))) for rank_in_stage, corner in enumerate(corners))
    names = tuple(f"__{rank_in_stage}_0.distcp" for rank_in_stage in range(8))
    chunks = ShardedChunks(blocks, names, array("q", [0] * 8), (16,) * 8)
    catalog = Catalog(Path("made"), "dcp", {"w": TensorEntry("w", DTYPES_BY_NAME["BF16"], (4, 4, 4), chunks)})
    catalog.files = dict.fromkeys(names, 16)
    path = tmp_path / "layout.html"
    path.write_text(page_of(catalog, ParallelDims(8))[0])
    page = opened(browser, path, tensor="w")
    assert len(pieces(page)) == 8 and len(set(pieces(page))) == 4
    assert [title.text for title in page.all("h4")] == ["dim 2 0:2", "dim 2 2:4"]


@pytest.mark.parametrize(
    ("words", "hits"),
    [
        ("down 2", ["layers.2.down"]),
        ("LAYERS.1", ["layers.1.up", "layers.1.down"]),
        ("no such", []),
        ("norm", ["norm"]),
    ],
)
def test_a_search_lists_names(browser: list[str], tmp_path: Path, words: str, hits: list[str]) -> None:
    path = tmp_path / "layout.html"
    path.write_text(small()[0])
    page = opened(browser, path, find=words)
    assert [hit.text for hit in page.all("a", "hit")] == hits
    assert not page.all("a", "row")


def test_a_name_that_is_not_there_is_said(browser: list[str], tmp_path: Path) -> None:
    path = tmp_path / "layout.html"
    path.write_text(small()[0])
    page = opened(browser, path, tensor=EVIL[0], rank="99999")
    assert page.by_id("detail").text.strip() == f"No tensor is named {EVIL[0]}."
    assert not page.all("img")


@pytest.mark.parametrize("name", [name for name in EVIL if "\ud800" not in name])
def test_every_name_is_found_and_stays_text(browser: list[str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "layout.html"
    path.write_text(evil()[0], errors="replace")
    page = opened(browser, path, tensor=name)
    assert page.all("h3")[-1].text == name
    assert not page.all("img") and len(page.all("script")) == 2
    assert not [key for element in page.elements for key in element.attributes if key.startswith("on")]


# Runs in the page: every box whose contents are wider than itself, the page included.
_MEASURE = """<script>addEventListener("load", () => {
  const wide = [document.documentElement, ...document.querySelectorAll("main *")].filter(
    (each) => each.scrollWidth > each.clientWidth + 1 && each.clientWidth && getComputedStyle(each).display !== "inline"
      && !each.closest("svg") && !each.closest(".scroll"));
  document.title = JSON.stringify(wide.map((each) => each.tagName + "." + each.className));
})</script>"""
MESHES = [
    ParallelDims(tp, pp, 64 // tp // pp) for tp in (1, 2, 4, 8, 16, 32, 64) for pp in (1, 4, 64) if tp * pp <= 64
]  # fmt: skip


@pytest.mark.parametrize("dims", [*MESHES, ParallelDims(33, 2, 2), ParallelDims(12, 5), ParallelDims(8, 4, 32)])
def test_a_page_of_many_ranks_fits_the_width_of_a_screen(
    browser: list[str], tmp_path: Path, dims: ParallelDims
) -> None:
    tensors = [
        (f"model.layers.{stage}.self_attn.q_proj.weight", (811 * dims.tp, 491 * dims.dp_shard), stage)
        for stage in range(dims.pp)
    ]
    page = page_of(catalog_of(tensors, dims), dims)[0]
    path = tmp_path / "layout.html"
    path.write_text(
        page.replace('http-equiv="Content-Security-Policy"', 'name="none"').replace("</body>", f"{_MEASURE}</body>")
    )
    shown = opened([*browser, "--window-size=1300,1400"], path)
    assert len(shown.all("a", "cell")) == dims.world_size
    assert shown.all("title")[0].text == "[]"


def test_markup_that_gets_in_is_stopped_by_the_policy(browser: list[str], tmp_path: Path) -> None:
    """A page that was spoiled by hand: what the names in the others try, would work were it not for the policy."""
    path = tmp_path / "layout.html"
    spoiled = small()[0].replace("<main>", "<main><script>document.title = 'in'</script><b id=in></b>")
    path.write_text(spoiled.replace('http-equiv="Content-Security-Policy"', 'name="none"'))
    assert opened(browser, path).all("title")[0].text == "in"
    path.write_text(spoiled)
    with pytest.raises(AssertionError, match=r"CONSOLE.*Content Security Policy"):
        opened(browser, path)


def test_a_resharded_checkpoint_is_drawn(browser: list[str], tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", llama(), config=LLAMA | {"num_hidden_layers": 2, "num_attention_heads": 2})
    ckptx.reshard(tmp_path / "hf", tmp_path / "cut", tp=2, pp=2, to="safetensors")
    ckptx.inspect(tmp_path / "cut", html=tmp_path / "layout.html")
    page = opened(browser, tmp_path / "layout.html", tensor="model.layers.1.mlp.down_proj.weight")
    assert len(pieces(page)) == 2
    assert [cell.attributes["data-h"] for cell in page.all("a", "cell") if cell.has("on")] == ["2", "3"]
    page = opened(browser, tmp_path / "layout.html", tensor="model.norm.weight")
    assert len(pieces(page)) == 1 and len(page.all("rect", "hatch")) > 1
    assert "2 replicas" in page.by_id("detail").text
