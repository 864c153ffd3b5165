"""From measurements to figures, and from figures to a table. Pure functions."""

from collections.abc import Sequence
from statistics import median
from typing import Any

MEASURES = ("target_tokens_per_second", "ms_per_step", "target_tokens_per_step", "padding", "peak_mib")
HEADS = ["tool", "numbers", "malloc", "target tokens/s", "ms/step", "padding", "peak MiB", "GFLOP/s"]
HEADS += ["of bound", "mtrain/it"]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def neighbour_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of runs that were made one after the other. Slow spells of the machine fall on
    neighbours alike, and cancel."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def row_of(
    runs: Sequence[dict[str, float]],
    flops_per_token: float,
    bounds: Sequence[float],
    ours: Sequence[float] | None,
) -> dict[str, Any]:
    """The figures of one tool. `bounds` are the target tokens/s of matrix products alone in each round,
    `ours` those of mtrain, or None for mtrain itself."""
    speeds = [run["target_tokens_per_second"] for run in runs]
    figures: dict[str, Any] = {measure: spread([run[measure] for run in runs]) for measure in MEASURES}
    figures["model_gflops"] = spread([speed * flops_per_token / 1e9 for speed in speeds])
    figures["fraction_of_bound"] = neighbour_ratio(speeds, bounds)
    if ours is not None:
        figures["mtrain_ratio"] = neighbour_ratio(ours, speeds)
    return {**figures, "runs": list(runs)}


def table_of(result: dict[str, Any]) -> str:
    """The result of `train` for people to read."""
    rows = [HEADS, *map(_row_cells, result["rows"]), *map(_bound_cells, result["bounds"])]
    machine, batch = result["machine"], result["batch"]
    overrides = "".join(f" --set {override}" for override in result["overrides"])
    parts = [
        f"{result['date']}, mtrain {result['mtrain']} ({result['commit'] or 'no commit'}), torch "
        f"{machine['torch']}, {machine['device_name']}, {machine['threads']} threads",
        f"{result['config']}{overrides}: {result['parameters'] / 1e6:.2f} million parameters, "
        f"{result['mflop_per_target_token']:.1f} MFLOP a target token; a mean pass has {batch['sentences']} "
        f"sentences of {batch['source_tokens']:,} source and {batch['target_tokens']:,} target tokens",
        f"median (least to greatest) of {result['repeats']} runs of {result['seconds']:g} s",
        "",
        aligned(rows),
        "",
        *(f"malloc {name}: {meaning}" for name, meaning in result["malloc"].items()),
    ]
    if "profile" in result:
        parts += ["", _profile_text(result["profile"])]
    return "\n".join(parts)


def _row_cells(row: dict[str, Any]) -> tuple[str, ...]:
    speed = row["target_tokens_per_second"]
    ratio = row.get("mtrain_ratio")
    return (
        row["tool"],
        row["precision"],
        row["malloc"],
        f"{speed['median']:,.0f} ({speed['min']:,.0f} to {speed['max']:,.0f})",
        f"{row['ms_per_step']['median']:,.1f}",
        f"{100 * row['padding']['median']:.1f} %",
        f"{row['peak_mib']['median']:,.0f}",
        f"{row['model_gflops']['median']:,.1f}",
        f"{100 * row['fraction_of_bound']:.0f} %",
        "" if ratio is None else f"{ratio:.2f} x",
    )


def _bound_cells(bound: dict[str, Any]) -> tuple[str, ...]:
    speed = bound["target_tokens_per_second"]
    figures = f"{speed['median']:,.0f} ({speed['min']:,.0f} to {speed['max']:,.0f})"
    gflops = f"{bound['gflops']['median']:,.1f}"
    return "matrix products alone", bound["precision"], "", figures, "", "", "", gflops, "100 %", ""


def _profile_text(profile: dict[str, Any]) -> str:
    total = sum(kind["ms_per_step"] for kind in profile["kinds"])

    def share(part: dict[str, Any]) -> tuple[str, str]:
        return f"{part['ms_per_step']:,.2f}", f"{100 * part['ms_per_step'] / total:.1f} %"

    operations = [("operation", "ms/step", "share", "calls/step")]
    for part in profile["operations"]:
        operations.append((part["operation"][:60], *share(part), f"{part['calls_per_step']:,.0f}"))
    kinds = [("kind", "ms/step", "share"), *((part["kind"], *share(part)) for part in profile["kinds"])]
    head = (
        f"profile of {profile['steps']} steps of {profile['wall_ms_per_step']:,.0f} ms; own time, all threads"
    )
    return "\n".join([head, "", aligned(operations), "", aligned(kinds)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns: words, which are first, to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def decoding_table_of(result: dict[str, Any]) -> str:
    """The result of `translate` for people to read."""
    machine = result["machine"]
    heads = ["tool", "numbers", "workers"]
    for cell in result["rows"][0]["settings"]:
        unit = "/s" if cell["batch"] > 1 else " ms"
        heads += [f"batch {cell['batch']} beam {cell['beams']}{unit}", "mtrain"]
    rows = [[*heads, "peak MiB"]]
    for row in result["rows"]:
        cells = [row["tool"], row["precision"], str(row["workers"] or "auto")]
        for cell in row["settings"]:
            speed = cell["sentences_per_second"]["median"]
            cells.append(f"{speed:,.0f}" if cell["batch"] > 1 else f"{1000 / speed:,.1f}")
            cells.append(f"{cell['mtrain_ratio']:.2f} x" if "mtrain_ratio" in cell else "")
        peak = row["peak_mib"]
        rows.append([*cells, f"{peak['median']:,.0f}" if peak else "not known"])
    parts = [
        f"{result['date']}, mtrain {result['mtrain']} ({result['commit'] or 'no commit'}), torch "
        f"{machine['torch']}, {machine['device_name']}, {machine['threads']} threads",
        f"{result['model']}; {result['sentences']:,} sentences of {result['source']}, each of which gets "
        f"{result['length']} tokens; sentences a second, and milliseconds for one alone; medians of "
        f"{result['repeats']} runs",
        "",
        aligned(rows),
    ]
    return "\n".join(parts)
