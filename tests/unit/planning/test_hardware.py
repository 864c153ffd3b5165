"""The hardware of `mtrain plan`, and the page that states its numbers."""

from mtrain.planning import hardware
from mtrain.planning.hardware import ETHERNET, GPUS, find_hardware
from tests.support.paths import ROOT


def test_the_documentation_states_the_numbers():
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")
    section = " ".join(page[page.index("computes its numbers") :].split())
    for gpu in GPUS.values():
        rates = f"{gpu.low_flops / 1e12:.0f} TFLOP/s | {gpu.fp32_flops / 1e12:g} TFLOP/s"
        memory = f"{gpu.memory / 1e9:.0f} GB | {gpu.bandwidth / 1e12:.3g} TB/s"
        assert f"{rates} | {memory} | {gpu.nvlink / 1e9:.0f} GB/s" in section
    core = find_hardware("cpu")  # tests use one thread
    for stated in (
        f"{hardware.UTILIZATION:.0%} of the peak FLOP/s",
        f"{hardware.BANDWIDTH_UTILIZATION:.0%} of the peak",
        f"{1 - hardware.GPU_MEMORY_SHARE:.0%} of the memory",
        f"{ETHERNET.bandwidth * 8 / 1e9:.0f} Gbit/s",
        f"{core.fp32_flops / 1e9:.0f} GFLOP/s and {core.bandwidth / 1e9:.0f} GB/s for each core",
    ):
        assert stated in section, stated
