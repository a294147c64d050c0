"""The layout page: whole, alone and safe whatever tensors are called, small for a large model, readable."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote

import pytest

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.entry import Block, ShardedChunks, TensorEntry
from ckptx.catalog.manifest import LayoutRecord
from ckptx.catalog.region import Region, Shape, full_region
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.layout.placement import Placement, blocks_of_stage
from ckptx.model_view.rank_layout import Layout, Shard, Sharding, layout_by_rank, recorded_mesh
from ckptx.report.html import layout_page
from ckptx.report.html_data import drawn_axes, holder_colors, sharding_text, tensor_name
from ckptx.report.report import count_dtypes
from ckptx.untrusted.printable import one_line
from tests.report.made import inspected
from tests.report.pages import Page, fault_of_page

BF16 = DTYPES_BY_NAME["BF16"]
EVIL = [
    "</script><img src=x onerror=alert(1)>",
    "a.</style></svg><svg onload=alert(1)>.3.weight",
    '"><a href="javascript:alert(1)">x</a>',
    "' onfocus=alert(1) autofocus='",
    "<!--<script>",
    "]]>&lt;b&gt;&amp;",
    "layers.*.literal star",
    "layers.7.literal star",
    "a b+c%20d#e&f=g?h",
    "\u202eright to left \u2028 line \ud800 lone",
    "",
]


@lru_cache(maxsize=4096)
def _columns(shape: Shape, dims: ParallelDims) -> tuple[Block, ...]:
    return blocks_of_stage(shape, Placement(1, (shape[1],)), dims, True)


def catalog_of(rows: Iterable[tuple[str, Shape, int]], dims: ParallelDims) -> Catalog:
    """Tensors by name, shape and stage; those of two dims are cut along the second by tp and the first by FSDP."""
    catalog = Catalog(Path("made"), "dcp", {})
    for rank in range(dims.world_size):
        catalog.files[f"__{rank}_0.distcp"] = 1
    names: dict[tuple[int, int], tuple[str, ...]] = {}
    for at, (name, shape, stage) in enumerate(rows):
        blocks = _columns(shape, dims) if len(shape) == 2 else (Block(0, full_region(shape)),)
        key = (id(blocks), stage)
        if key not in names:
            names[key] = tuple(f"__{dims.ranks_of_stage(stage)[block.rank_in_stage]}_0.distcp" for block in blocks)
        lengths = tuple(BF16.nbytes(block.region.numel) for block in blocks)
        places = array("q", [at * 1000] * len(blocks))
        catalog.tensors[name] = TensorEntry(name, BF16, shape, ShardedChunks(blocks, names[key], places, lengths))
    return catalog


def page_of(catalog: Catalog, dims: ParallelDims | None, path: str = "made") -> tuple[str, Layout]:
    layout = layout_by_rank(catalog, {name: name for name in catalog.tensors}, dims)
    report = inspected(
        tensors=len(catalog.tensors),
        dtypes={"before": count_dtypes(catalog.tensors.values())},
        path=path,
        bytes=catalog.nbytes,
    )
    return layout_page(report, layout), layout


def small(dims: ParallelDims = ParallelDims(4, 2, 2)) -> tuple[str, Layout]:  # noqa: B008 (it is frozen)
    rows = [(f"layers.{layer}.{leaf}", (8, 12), layer % dims.pp) for leaf in ("up", "down") for layer in range(4)]
    return page_of(catalog_of([*rows, ("norm", (8,), dims.pp - 1)], dims), dims)


def evil() -> tuple[str, list[str]]:
    names = [*EVIL, *(f"{name}.0.weight" for name in EVIL if name)]
    dims = ParallelDims(2)
    return page_of(catalog_of([(name, (4, 4), 0) for name in names], dims), dims, f"/tmp/{EVIL[0]}")[0], names


def test_a_page_is_whole_and_alone() -> None:
    text, layout = small()
    assert fault_of_page(text) is None
    page = Page(text)
    assert len(page.all("a", "cell")) == 16
    assert [cell.attributes["href"] for cell in page.all("a", "cell")] == [f"#rank={rank}" for rank in range(16)]
    assert len(page.all("article", "stage")) == 2
    assert "layers 1, 3" in page.all("article", "stage")[1].text
    assert "norm" in page.all("article", "stage")[1].text
    assert len(page.all("a", "row")) == len(layout.groups) == 3
    labels = [cell.attributes["aria-label"] for cell in page.all("a", "cell")]
    assert labels[9] == "rank 9, stage 1, dp 0, tp 1: 96 B, 4 tensors"


@pytest.mark.parametrize("dims", [None, ParallelDims(2)])
def test_names_are_text_whatever_they_say(dims: ParallelDims | None) -> None:
    text, names = evil()
    assert fault_of_page(text) is None
    page = Page(text)
    data = page.data
    found = [
        tensor_name(pattern, numbers)
        for pattern, _, _, placed in data["groups"]
        for _, texts in placed
        for numbers in texts.split(" ")
    ]
    assert sorted(found) == sorted(map(one_line, names))
    links = {unquote(row.attributes["href"] or "", errors="surrogatepass") for row in page.all("a", "row")}
    assert {f"#tensor={one_line(name)}" for name in EVIL[:6]} <= links
    assert page.all("h1")[0].text == EVIL[0].rpartition("/")[2]


@pytest.mark.parametrize(
    ("search", "replace", "fault"),
    [
        ("&lt;img", "<img", "closes|img|script"),
        ("\\u003c/script\\u003e", "</script>", "closes|script"),
        ("</main>", "", "closes"),
        ('"use strict"', '"use sloppy"', "policy"),
        ("script-src 'sha256-", "script-src 'sha256-x", "policy"),
        ("<main>", '<main onclick="x">', "onclick"),
        ("<main>", '<main><a href="https://x">y</a>', "href"),
        ("<main>", '<main><link rel="x">', "link"),
        ("#c0-0", "#c0-9", "nowhere"),
        ('id="c1-0"', 'id="c0-0"', "twice"),
        (":root {", ":root { background: url(https://x/y.png);", "outside"),
    ],
)
def test_an_injected_defect_is_found(search: str, replace: str, fault: str) -> None:
    dims = ParallelDims(2)
    catalog = catalog_of([("</script><img src=x>", (4, 4), 0), ("norm", (4,), 0)], dims)
    text, _ = page_of(catalog, dims)
    assert fault_of_page(text) is None and search in text
    assert re.search(fault, fault_of_page(text.replace(search, replace)) or "")


def test_a_page_of_a_large_model_is_small() -> None:
    """46,000 tensors for 1,024 ranks."""
    dims = ParallelDims(8, 16, 8)
    rows = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{leaf}.weight", (7168, 2048), layer // 4)
        for layer in range(60)
        for expert in range(256)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    text, layout = page_of(catalog_of(rows, dims), dims)
    assert len(layout.groups) == 3 and len(layout.shardings) == 1
    assert len(text) < 1_500_000
    page = Page(text)
    assert page.faults == []
    assert len(page.all("a", "cell")) == 1024


def test_names_without_a_pattern_stay_below_five_megabytes() -> None:
    dims = ParallelDims(8)
    rows = [(f"expert_{index}_with_a_name_of_its_own.weight", (64, 64), 0) for index in range(20_000)]
    text, _ = page_of(catalog_of(rows, dims), dims)
    assert len(text) < 5_000_000
    assert text.count('<a class="row" ') == 400
    assert "19,600 more rows" in text


def test_ranks_that_are_too_many_to_draw_are_said() -> None:
    dims = ParallelDims(8, 16, 64)
    text, _ = page_of(catalog_of([("layers.0.w", (64, 64), 0)], dims), dims)
    assert fault_of_page(text) is None
    assert not Page(text).all("a", "cell")
    assert "Meshes of more than 4,096 ranks are not drawn" in text


def test_files_take_the_place_of_ranks_where_nothing_is_cut() -> None:
    catalog = catalog_of([("layers.0.w", (4,), 0)], ParallelDims(2))
    dims, _ = recorded_mesh(LayoutRecord(1, 1, 1, None), catalog.files)
    page = Page(page_of(catalog, dims)[0])
    assert [cell.attributes["aria-label"] for cell in page.all("a", "cell")] == [
        "__0_0.distcp: 8 B, 1 tensor",
        "__1_0.distcp: 0 B, 0 tensors",
    ]
    assert page.data["unit"] == "file"


def test_a_checkpoint_without_tensors_has_a_page() -> None:
    assert fault_of_page(page_of(Catalog(Path("made"), "dcp", {}), None)[0]) is None


def region(*spans: tuple[int, int]) -> Region:
    return Region(tuple(begin for begin, _ in spans), tuple(size for _, size in spans))


@pytest.mark.parametrize(
    ("shape", "regions", "axes", "said"),
    [
        ((), [region()], (None, None, ()), "not sharded"),
        ((8,), [region((0, 8))], (None, 0, ()), "not sharded"),
        ((8,), [region((0, 8)), region((0, 8))], (None, 0, ()), "not sharded, 2 replicas"),
        ((8,), [region((0, 5)), region((5, 3))], (None, 0, ()), "split 2-way on dim 0"),
        ((4, 6), [region((0, 4), (0, 3)), region((0, 4), (3, 3))], (0, 1, ()), "split 2-way on dim 1"),
        (
            (4, 99, 6),
            [region((0, 2), (0, 99), (0, 6)), region((2, 2), (0, 99), (0, 6))],
            (0, 1, (2,)),
            "split 2-way on dim 0",
        ),
        (
            (4, 9, 6),
            [region((0, 4), (0, 9), (0, 3)), region((0, 4), (0, 9), (3, 3))],
            (1, 2, (0,)),
            "split 2-way on dim 2",
        ),
        ((0, 4), [region((0, 0), (0, 4))], (0, 1, ()), "not sharded"),
    ],
)
def test_a_sharding_in_words_and_which_dims_are_drawn(
    shape: Shape, regions: list[Region], axes: tuple[object, ...], said: str
) -> None:
    held: dict[Region, int] = {}
    pieces = []
    for holder, each in enumerate(regions):
        pieces.append(Shard(holder, each, each in held))
        held[each] = holder
    made = Sharding(shape, tuple(pieces))
    assert tuple(drawn_axes(made)) == axes
    assert sharding_text(made) == said


@pytest.mark.parametrize("replicate", [True, False])
def test_replicas_are_hatched(replicate: bool) -> None:
    dims = ParallelDims(2)
    blocks = blocks_of_stage((4,), None, dims, replicate)
    chunks = ShardedChunks(
        blocks, ("__0_0.distcp", "__1_0.distcp")[: len(blocks)], array("q", [0] * len(blocks)), (8,) * len(blocks)
    )
    catalog = Catalog(Path("made"), "dcp", {"norm": TensorEntry("norm", BF16, (4,), chunks)})
    catalog.files = {"__0_0.distcp": 8, "__1_0.distcp": 8}
    page = Page(page_of(catalog, dims)[0])
    assert len(page.all("rect", "hatch")) == replicate
    assert page.data["shardings"][0]["shards"] == [[[0, 1] if replicate else [0], [0], [4]]]


# --------------------------------------------------------------------------------------------------------------------
# Contrast, by the formulas of WCAG 2 and of OKLab


def _luminance(linear: Iterable[float]) -> float:
    return sum(w * min(1.0, max(0.0, c)) for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _of_hex(color: str) -> float:
    digits = color if len(color) == 6 else "".join(2 * digit for digit in color)
    channels = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return _luminance(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)


def _of_oklch(light: float, chroma: float, hue: float) -> float:
    from math import cos, radians, sin

    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    l = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3  # noqa: E741 (as the formula has it)
    m = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (light - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return _luminance(
        (
            4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
            -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
            -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
        )
    )


def _contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


def _themes() -> list[dict[str, float]]:
    style = (files("ckptx.report") / "page.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): #(\w{3}|\w{6});", part)) for part in style.split("@media", 2)[:2])
    return [{name: _of_hex(color) for name, color in theme.items()} for theme in (light, light | dark)]


@pytest.mark.parametrize("theme", _themes(), ids=["light", "dark"])
def test_text_can_be_read_on_every_ground(theme: dict[str, float]) -> None:
    for ground in ("ground", "surface", "wash"):
        for ink in ("ink", "quiet", "accent", "bad", "good"):
            assert _contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
    for ink in ("ink", "bad"):
        assert _contrast(theme[ink], theme["bad-wash"]) >= 4.5, ink


@pytest.mark.parametrize("dims", [ParallelDims(4, 2, 2), ParallelDims(8, 1, 8), ParallelDims(1, 1, 16), None])
def test_text_can_be_read_on_every_rank(dims: ParallelDims | None) -> None:
    style = (files("ckptx.report") / "layout.css").read_text(encoding="utf-8")
    (chroma,) = set(re.findall(r"oklch\(var\(--l\) ([\d.]+) var\(--h\)\)", style))
    catalog = catalog_of([("layers.0.w", (4, 4), 0)], dims or ParallelDims(2))
    layout = layout_by_rank(catalog, {"layers.0.w": "layers.0.w"}, dims)
    text = _themes()[0]["on-fill"]
    for hue, light in holder_colors(layout):
        assert _contrast(_of_oklch(light, float(chroma), hue), text) >= 4.5, (hue, light)


def test_a_contrast_that_is_too_low_shows() -> None:
    assert _contrast(_of_hex("777777"), _of_hex("fff")) < 4.5 < _contrast(_of_hex("595959"), _of_hex("fff"))
    assert _contrast(_of_oklch(0.45, 0.105, 255), _of_hex("16181c")) < 4.5
    assert _of_oklch(1.0, 0.0, 0.0) == pytest.approx(1.0, abs=1e-3)
