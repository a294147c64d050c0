"""Options as they are given, parsed once for the command line and the Python API."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptx
from ckptx.errors import UnsupportedError, UsageError
from ckptx.options.commands import COMMANDS, tables_of, unknown_option_error
from ckptx.options.conversion import ToDcpOptions, ToHfOptions, ToMegatronOptions
from ckptx.options.forecast import ForecastOptions
from ckptx.options.help import make_help, section_titles, size_note
from ckptx.options.option import REPORT, Option, Options, is_class, settings_of
from ckptx.options.sizes import GPU_GIB, default_workers, parse_gpu_memory, parse_size
from ckptx.options.step import GpuName
from ckptx.options.to_peft import ToPeftOptions
from tests.support.command_arguments import arguments_of


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9), ("5GiB", 5 << 30), ("256mb", 256 * 10**6), ("1.5 KiB", 1536), ("7", 7), (7, 7), ("7B", 7),
        (" 2 TB ", 2 * 10**12),
    ],
)  # fmt: skip
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text, "--x") == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "5 XB", "GB", "1e9", "0.1", "5GB5", "nan", "x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"--x: .* is not a size"):
        parse_size(text, "--x")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GB", 80 << 30), ("80GiB", 80 << 30), ("80 gb", 80 << 30), ("1.5TB", 1536 << 30), ("512MB", 512 << 20),
     (80 << 30, 80 << 30), (str(80 << 30), 80 << 30), ("9000B", 9000)],
)  # fmt: skip
def test_gpu_memory_is_counted_as_vendors_do(text: str | int, nbytes: int) -> None:
    assert parse_gpu_memory(text, "--x") == nbytes
    assert ForecastOptions("m", gpu_memory=text).gpu_bytes == nbytes


def _functions() -> list[tuple[str, Any, list[str]]]:
    """Each command with a Python function: its name, the function, and its arguments up to the first option."""
    found = []
    for words, command in COMMANDS.items():
        if command.function:
            name = command.function.partition(":")[2]
            direction = words.split()[1:] if name == "convert" else []
            required = [each for each in settings_of(command.option_tables[0]).values() if each.is_required]
            paths = ["there"] * len([each for each in required if each.name != "direction"])
            found.append((words, getattr(ckptx, name), [*direction, *paths]))
    return found


@pytest.mark.parametrize(
    "hint", [list[str], tuple[int, ...], Sequence[str], Callable[[int], str], dict[str, int], int | None]
)
def test_generic_types_are_not_classes(hint: Any) -> None:
    """`isinstance(list[str], type)` is true in Python 3.10, and `isinstance(x, list[str])` raises there."""
    assert not is_class(hint)
    assert all(is_class(each) for each in (int, list, Sequence, Callable, Path))


_WRONG = (3.5, b"x", {"a": 1}, object(), True, 7, "text", ["text"], lambda: None)


@pytest.mark.parametrize(("words", "function", "paths"), _functions(), ids=[each[0] for each in _functions()])
def test_values_of_a_wrong_type_are_type_errors(words: str, function: Any, paths: list[str]) -> None:
    """Every parameter of every function, with values of every type that its own type does not accept."""
    tables = COMMANDS[words].option_tables
    selectors = {"run", "search", "direction"}
    checked = set()
    for table in tables:
        chosen = {name: True for name in selectors if name in settings_of(table) and table is not tables[0]}
        for name, setting in settings_of(table).items():
            if name in selectors or setting.is_required:
                continue
            accepted, _ = setting.accepted_types
            for value in _WRONG:
                is_accepted = isinstance(value, accepted) and (type(value) is not bool or bool in accepted)
                if is_accepted and not (setting.kind is tuple and value == b"x"):
                    continue
                with pytest.raises(TypeError, match=rf"^{name}: .* must be ") as caught:
                    function(*paths, **chosen, **{name: value})
                assert isinstance(caught.value, UsageError)
                checked.add(name)
    assert (
        checked
        == {name for table in tables for name, each in settings_of(table).items() if not each.is_required} - selectors
    )


@pytest.mark.parametrize(("words", "function", "paths"), _functions(), ids=[each[0] for each in _functions()])
def test_arguments_of_a_wrong_type_are_type_errors(words: str, function: Any, paths: list[str]) -> None:
    direction = paths[:-2] if words.startswith("convert ") else []
    paths = paths or ["there"]
    for value in (3, b"a", ["a"], True, *([None] if words != "forecast" else [])):
        with pytest.raises(TypeError, match=r"\w+: .* must be a path|no value for"):
            function(*direction, *([value] * (len(paths) - len(direction))))
    with pytest.raises(TypeError, match="does not take --nonsense"):
        function(*paths, nonsense=1)


@pytest.mark.parametrize("text", ["80", 80, " 24 ", 2**30 - 1, "0"])
def test_gpu_memory_without_a_unit_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError, match=rf'--gpu-memory: "{text}" has no unit; write {str(text).strip()}GB'):
        ForecastOptions("m", gpu_memory=text)


def test_gpus_have_a_little_less_memory_than_their_names_say() -> None:
    assert set(get_args(GpuName)) == GPU_GIB.keys()
    named = {"h100": 80, "h200": 141, "b200": 180, "l40s": 45, "l4": 22.5, "a10g": 22.5, "t4": 15, "rtx4090": 24}
    named |= {"mi300x": 192, "v100-32gb": 32}
    for name, gib in GPU_GIB.items():
        total = named.get(name) or int(name.rpartition("-")[2].removesuffix("gb"))
        assert 0.96 * total < gib < total
        assert ForecastOptions("m", gpu=name).gpu_bytes == int(gib * 2**30)  # type: ignore[arg-type]


def test_defaults() -> None:
    options = ToHfOptions("dcp2hf", "in", "out")
    assert (options.dtype, options.tied, options.source_prefix_or_none, options.base) == ("auto", "auto", None, None)
    assert (options.shard_bytes, options.max_shard_size, options.buffer_bytes) == (5 * 10**9, None, 256 * 10**6)
    assert options.threads == default_workers() >= 1


def test_none_is_not_set() -> None:
    given: dict[str, Any] = {"source_prefix": None, "files": None, "tied": None, "workers": None, "overwrite": None}
    assert ToDcpOptions("to-dcp", "in", "out", **given) == ToDcpOptions("to-dcp", "in", "out")


@pytest.mark.parametrize(("kind", "is_path"), [(str, False), (str | Path, True), (str | Path | None, True)])
def test_the_type_of_an_option_says_whether_it_is_a_path(kind: Any, is_path: bool) -> None:
    made = type("Made", (Options,), {"__annotations__": {"x": Annotated[kind, Option("", REPORT)]}, "x": ""})
    assert settings_of(made)["x"].is_path is is_path
    if is_path:
        with pytest.raises(UnsupportedError, match="is a URL"):
            made(x="s3://bucket/x")
    else:
        assert made(x="s3://bucket/x").x == "s3://bucket/x"


@pytest.mark.parametrize("kind", [float, dict[str, str], Path])
def test_an_option_of_a_type_that_nothing_reads_is_refused(kind: Any) -> None:
    made = type("Made", (Options,), {"__annotations__": {"x": Annotated[kind, Option("", REPORT)]}, "x": None})
    with pytest.raises(TypeError, match=r"Made\.x: an option is a bool, int"):
        settings_of(made)


def test_spellings_of_a_dtype() -> None:
    assert {ToHfOptions("to-hf", "in", "out", dtype=name).dtype for name in ("bf16", "bfloat16")} == {"bf16"}


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("to-dcp", {"nonsense": 1}, "convert to-dcp does not take --nonsense"),
        ("to-dcp", {"worker": 1}, "convert to-dcp does not take --worker; did you mean --workers?"),
        ("to-dcp", {"index": "auto"}, "convert to-dcp does not take --index (convert to-hf and merge do)"),
        ("to-hf", {"files": 2}, "convert to-hf does not take --files (convert to-dcp, reshard and merge do)"),
        ("to-hf", {"tied": "alias"}, "--tied alias requires DCP output; in safetensors two names cannot share bytes"),
        ("to-hf", {"prefix": "model."}, "convert to-hf does not take --prefix; use --source-prefix"),
        ("to-dcp", {"workers": True}, "workers: True must be an integer"),
        ("to-dcp", {"workers": 1.5}, "workers: 1.5 must be an integer"),
        ("to-dcp", {"workers": 2000}, "--workers: 2000 must be between 1 and 1,024"),
        ("to-dcp", {"files": 0}, "--files: 0 must be between 1 and 65,536"),
        ("to-dcp", {"tp": 300, "pp": 300}, "--tp x --pp x --dp-shard: 90,000 ranks must be at most 65,536"),
        ("to-dcp", {"max_memory": "1MB", "workers": 1}, "--max-memory: 1,000,000 bytes for 1 worker must be at least"),
        ("to-dcp", {"max_memory": "some"}, '--max-memory: "some" is not a size; write 5GB, 256MiB'),
        ("to-dcp", {"dtype": "int8"}, '--dtype: "int8" must be one of auto, base, bf16, fp16, fp32'),
        ("to-dcp", {"dtype": 8}, "dtype: 8 must be one of auto, base, bf16, fp16, fp32"),
        ("to-dcp", {"overwrite": 1}, "overwrite: 1 must be true or false"),
        ("to-dcp", {"prefix": 1}, "prefix: 1 must be a string"),
        ("to-dcp", {"tp_plan": "x"}, "--tp-plan requires --tp 2 or more"),
        ("to-dcp", {"tp_plan": "x", "tp": 1}, "--tp-plan requires --tp 2 or more"),
        ("to-dcp", {"allow_overflow": True}, "--allow-overflow requires --dtype"),
        ("to-xy", {}, "direction: 'to-xy' must be one of to-dcp, hf2dcp, to-hf, dcp2hf"),
        ("verify", {"tp": 2}, "--tp requires --run"),
        ("verify", {"gpus": 2}, "verify does not take --gpus (forecast --search does)"),
        ("verify", {"run": True, "dtype": "bf16"}, "verify --run does not take --dtype; use --compute-dtype"),
        ("verify", {"run": True, "workers": 2}, "verify --run does not take --workers (convert to-dcp, convert to-hf,"),
        ("forecast", {"set": ["a=1"]}, "forecast does not take set; use overrides, which is --set"),
        ("forecast", {"no_loss": True}, "forecast does not take no_loss; use loss='none', which is --no-loss"),
        ("verify", {"run": True, "no_backward": True}, "verify --run does not take no_backward; use backward=False"),
        ("forecast", {"gpus": 2}, "--gpus requires --search"),
        ("forecast", {"search": True, "gpus": 2}, "--search requires --gpu-memory or --gpu"),
        ("forecast", {"search": True, "gpus": 2, "gpu_memory": "1GB", "schedule": "gpipe"}, "forecast --search does"),
        ("forecast", {"gpu": "h300"}, '--gpu: "h300" must be one of h100, h200, '),
        ("forecast", {"gpu": "h100", "gpu_memory": "80GB"}, "--gpu-memory cannot be combined with --gpu; leave out"),
        ("forecast", {"gpu_memory": "80"}, '--gpu-memory: "80" has no unit; write 80GB'),
        ("forecast", {"gpu_memory": 80}, '--gpu-memory: "80" has no unit; write 80GB'),
        ("forecast", {"overrides": ["a=b"]}, "--set requires --recipe"),
        ("forecast", {"recipe": "r"}, "a and --recipe both name a model; leave out one of them"),
        ("forecast", {"loss": "some"}, '--loss: "some" must be one of sharded, full, none'),
    ],
)  # fmt: skip
def test_refusals(function: str, options: dict[str, Any], message: str) -> None:
    paths = {"forecast": ("a",), "verify": ("a", "b")}.get(function, (function, "a", "b"))
    with pytest.raises(UsageError) as error:
        getattr(ckptx, function if function in ("forecast", "verify") else "convert")(*paths, **options)
    assert str(error.value).startswith(message)


def test_the_hint_for_an_unknown_option_names_a_command_without_its_mode_if_both_take_it() -> None:
    names = {name for command in COMMANDS.values() for table in tables_of(command) for name in settings_of(table)}
    hints: dict[str, list[str]] = {}
    for command in COMMANDS.values():
        for table in command.option_tables:
            for name in sorted(names - settings_of(table).keys()):
                message = str(unknown_option_error(table.command, [table], name))
                if message.endswith(("does)", "do)")):
                    words = message.partition("(")[2].removesuffix(" does)").removesuffix(" do)")
                    hints[message] = re.split(", | and ", words)
    assert any("forecast --search" in each for each in hints.values())
    for message, commands in hints.items():
        assert not {each.partition(" --")[0] for each in commands if " --" in each} & set(commands), message
    assert str(unknown_option_error("convert to-hf", [], "tp")) == (
        "convert to-hf does not take --tp (convert to-dcp, reshard, merge, verify --run and forecast do)"
    )


@pytest.mark.parametrize("given", [(), ("a",), ("a", "b", "c")])
def test_a_call_without_its_arguments_is_no_call(given: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match=r"reshard\(\) (has no value for|takes 2 positional)"):
        ckptx.reshard(*given)
    with pytest.raises(TypeError, match="two values for 'dst'"):
        ckptx.reshard("a", "b", dst="c")


FUNCTIONS = {words: command for words, command in COMMANDS.items() if command.function}


@pytest.mark.parametrize("words", FUNCTIONS)
def test_a_signature_has_each_option_with_its_type_and_default(words: str) -> None:
    module, _, name = FUNCTIONS[words].function.partition(":")
    function = getattr(ckptx, name)
    function = getattr(function, name, function)  # the package that can be called
    parameters = inspect.signature(function).parameters
    # If several commands share a function, the docstring has the help of the first one.
    tables = [
        each
        for command in FUNCTIONS.values()
        if command.function == FUNCTIONS[words].function
        for each in command.option_tables
    ]
    help_texts = {name: each.annotation.help for table in reversed(tables) for name, each in settings_of(table).items()}
    for table in FUNCTIONS[words].option_tables:
        for setting in settings_of(table).values():
            parameter = parameters[setting.name]
            assert "Option(" not in str(parameter)
            if setting.name not in ("run", "search", "direction"):
                assert parameter.annotation == setting.type
                assert parameter.default == (inspect.Parameter.empty if setting.is_required else setting.default)
            text = re.sub(r"--([a-z-]+)", lambda found: f"`{found[1].replace('-', '_')}`", help_texts[setting.name])
            text = re.sub(r"\b(SRC|DST|MODEL|REFERENCE|CHECKPOINT)\b", lambda found: f"`{found[1].lower()}`", text)
            assert f" {setting.name}: {text}" in " ".join(function.__doc__.split())
    assert function.__module__ == module


def test_the_docstring_of_convert_names_the_direction_of_an_option() -> None:
    tables = ToDcpOptions, ToHfOptions, ToMegatronOptions, ToPeftOptions
    directions = dict[str, list[str]]()
    for table in tables:
        for name in settings_of(table):
            directions.setdefault(name, []).append(table.command.split()[1])
    arguments = re.split(r"\n        (?=\w+: )", (ckptx.convert.__doc__ or "").partition("Returns:")[0])[1:]
    assert directions.keys() == {each.split(":")[0] for each in arguments}
    for argument in arguments:
        text, found = " ".join(argument.split()), directions[argument.split(":")[0]]
        limit = "" if len(found) == len(tables) else f" Only with {' and '.join(found)}."
        assert text.endswith(limit)
        assert limit or " Only with " not in text


def test_every_choice_is_one_of_a_command_line() -> None:
    """Each option has help that is a sentence, and each name of a requirement is one of its table."""
    for command in COMMANDS.values():
        for table in tables_of(command):
            settings = settings_of(table)
            for setting in settings.values():
                assert setting.annotation.help.endswith("."), setting
                option = setting.option
                if option is not None:
                    needed = [each if isinstance(each, str) else each[0] for each in option.requires]
                    assert {*needed, *option.excludes} <= settings.keys()
                    assert option.default is not None or setting.default is not None, f"{setting.name}: its default?"


_REFUSED = """
import sys
from ckptx.cli.main import main
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "yaml"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent())
for words in WORDS:
    sys.argv = ["ckptx", *words]
    try:
        main()
    except SystemExit as leave:
        print(leave.code)
"""


def test_usage_errors_need_no_torch(tmp_path: Path) -> None:
    words = [
        ["inspect", "a", "--source-prefx", "x"],
        ["convert", "to-dcp", "a", "b", "--dtype", "int8"],
        ["convert", "to-hf", "a", "b", "--workers", "0"],
        ["reshard", "a", "b", "--tp", "x"],
        ["diff", "a"],
        ["verify", "a", "b", "--tp", "2"],
        ["verify", "a", "b", "--run", "--device", "tpu"],
        ["forecast", "a", "--seq", "1"],
        ["forecast", "a", "--search"],
        ["robustness", "llama_tiny", "--device", "tpu"],
        ["robustness"],
        ["env", "--tp", "2"],
        *([*each.split(), *arguments_of(each, "a", "b"), "--no-such-option"] for each in COMMANDS),
    ]
    program = _REFUSED.replace("WORDS", repr(words))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2"] * len(words), done.stderr
    assert len(done.stderr.splitlines()) == len(words)


@pytest.mark.slow
def test_a_type_checker_knows_the_arguments(tmp_path: Path) -> None:
    """A misspelled name, a word that is none, a value of another type: each is found before anything runs."""
    lines = [
        'ckptx.convert("hf2dcp", "a", "b", dtype="bf16", workers=2, max_memory="1GB", base=None)',
        'ckptx.reshard("a", Path("b"), tp=4, pp=2, to="dcp", tp_plan=Path("plan.json"))',
        'ckptx.convert("hf2dcp", "a", "b", dtyp="bf16")',
        'ckptx.convert("hf2dcp", "a", "b", dtype="int4")',
        'ckptx.reshard("a", "b", tp="4")',
        'ckptx.verify("a", Path("b"), dtype="bf16").parameters',
        'ckptx.verify("a", "b", run=True, tp=2, compute_dtype="fp32", cache_dir="c").max_abs',
        'ckptx.verify("a", "b", tp=2)',
        'ckptx.verify("a", "b", run=True, compute_dtype="int8")',
        'ckptx.verify("a", "b", run=True).parameters',
        'ckptx.convert("dcp2hf", "a", "b", files=2)',
        'ckptx.forecast("a", search=True, gpus=2, gpu_memory="1GB").gpus',
        'ckptx.forecast("a", tp=2).by_pipeline_rank',
        'ckptx.forecast("a", tp=2, turbo=True)',
        'ckptx.robustness("a", overrides=["x=1"], turbo=True)',
    ]
    (tmp_path / "use.py").write_text("\n".join(["from pathlib import Path", "import ckptx", *lines]) + "\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            "pyproject.toml",
            "--cache-dir",
            tmp_path / "cache",
            tmp_path / "use.py",
        ],
        capture_output=True,
        text=True,
    )
    found = [line.split(":")[1] for line in done.stdout.splitlines() if "error" in line and "use.py" in line]
    assert [*dict.fromkeys(found)] == ["5", "6", "7", "10", "11", "12", "13", "16", "17"], done.stdout + done.stderr


def test_help_names_what_an_option_depends_on() -> None:
    texts = make_help(tables_of(COMMANDS["verify"]))
    assert texts["tp_plan"].full_text().endswith(" Requires --run and --tp 2 or more.")
    assert texts["tp_plan"].full_text(with_condition=False).endswith(" Requires --tp 2 or more.")
    assert texts["workers"].full_text().endswith(" Not with --run.")
    assert "Requires" not in texts["run"].full_text()
    assert not texts["as_json"].condition and not texts["source_prefix"].condition
    titles = section_titles([*texts.values()])
    assert titles["Layout"] == "Layout (with --run)" and titles["Execution"] == "Execution (without --run)"
    assert titles["Both checkpoints"] == "Both checkpoints"
    assert "Source" not in titles and "Source" in section_titles([*make_help(tables_of(COMMANDS["reshard"])).values()])
    search = make_help(tables_of(COMMANDS["forecast"]))["search"]
    assert search.full_text().endswith(" Requires --gpus.")


@given(st.sampled_from(["verify", "forecast"]), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_help_does_not_depend_on_the_order_of_the_fields(words: str, random: Any) -> None:
    tables = tables_of(COMMANDS[words])
    shuffled = []
    for table in tables:
        fields = [*settings_of(table).values()]
        random.shuffle(fields)
        members = {each.name: each.default for each in fields if not each.is_required}
        hints = {each.name: Annotated[each.type, each.annotation] for each in fields}
        class_vars = {name: getattr(table, name) for name in ("command", "requirements", "headings")}
        shuffled.append(type(table.__name__, (Options,), {**members, **class_vars, "__annotations__": hints}))
    assert make_help(shuffled) == make_help(tables)


def test_help_names_the_units_of_sizes_once() -> None:
    notes = {words: size_note(tables_of(command)) for words, command in COMMANDS.items()}
    assert notes["inspect"] == ""
    for words, takes_bytes, takes_gpu_memory in [
        ("convert to-hf", True, False), ("verify", True, True), ("forecast", False, True), ("robustness", False, True),
    ]:  # fmt: skip
        assert ("5GB is 5 x 1000^3 bytes" in notes[words]) == takes_bytes, words
        assert ("80GB is 80 GiB" in notes[words]) == takes_gpu_memory, words
    for command in COMMANDS.values():
        assert not [each.text for each in make_help(tables_of(command)).values() if "GiB" in each.text]


def test_every_choice_of_the_loss_is_named_in_its_help() -> None:
    text = make_help(tables_of(COMMANDS["forecast"]))["loss"].text
    assert all(f"{choice} (" in text for choice in settings_of(ForecastOptions)["loss"].main_choices)


def test_the_former_name_of_hf_names_still_works() -> None:
    assert ToHfOptions("to-hf", "a", "b", names="disk").names == "hf"
    assert settings_of(ToHfOptions)["names"].main_choices == ("hf", "model", "torchtitan")
