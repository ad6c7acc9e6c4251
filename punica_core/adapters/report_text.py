"""Reports on adapters as text for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from punica_core.adapters.report import AdapterReport, TensorLine

_ONLY_HEADERS = (
    '"served" goes by what the headers say. Whether the numbers are sound is told by: '
    "punica adapters validate --model BASE_FOLDER ADAPTER_FOLDER"
)
_NO_MODEL = (
    "Only the headers were looked at. Whether an adapter fits a base model is told with --model BASE_FOLDER; whether "
    "its numbers are sound, too, by: punica adapters validate --model BASE_FOLDER ADAPTER_FOLDER"
)

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def one_report(report: AdapterReport, *, every_tensor: bool = False) -> str:
    """Several lines: verdict, key, ranks, bytes, and the account of the tensors, like ones of all layers in a line."""
    lines = [f"{report.path}: {report.verdict}{_how_far(report)}"]
    if report.reason:
        lines.append(f"  reason   {report.code}: {report.reason}")
    if report.adapter_key is not None:
        lines.append(f"  key      {report.adapter_key}")
    if report.ranks:
        lines.append(f"  rank     {_by_rank(report)}")
    if report.extras:
        lines.append(f"  besides  {', '.join(report.extras)}")
    lines.append(f"  bytes    {_bytes(report)}")
    lines += [f"  note     {note}" for note in report.notes]
    if report.tensors:
        lines.append(f"  tensors  {len(report.tensors)}")
        shown = map(_tensor, report.tensors) if every_tensor else _grouped(report.tensors)
        lines += [f"    {line}" for line in shown]
    return "\n".join(lines)


def table(reports: Sequence[AdapterReport]) -> str:
    """One line an adapter, aligned."""
    rows = [("NAME", "RANK", "TARGETS", "BYTES", "VERDICT")]
    for report in reports:
        ranks = sorted(set(report.ranks.values()))
        rank = "-" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        verdict = report.verdict if report.is_served else f"{report.code}: {report.reason}"
        targets = ", ".join([*report.targets, *(f"+ {extra}" for extra in report.extras)]) or "-"
        rows.append((report.name, rank, targets, size(report.file_bytes), verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]) for row in rows
    )


def list_text(folder: str, reports: Sequence[AdapterReport], against: str) -> str:
    """The table of a folder's adapters, and what was not looked at. against: the base, "" if they had none."""
    if not reports:
        return f"{folder} has no adapters."
    if not any(report.is_served for report in reports):
        return table(reports)
    return f"{table(reports)}\n\n{_ONLY_HEADERS if against else _NO_MODEL}"


def size(nbytes: int) -> str:
    """At most four digits and a unit."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.4g} {unit}"
        amount /= 1000
    return f"{amount:.4g} GB"


def _how_far(report: AdapterReport) -> str:
    if not report.is_served:
        return ""
    looked = "every number was read" if report.checked == "numbers" else "headers only"
    return f" ({looked}{f', against {report.against}' if report.against else ''})"


def _by_rank(report: AdapterReport) -> str:
    """`16: q_proj, v_proj ×32; 4: down_proj ×32`."""
    found: dict[int, dict[str, int]] = {}
    for path, rank in report.ranks.items():
        leaves = found.setdefault(rank, {})
        leaf = path.rpartition(".")[2]
        leaves[leaf] = leaves.get(leaf, 0) + 1
    return "; ".join(
        f"{rank}: " + ", ".join(f"{leaf} ×{count}" for leaf, count in sorted(leaves.items()))
        for rank, leaves in sorted(found.items())
    )


def _bytes(report: AdapterReport) -> str:
    parts = [f"{size(report.file_bytes)} in the file"]
    if report.host_bytes is not None:
        parts.append(f"{size(report.host_bytes)} in host memory")
    if report.gpu_bytes is not None:
        parts.append(f"{size(report.gpu_bytes)} in GPU memory")
    return ", ".join(parts) + (f" (as {report.dtype})" if report.dtype else "")


def _grouped(tensors: Iterable[TensorLine]) -> list[str]:
    groups: dict[tuple[object, ...], list[TensorLine]] = {}
    for line in tensors:
        module = _NUMBER.sub(".*", f".{line.module}").removeprefix(".")
        targets = tuple(_NUMBER.sub(".*", f".{target}").removeprefix(".") for target in line.targets)
        groups.setdefault((module, line.role, line.dtype, line.shape, targets), []).append(line)
    return [
        _row(str(module), lines[0], tuple(targets), len(lines))  # type: ignore[arg-type]
        for (module, _, _, _, targets), lines in groups.items()
    ]


def _tensor(line: TensorLine) -> str:
    return (f"{line.name}: " if line.name else "") + _row(line.module, line, line.targets, 1)


def _row(module: str, line: TensorLine, targets: tuple[str, ...], count: int) -> str:
    goes = f" → {', '.join(targets)}" if targets and targets != (module,) else ""
    many = f" ×{count}" if count > 1 else ""
    return f"{module}{goes}  {line.role}  {list(line.shape)} {line.dtype}{many}"
