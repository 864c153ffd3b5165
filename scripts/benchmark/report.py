"""Statistics of measurements, and tables of them. Pure functions."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from mtrain.cli.console.tables import plain_table

MEASURES = ("target_tokens_per_second", "ms_per_step", "target_tokens_per_step", "padding", "peak_mib")
HEADS = ["tool", "precision", "malloc", "target tokens/s", "ms/step", "padding", "peak MiB", "GFLOP/s"]
HEADS += ["of bound", "mtrain/tool"]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of the ratio of two speeds; a slow spell of the machine affects both and cancels."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def row_of(
    runs: Sequence[dict[str, float]],
    flops_per_token: float,
    bounds: Sequence[float],
    ours: Sequence[float] | None,
) -> dict[str, Any]:
    """The statistics of one tool.

    `bounds` are the target tokens/s of the matrix products alone in each round; `ours` are mtrain's, None for
    mtrain itself.
    """
    speeds = [run["target_tokens_per_second"] for run in runs]
    figures: dict[str, Any] = {measure: spread([run[measure] for run in runs]) for measure in MEASURES}
    figures["model_gflops"] = spread([speed * flops_per_token / 1e9 for speed in speeds])
    figures["fraction_of_bound"] = ratio_of_rounds(speeds, bounds)
    if ours is not None:
        figures["mtrain_ratio"] = ratio_of_rounds(ours, speeds)
    return {**figures, "runs": list(runs)}


def training_table(result: dict[str, Any]) -> str:
    """The result of `train` as text."""
    rows = [HEADS, *map(_row_cells, result["rows"]), *map(_bound_cells, result["bounds"])]
    batch = result["batch"]
    overrides = "".join(f" --set {override}" for override in result["overrides"])
    parts = [
        _heading(result),
        f"{result['config']}{overrides}: {result['parameters'] / 1e6:.2f} million parameters, "
        f"{result['mflop_per_target_token']:.1f} MFLOP per target token; the mean micro-batch has "
        f"{batch['sentences']} sentences of {batch['source_tokens']:,} source and {batch['target_tokens']:,} "
        "target tokens",
        f"median (minimum to maximum) of {result['repeats']} runs of {result['seconds']:g} s",
        "",
        aligned(rows),
        "",
        *(f"malloc {name}: {meaning}" for name, meaning in result["malloc"].items()),
    ]
    if "profile" in result:
        parts += ["", profile_text(result["profile"])]
    return "\n".join(parts)


def _heading(result: dict[str, Any]) -> str:
    machine = result["machine"]
    version = f"mtrain {result['mtrain']} ({result['commit'] or 'no commit'}), torch {machine['torch']}"
    return f"{result['date']}, {version}, {machine['device_name']}, {machine['threads']} threads"


def _with_range(values: dict[str, float]) -> str:
    return f"{values['median']:,.0f} ({values['min']:,.0f} to {values['max']:,.0f})"


def _row_cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row.get("mtrain_ratio")
    return (
        row["tool"],
        row["precision"],
        row["malloc"],
        _with_range(row["target_tokens_per_second"]),
        f"{row['ms_per_step']['median']:,.1f}",
        f"{100 * row['padding']['median']:.1f} %",
        f"{row['peak_mib']['median']:,.0f}",
        f"{row['model_gflops']['median']:,.1f}",
        f"{100 * row['fraction_of_bound']:.0f} %",
        "" if ratio is None else f"{ratio:.2f} x",
    )


def _bound_cells(bound: dict[str, Any]) -> tuple[str, ...]:
    speed = _with_range(bound["target_tokens_per_second"])
    gflops = f"{bound['gflops']['median']:,.1f}"
    return "matrix products alone", bound["precision"], "", speed, "", "", "", gflops, "100 %", ""


def profile_text(profile: dict[str, Any]) -> str:
    """The result of `benchmark.profile` as text."""
    total = sum(kind["ms_per_step"] for kind in profile["kinds"])

    def share(part: dict[str, Any]) -> tuple[str, str]:
        return f"{part['ms_per_step']:,.2f}", f"{100 * part['ms_per_step'] / total:.1f} %"

    operations = [
        ("operation", "ms/step", "share", "calls/step"),
        *(
            (part["operation"][:60], *share(part), f"{part['calls_per_step']:,.0f}")
            for part in profile["operations"]
        ),
    ]
    kinds = [("kind", "ms/step", "share"), *((part["kind"], *share(part)) for part in profile["kinds"])]
    launches = profile["launches_per_step"]
    head = (
        f"profile of {profile['steps']} steps of {profile['wall_ms_per_step']:,.0f} ms"
        f"{f' with {launches:,.1f} launches' if launches else ''}; own time, all threads"
    )
    return "\n".join([head, "", aligned(operations), "", aligned(kinds)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first to the left and the others to the right."""
    return "\n".join(plain_table(rows, left=(0,)))


def decoding_table(result: dict[str, Any]) -> str:
    """The result of `translate` as text."""
    heads = ["tool", "precision", "workers"]
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
        rows.append([*cells, f"{peak['median']:,.0f}" if peak else "unknown"])
    parts = [
        _heading(result),
        f"{result['model']}; {result['sentences']:,} sentences of {result['source']}, each translated into "
        f"{result['length']} tokens; sentences per second, and milliseconds per sentence at batch size 1; "
        f"medians of {result['repeats']} runs",
        "",
        aligned(rows),
    ]
    return "\n".join(parts)
