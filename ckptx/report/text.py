"""Text of reports: the summary that a command prints after a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ckptx.report.mesh_sizes import sizes_text
from ckptx.report.number_formats import (
    bytes_read_text,
    checkpoint_format_name,
    peak_memory_text,
    speed_text,
    stored_text,
    uncompared_text,
    written_text,
)
from ckptx.report.report import Report, counted, human_bytes
from ckptx.untrusted.printable import one_line
from ckptx.wording import first_of

if TYPE_CHECKING:  # a command imports only the report that it returns
    from ckptx.report.documents.comparison import DiffReport, VerifyReport
    from ckptx.report.documents.conversion import ConversionReport
    from ckptx.report.documents.inspection import InspectionReport

T = TypeVar("T")

_MAX_ROWS = 20  # rows of a list that are printed
_MAX_ALIAS_NAMES = 4  # names of one tensor that are printed
_EXPERT_PARALLEL_RULE = "--ep"  # `rule` of the tensors of experts, in `rules`
_RULE_NAMES = {"override": "a built-in rule", "user plan": "--tp-plan"}
# Action of a tie -> how its names are stored.
_TIE_RESULTS = {
    "alias": "one tensor with two names",
    "copy": "stored under both names, as copies",
}
# Source of the facts about a model class that is not in the tables -> how the summary describes the class.
_CLASS_SOURCES = {"meta model": "known from its code", "suffix table": "unknown class"}


def conversion_text(report: ConversionReport) -> str:
    """Return the summary that `convert`, `reshard` and `merge` print."""
    lines = [_output_line(report)]
    if report.dry_run:
        files = report.files or ()
        copies = " (a tied tensor once for each copy)" if report.ledger["target"]["copies"] else ""
        lines[0] += f"; would read {human_bytes(report.bytes_read)}{copies}"
        lines[0] += f"; {human_bytes(report.free_space or 0)} free on the disk"
        rank_texts = {name: _rank_text(row) for row in report.ranks for name in row["files"]}
        for row in _first_rows(files):
            size = f"{human_bytes(row['bytes'])}{_tensors_text(row['tensors'])}"
            lines.append(f"  {row['name']}  {size}{rank_texts.get(row['name'], '')}")
        if len(files) > _MAX_ROWS:
            lines.append(f"  and {counted(len(files) - _MAX_ROWS, 'more file')}, --json lists all")
        if report.exit:
            free = human_bytes(report.free_space or 0)
            lines.append(f"NOT ENOUGH SPACE: {human_bytes(report.output_bytes)} required, {free} free")
    if report.architecture:
        known_from = report.architecture["known_from"]
        class_source = "" if known_from == "table" else f" ({_CLASS_SOURCES.get(known_from, known_from)})"
        lines.append(f"architecture: {report.architecture['class']}{class_source}")
    if report.config_check and report.config_check["note"]:
        lines.append(f"config.json: {report.config_check['note']}")
    if report.names:
        lines.append(_names_line(report.names))
    if report.megatron:
        lines.append(_megatron_line(report.megatron))
    if report.prefix or report.output_prefix:
        lines.append(_prefix_line(report))
    lines.append(f"dtypes: {_dtypes_text(report)}")
    if report.dequantized:
        lines += [f"dequantized: {_scheme_text(row)}" for row in report.dequantized["schemes"]]
    if report.quantized:
        lines += [f"quantized: {_scheme_text(row)}" for row in report.quantized["schemes"]]
        unchanged, encoded = report.quantized["unchanged"], report.quantized["encoded"]
        if unchanged or encoded:
            more = f" ({first_of(encoded)})" if encoded else ""
            lines.append(
                f"quantized: {unchanged:,} unchanged and copied from the base, "
                f"{len(encoded):,} changed and quantized{more}"
            )
    if report.adapters:
        lines += [_adapter_line(row) for row in report.adapters]
    if report.merged_weights is not None:
        total = report.ledger["target"]["tensors"]
        lines.append(f"merged: {counted(report.merged_weights, 'tensor')} of {total:,}")
    if report.layout is not None and (len(report.ranks) > 1 or report.command == "reshard"):
        lines += _layout_lines(report, report.layout)
    is_unknown_class = (report.architecture or {}).get("known_from") == "suffix table"
    ties = _first_rows(
        [
            row
            for row in report.ties
            if (row["declared"] or row["action"] in (*_TIE_RESULTS, "single"))
            and not (is_unknown_class and row["stored"] == "missing")  # names that such a model need not have
        ]
    )
    lines += map(_tie_line, ties)
    names_in_ties = {name for row in ties for name in row["output_names"]}
    aliases = [(name, stored) for name, stored in report.aliases.items() if not {name, stored} <= names_in_ties]
    lines += [f"alias: {name} = {stored}" for name, stored in _first_rows(aliases)]
    lines += _dropped_lines(report)
    lines += [f"config.json: {row['key']}: {_edit_text(row)}" for row in report.config_edits]
    names = report.dtype_unchanged
    if names:
        lines.append(
            f"not cast by --dtype: {counted(len(names), 'tensor')} ({names[0]}{', ...' if len(names) > 1 else ''})"
        )
    lines.append(_source_line(report))
    lines.append(cost_text(report))
    return "\n".join(lines)


def _scheme_text(row: Mapping[str, Any]) -> str:
    """Return the scheme of quantized weights: `45 weights (fp8, blocks of 128 x 128, F32 scales), 1.20 GiB`."""
    return f"{counted(row['tensors'], 'weight')} ({row['scheme']}), {human_bytes(row['bytes'])}"


def _adapter_line(row: Mapping[str, Any]) -> str:
    """Return an adapter that was merged: `adapter: PATH, LoRA, rank 16, ..., replaces 2 tensors`."""
    factor = f" x {row['factor']:g}" if row["factor"] != 1 else ""
    replaced = f", replaces {counted(len(row['replaced']), 'tensor')}" if row["replaced"] else ""
    return f"adapter: {row['path']}{factor}, {adapter_text(row)}{replaced}"


def adapter_text(row: Mapping[str, Any]) -> str:
    """Return settings and modules of an adapter: `LoRA, rank 16, alpha 32 (scaling 2), q_proj, v_proj (64 modules)`."""
    kind = " with ".join(["rsLoRA" if row["rslora"] else "LoRA", *(["DoRA"] if row["dora"] else [])])
    numbers = [", ".join(f"{value:g}" for value in row[key]) for key in ("ranks", "alphas", "scalings")]
    if not row["layers"]:
        return "no LoRA modules"
    alpha = f"alpha {numbers[1]} (scaling {numbers[2]})" if row["alphas"] else "alpha not recorded"
    settings = f"{kind}, rank {numbers[0]}, {alpha}"
    return f"{settings}, {', '.join(row['modules'])} ({counted(row['layers'], 'module')})"


def _names_line(names: Mapping[str, Any]) -> str:
    """Return the naming schemes: `names: torchtitan -> hf, rows permuted within heads: q_proj (32 heads), ...`."""
    modules = [f"{row['name'].split('.')[-2]} ({counted(row['heads'], 'head')})" for row in names["permuted"]]
    permuted = f", rows permuted within heads: {', '.join(modules)}" if modules else ""
    return f"names: {names['before']} -> {names['after']}{permuted}"


def _megatron_line(row: Mapping[str, Any]) -> str:
    """Return the layout of a Megatron checkpoint, what it does not have, and how Megatron-LM loads it without that."""
    rows, padded = row["vocabulary_rows"], row["padded_rows"]
    padding = (
        f"padded with zeros from {rows:,} to {padded:,} rows" if padded > rows else f"of {rows:,} rows, not padded"
    )
    head = "untied output head" if row["is_head_separate"] else "output head tied to the embedding"
    return (
        f"Megatron: {row['layers']} layers, vocabulary {padding}, {head}; weights only (no optimizer state, no "
        "_extra_state of TransformerEngine): load with --dist-ckpt-strictness log_unexpected"
    )


def _prefix_line(report: ConversionReport) -> str:
    """Return the prefix of the model's names, and whether the output has it."""
    if report.prefix and report.output_prefix != report.prefix:
        return f'prefix: "{report.prefix}" removed from names'
    return f'prefix: "{report.output_prefix}" {"kept in" if report.prefix else "added to"} names'


def _tie_line(row: Mapping[str, Any]) -> str:
    """Return how a tied pair is stored, and why: `tied: lm_head.weight = embed.weight, stored ... (source: ...)`.

    The names are those of the output, and those of the source if the output lacks one of them.
    """
    evidence, stored_names = f"(source: {row['evidence']})", [name for name in row["output_names"] if name is not None]
    target, source = stored_names if len(stored_names) == 2 else (row["name"], row["tied_to"])
    if row["action"] == "single":
        stored = f"stored as {stored_names[0]}" if stored_names else "stored under one name"
        return f"tied: {target} = {source}, {stored} {evidence}"
    if row["action"] in _TIE_RESULTS:
        return f"tied: {target} = {source}, {_TIE_RESULTS[row['action']]} {evidence}"
    return f"not tied: {target}, {source} {evidence}"


def _edit_text(edit: dict[str, Any]) -> str:
    return "removed" if edit["after"] is None else f"{edit['before']!r} -> {edit['after']!r}"


def _output_line(report: ConversionReport) -> str:
    """Return the contents of the output, and how much of it this run wrote."""
    target = report.ledger["target"]
    stored = stored_text(target["stored"], copies=target["copies"], aliases=target["aliases"])
    tensors = counted(report.tensors, "tensor") + (f" ({stored})" if stored else "")
    content = f"{tensors}, {written_text(report.output_bytes, report.bytes_written)}"
    if report.dry_run:
        return f"would write {content}"
    return f"wrote {content}" if report.bytes_written else f"wrote nothing, the output is complete: {content}"


def _source_line(report: ConversionReport) -> str:
    """Return the source tensors by outcome: `source tensors: 43 (20 written, 1 tied to a written one, 22 dropped)`."""
    ledger = report.ledger
    stored = ledger["target"]["stored"]
    parts = [f"{ledger['written']:,} written"]
    if ledger["written"] not in (
        stored,
        ledger["target"]["tensors"],
    ):  # fused or split; copies have a count of their own
        parts[0] += f" as {counted(stored, 'tensor')}"
    if ledger["tied"]:
        parts.append(f"{ledger['tied']:,} tied to {'a written one' if ledger['tied'] == 1 else 'written ones'}")
    if ledger["decoded"]:
        parts.append(f"{ledger['decoded']:,} used to dequantize weights")
    if ledger["dropped"]:
        parts.append(f"{ledger['dropped']:,} dropped")
    return f"source tensors: {ledger['source']:,} ({', '.join(parts)})"


def _dropped_lines(report: ConversionReport) -> list[str]:
    """Return what was dropped, by reason: `dropped: 24 tensors, 3.64 MiB (optimizer state is not converted to HF)`."""
    lines = []
    optimizer, objects = report.dropped_optimizer or {"tensors": 0, "bytes": 0}, report.objects
    for reason, count in Counter(row["reason"] for row in report.dropped).items():
        is_optimizer = reason.startswith("optimizer state") and count == optimizer["tensors"]
        size = f", {human_bytes(optimizer['bytes'])}" if is_optimizer else ""
        lines.append(f"dropped: {counted(count, 'tensor')}{size} ({reason})")
    if objects and objects["count"] and not objects.get("is_copied"):
        lines.append(f"dropped: {counted(objects['count'], 'pickled object')}, {human_bytes(objects['bytes'])}")
    return lines


def _layout_lines(report: ConversionReport, layout: dict[str, Any]) -> list[str]:
    """Return the mesh, the layers of each stage, and the number of tensors sharded or replicated by each TP rule."""
    rules = report.rules or ()
    sizes = [row["bytes"] for row in report.ranks]
    mean = sum(sizes) / len(sizes)
    mesh = sizes_text(layout)
    per_rank = f"file bytes per rank: mean {human_bytes(mean)}, max {human_bytes(max(sizes))}"
    output = f" as {checkpoint_format_name(report.format)}" if report.format else ""
    lines = [f"mesh: {mesh}{output}, {per_rank if len(sizes) > 1 else f'1 rank, {human_bytes(mean)}'}"]
    if layout["pp"] > 1:
        if "virtual_stages" in layout:
            lines.append(f"  {layout['virtual_stages']} stages per pipeline rank, {layout['schedule_style']}")
        for stage, spans in enumerate(layout["stages"][:_MAX_ROWS]):
            layers = ", ".join(f"{path}.{first}-{stop - 1}" for path, first, stop in spans) or "no layers"
            lines.append(f"  stage {stage}: {layers}")
        if len(layout["stages"]) > _MAX_ROWS:
            lines.append(f"  and {counted(len(layout['stages']) - _MAX_ROWS, 'more stage')}")
    expert_counts: Counter[str] = Counter()
    counts: Counter[tuple[str, bool]] = Counter()
    for row in rules:
        if row["rule"] == _EXPERT_PARALLEL_RULE:
            expert_counts[row["reason"]] += row["tensors"]
        elif layout["tp"] > 1:
            counts[row["rule"], row["dim"] is not None] += row["tensors"]
    lines += [f"  EP: {counted(count, 'tensor')}: {reason}" for reason, count in expert_counts.items()]
    for (rule, is_sharded), count in counts.items():
        if rule == "default":
            patterns = [row["pattern"] for row in rules if row["rule"] == rule]
            lines.append(
                f"  TP: {counted(count, 'tensor')} replicated, not named in the plan ({_first_pattern(patterns)})"
            )
        else:
            placement = "sharded" if is_sharded else "replicated"
            lines.append(f"  TP: {counted(count, 'tensor')} {placement} by {_rule_text(rule)}")
    return lines


def _first_pattern(patterns: Sequence[str]) -> str:
    return patterns[0] + (", ..." if len(patterns) > 1 else "")


def _rank_text(row: Mapping[str, Any]) -> str:
    """Return the rank of a file with its coordinates: `  rank 1 (stage 0, dp 0, tp 1)`."""
    return f"  rank {row['rank']} (stage {row['stage']}, dp {row['dp']}, tp {row['tp']})"


def _rule_text(rule: str) -> str:
    """Return the origin of a TP rule in words: `the model's plan (transformers 5.23.0)`."""
    # "model plan (transformers 5.23.0)" -> "the model's plan (transformers 5.23.0)"
    return f"the model's {rule[6:]}" if rule.startswith("model plan") else _RULE_NAMES.get(rule, rule)


def architecture_text(report: InspectionReport) -> str:
    """Return the model class, or that it is unknown: without a config nothing names it."""
    reason = "" if "config.json" in report.other_files else " (no config.json)"
    return report.architecture or f"unknown{reason}"


def inspect_text(report: InspectionReport) -> str:
    """Return the summary that `inspect` prints."""
    lines = [
        f"{report.path}",
        f"  format        {checkpoint_format_name(report.format)}, {counted(len(report.files), 'file')}",
        f"  architecture  {architecture_text(report)}",
        f"  tensors       {_tensor_total_text(report)}, {human_bytes(report.bytes)}",
        f"  parameters    {report.parameters:,}",
        f"  dtypes        {_counts_text(report.dtypes['before'])}",
    ]
    if report.adapter:
        if report.adapter["has_config"]:
            lines = [line for line in lines if not line.startswith("  architecture")]
        lines.append(f"  adapter       {adapter_text(report.adapter)}")
        if report.adapter["replaced"]:
            replaced = report.adapter["replaced"]
            lines.append(f"  replaces      {counted(len(replaced), 'tensor')}: {_first_names(replaced)}")
        if report.adapter["has_config"]:
            lines.append(f"  trained on    {report.adapter['base'] or 'unknown (no base_model_name_or_path)'}")
    if report.config_check and report.config_check["checked"] == "nothing":
        lines.append("  not checked   names, layers and shapes, which are unknown for this class and config")
    if report.prefix:
        lines.append(f'  prefix        "{report.prefix}"')
    optimizer = report.optimizer
    if optimizer["tensors"]:
        lines.append(f"  optimizer     {counted(optimizer['tensors'], 'tensor')}, {human_bytes(optimizer['bytes'])}")
    if report.other_tensors:
        lines.append(
            f"  other         {counted(len(report.other_tensors), 'tensor')}: {_first_names(report.other_tensors)}"
        )
    if report.objects:
        lines.append(f"  objects       {report.objects} pickled, not loaded")
    lines += [f"  alias         {_alias_text(names[::-1])}" for names in _first_rows(report.alias_groups)]
    lines += [
        f"  tied          {' = '.join(names)}, stored as copies, counted once in parameters"
        for names in _first_rows(report.tied_groups)
    ]
    lines += [
        f"  tied          {absent} = {stored}, stored as {stored}" for absent, stored in _first_rows(report.absent_ties)
    ]
    if report.unknown_tensors:
        lines.append(
            f"  unknown       {counted(len(report.unknown_tensors), 'tensor')}: {_first_names(report.unknown_tensors)}"
        )
    if report.quantization:
        plain = report.quantization["not_quantized"]
        lines += [f"  quantized     {_scheme_text(row)} with scales" for row in report.quantization["schemes"]]
        lines.append(f"  not quantized {counted(plain['tensors'], 'tensor')}, {human_bytes(plain['bytes'])}")
        lines.append(f"  size in BF16  {human_bytes(report.quantization['dequantized_bytes'])}, if dequantized")
    if report.other_files:
        lines.append(f"  other files   {_first_names(report.other_files, 12)}")
    if report.selected_tensors is not None:
        lines += _table(
            ("tensor", "dtype", "shape", "bytes", "files"),
            [
                [row["name"], row["dtype"], str(row["shape"]), human_bytes(row["bytes"]), ", ".join(row["files"])]
                for row in report.selected_tensors
            ],
        )
    elif report.by_rank is None:
        rows = [[row["pattern"], f"{row['tensors']:,}", human_bytes(row["bytes"])] for row in report.groups]
        lines += _table(("names", "tensors", "bytes"), _first_rows(rows))
    if report.by_rank is not None:
        from ckptx.report.ranks import rank_lines  # not needed for other reports

        lines += rank_lines(report.by_rank, report.ranks)
    if report.html:
        lines.append(f"  page          {report.html}")
    return "\n".join(lines)


def _alias_text(names: Sequence[str]) -> str:
    """Return the names of one tensor: `a = b`, or `a = b = c = d, and 8 more`."""
    more = f", and {len(names) - _MAX_ALIAS_NAMES:,} more" if len(names) > _MAX_ALIAS_NAMES else ""
    return " = ".join(names[:_MAX_ALIAS_NAMES]) + more


def _tensor_total_text(report: InspectionReport) -> str:
    """Return the number of names, by kind of storage, and of shards if tensors are sharded: `91 in 149 shards`."""
    aliases = len(report.aliases)
    stored = stored_text(report.tensors - aliases, aliases=aliases)
    names = f"{report.tensors:,} ({stored})" if stored else f"{report.tensors:,}"
    is_sharded = report.chunks > report.tensors - aliases
    return f"{names} in {counted(report.chunks, 'shard')}" if is_sharded else names


def diff_text(report: DiffReport) -> str:
    """Return the summary that `diff` prints."""
    lines = [
        f"tied: {row['name']} is stored only in {row['only_in']}, and tied to {row['tied_to']} in the other (no "
        "difference)"
        for row in report.tied_tensors
    ]
    lines += _difference_lines(report.differing, ("A", "B"))
    if report.exit:
        lines.append(_different_text(report))
    else:
        verb = "has" if report.compared == 1 else "have"
        lines.append(
            f"EQUAL: {counted(report.compared, 'tensor')} {verb} equal shapes and dtypes{_uncompared_clause(report)}"
        )
    return "\n".join(lines)


def verify_text(report: VerifyReport) -> str:
    """Return the summary that `verify` prints."""
    rows = report.differing
    lines = _difference_lines(rows, ("the reference", "the checkpoint"))
    compared = counted(report.compared, "tensor")
    if report.exit == 0:
        lines.append(
            f"EQUAL: {compared} compared bit for bit, {bytes_read_text(report)} from both checkpoints"
            f"{_uncompared_clause(report)}"
        )
    elif rows:
        lines.append(_different_text(report))
    elif report.compared:
        verb = "is" if report.compared == 1 else "are"
        lines.append(f"INCOMPLETE: {'; '.join(_strict_reasons(report))}; {compared} {verb} equal")
    else:
        lines.append("DIFFERENT: neither checkpoint has a tensor to compare")
    lines.append(cost_text(report))
    return "\n".join(lines)


def _strict_reasons(report: VerifyReport) -> Iterator[str]:
    """Yield the reasons for which `verify --strict` exits with 1 although no tensor differs."""
    uncompared = uncompared_text(report.not_compared)
    if uncompared:
        yield f"{uncompared} not compared"
    if report.config_differences:
        yield f"config.json differs in {first_of(report.config_differences)}"
    for path in report.config_mismatches:
        yield f"{one_line(path)} does not match its config"


def verify_verdict(report: VerifyReport) -> str:
    """Return the one line that `verify -q` prints: the verdict, with the first difference."""
    lines = verify_text(report).splitlines()
    verdict, first = lines[-2], lines[0]  # the last line is the cost
    return verdict if first is verdict else f"{verdict}; {first}"


def _different_text(report: DiffReport | VerifyReport) -> str:
    """Return the verdict of a comparison that found differences."""
    setting_count = sum(row["what"] == "setting" for row in report.differing)
    tensor_count = len(report.differing) - setting_count
    parts = []
    if tensor_count:
        parts.append(
            f"{tensor_count:,} of {counted(report.total, 'tensor')} {'differs' if report.total == 1 else 'differ'}"
        )
    if setting_count:
        parts.append(
            f"{counted(setting_count, 'setting')} of the adapter {'differs' if setting_count == 1 else 'differ'}"
        )
    return f"DIFFERENT: {' and '.join(parts)}{_uncompared_clause(report)}"


def _uncompared_clause(report: DiffReport | VerifyReport) -> str:
    """Return what was not compared, to append to a verdict: `; 117 optimizer tensors not compared`."""
    text = uncompared_text(report.not_compared)
    return f"; {text} not compared" if text else ""


def _difference_lines(rows: Sequence[dict[str, Any]], sides: tuple[str, str]) -> list[str]:
    """Return one line per tensor that differs, at most 20.

    Args:
        rows: Entries of `differing`, with a value for each of the two checkpoints.
        sides: Names of the two checkpoints in the lines, for example `("A", "B")`.
    """
    lines = []
    for row in rows[:_MAX_ROWS]:
        if row["what"] == "content":
            lines.append(
                f"{row['name']}: content, first difference at {row['index']}: 0x{row['a']} in {sides[0]}, "
                f"0x{row['b']} in {sides[1]}; {row['differing_elements']}"
            )
        else:
            values = (f"{value or 'absent'} in {side}" for value, side in zip((row["a"], row["b"]), sides, strict=True))
            lines.append(f"{row['name']}: {row['what']}: {', '.join(values)}")
    if len(rows) > _MAX_ROWS:
        lines.append(f"and {len(rows) - _MAX_ROWS} more; --json lists all")
    return lines


def cost_text(report: Report) -> str:
    """Return time, write throughput and peak memory in one line."""
    speed = speed_text(report)
    return f"{report.seconds:.2f} s, {f'{speed}, ' if speed else ''}{' '.join(peak_memory_text(report))}"


def _dtypes_text(report: Report) -> str:
    before, after = _counts_text(report.dtypes["before"]), _counts_text(report.dtypes["after"])
    return before if before == after else f"{before} -> {after}"


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({counted(count, 'tensor')})" for name, count in counts.items())


def _tensors_text(tensors: int) -> str:
    return f"  {counted(tensors, 'tensor')}" if tensors else ""


def _first_names(names: Sequence[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")


def _first_rows(rows: Sequence[T]) -> Sequence[T]:
    return rows[:_MAX_ROWS]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table with the titles of its columns; nothing without rows."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in ((columns, *rows) if rows else ())
    ]
