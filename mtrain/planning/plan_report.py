"""The plan of a run as a table."""

from collections.abc import Iterator

from mtrain.duration import format_duration
from mtrain.planning.hardware import BANDWIDTH_UTILIZATION, MEASURED, UTILIZATION
from mtrain.planning.plan import Plan
from mtrain.planning.scaling import Run

Row = tuple[str, str, str]  # name, value, remark


def plan_rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows of the table."""
    yield from _costs(plan)
    yield from _memory(plan)
    for run in plan.runs:
        yield from _run(run)


def plan_notes(plan: Plan) -> Iterator[str]:
    """Yield the lines below the table: assumptions and advice."""
    if plan.hardware != MEASURED:
        rates = f"{UTILIZATION:.0%} of peak FLOP/s, {BANDWIDTH_UTILIZATION:.0%} of peak bandwidth"
        yield f"assumed, not measured: {rates}"
    yield from (f"advice: {advice}" for advice in plan.advice)


def _costs(plan: Plan) -> Iterator[Row]:
    parameters = plan.parameters
    epoch, step = plan.epoch, plan.step
    yield "hardware", plan.hardware, f"{plan.devices} device{'s' * (plan.devices > 1)}, {plan.precision}"
    parts = ", ".join(f"{_count(n)} {part}" for part, n in parameters.items() if n and part != "total")
    yield "parameters", _count(parameters["total"]), parts
    yield "pairs", f"{epoch.pairs:,}", epoch.origin
    languages = f"{epoch.source_tokens:,} source, {epoch.target_tokens:,} target"
    tokens = epoch.source_tokens + epoch.target_tokens
    yield "tokens per epoch", f"{tokens:,}", f"{languages}; {epoch.padding:.1%} padding in addition"
    yield "steps per epoch", f"{epoch.steps:,}", f"of {step.target_tokens:,.0f} target tokens"
    per_device = f"{step.micro_batches:.3g} per device and step, of up to {step.micro_batch_tokens:,} tokens"
    yield "micro-batches", f"{step.micro_batches * plan.devices:.3g}", per_device
    yield "FLOPs per step", _scaled(step.flops), "matrix products, forward and backward"


def _memory(plan: Plan) -> Iterator[Row]:
    yield "memory per device", _bytes(plan.memory["total"]), _verdict(plan)
    for part, size in plan.memory.items():
        if size and part != "total":
            yield f"  {part}", _bytes(size), ""
    if plan.process_memory is not None:
        remark = "resident at peak, with libraries and the gaps of its heap"
        yield "memory of the process", _bytes(plan.process_memory), remark


def _verdict(plan: Plan) -> str:
    usable = f"{_bytes(plan.usable_memory)} usable of {_bytes(plan.device_memory)}"
    return f"{'fits' if plan.fits else 'DOES NOT FIT'}: {usable}"


def _run(run: Run) -> Iterator[Row]:
    if run.link is not None:
        sent = f"sent by each device in a step, in {_seconds(run.communication_seconds)}"
        yield f"by {run.link}", _bytes(run.sent_bytes), sent
        yield "  scaling efficiency", f"{run.efficiency:.0%}", "of the speed of as many single devices"
    indent = "  " if run.link else ""
    speed = f"{run.target_tokens_per_second:,.0f} target tokens/s"
    yield f"{indent}step", _seconds(run.step_seconds), speed
    yield f"{indent}epoch", format_duration(run.epoch_hours * 3600), ""
    limit = f"{run.steps:,} steps, without validation; limit: {run.limit}"
    yield f"{indent}run", format_duration(run.hours * 3600), limit
    if run.cost is not None:
        yield f"{indent}cost", f"{run.cost:,.2f}", ""


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f}M"


def _bytes(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _seconds(number: float) -> str:
    return f"{number:.2f} s" if number >= 1 else f"{number * 1e3:.1f} ms"


def _scaled(number: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12)):
        if number >= size:
            return f"{number / size:.2f} {prefix}FLOP"
    return f"{number / 1e9:.2f} GFLOP"
