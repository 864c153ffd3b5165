"""scripts/simulate_cuda finds mistakes with CUDA graphs, and runs Triton's kernels."""

import pytest

from tests.unit.scripts.test_simulate_cuda import needs_compiler, simulate

pytestmark = [pytest.mark.slow, needs_compiler]

# Trains a layer in steps that are replayed and in steps that are not, and prints whether losses are equal.
# The values that the command line names are Python numbers in replayed steps, and tensors in the others.
TRAINING = """
import sys
import torch

frozen = sys.argv[1:]
inputs = torch.randn(2, 5, 8, device="cuda")
values = {"rate": [0.5, 0.25, 0.1], "tokens": [4.0, 5.0, 3.0], "key": [1.0, 7.0, 3.0]}
values = {name: torch.tensor(column, device="cuda") for name, column in values.items()}

def train(replayed):
    torch.manual_seed(1)
    weight = torch.randn(8, 8).to("cuda").requires_grad_()
    now = {name: torch.zeros((), device="cuda") for name in values}
    x = torch.zeros(5, 8, device="cuda")

    def step():
        given = now | ({name: numbers[name] for name in frozen} if replayed else {})
        mask = torch.sin(1000 * given["key"] + torch.arange(40, device="cuda").view(5, 8)) > 0
        loss = ((x @ weight) * mask).square().sum() / given["tokens"]
        (gradient,) = torch.autograd.grad(loss, [weight])
        with torch.no_grad():
            weight.sub_(gradient * given["rate"])
        return loss.detach()

    graph, losses = torch.cuda.CUDAGraph(), []
    for index in range(3):
        x.copy_(inputs[index % 2])
        for name, column in values.items():
            now[name].copy_(column[index])
        numbers = {name: value.item() for name, value in now.items()}
        if replayed and index == 0:
            with torch.cuda.graph(graph):
                loss = step()
        if replayed:
            graph.replay()
        else:
            loss = step()
        losses.append(loss.item())
    return losses

print(train(True) == train(False))
"""

# A kernel of Triton, and what the tests below do with it.
GRAPH = """
import torch
import triton
import triton.language as tl

side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

@triton.jit
def add(x_ptr, y_ptr, out_ptr, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = (tl.load(x_ptr + at, mask=at < count), tl.load(y_ptr + at, mask=at < count))
    tl.store(out_ptr + at, x + y * factor, mask=at < count)

def double(x, factor):
    out = torch.empty_like(x)
    add[(triton.cdiv(len(x), 16),)](x, x, out, len(x), factor, BLOCK=16)
    return out

def capture(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
        out = function()
    return graph, out

def error(function, *arguments):
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)

x, kept = torch.arange(40.0, device="cuda"), torch.zeros(40, device="cuda")
"""


def run(tmp_path, text, *arguments):
    file = tmp_path / "script.py"
    file.write_text(text)
    done = simulate("run", str(file), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_steps_that_are_replayed_equal_the_others(tmp_path):
    assert run(tmp_path, TRAINING) == ["True"]


@pytest.mark.parametrize("frozen", ["rate", "tokens", "key"])
def test_a_number_of_python_in_a_step_is_found(tmp_path, frozen):
    assert run(tmp_path, TRAINING, frozen) == ["False"]


def test_a_kernel_of_triton_equals_the_operators_and_is_one_operation(tmp_path):
    text = """
from simulate_cuda.device import recording

torch.cuda.set_sync_debug_mode("error")
with recording() as events:
    out = double(x, 0.5)
torch.cuda.set_sync_debug_mode("default")
print(torch.equal(out, x * 1.5), dict(events))
print(error(add[(3,)], x, x.cpu(), out, 40, 0.5, 16))
"""
    assert run(tmp_path, GRAPH + text) == [
        "True {'operation': Counter({'a Triton kernel': 1})}",
        "Pointer argument cannot be accessed from Triton (cpu tensor?)",
    ]


def test_a_replay_is_one_operation_and_a_capture_computes_nothing(tmp_path):
    text = """
from simulate_cuda.device import recording

graph, out = capture(lambda: kept.add_(double(x, 1.0)) + 1)
print(out.isnan().all().item(), kept.any().item())
x.fill_(2.0)
with recording() as events:
    graph.replay()
print(dict(events), out[0].item(), kept[0].item())
"""
    assert run(tmp_path, GRAPH + text) == [
        "True False",
        "{'operation': Counter({'a CUDA graph': 1})} 5.0 4.0",
    ]


def test_a_wait_in_a_capture_is_an_error(tmp_path):
    text = """
waits = [lambda: x.sum().item(), torch.cuda.synchronize, x.cpu, lambda: torch.ones(2).to("cuda"), x.nonzero]
for wait in [*waits, torch.cuda.Event().query]:
    print(error(capture, wait))
graph, out = capture(lambda: x.sum())
print(out.item())
"""
    lines = run(tmp_path, GRAPH + text)
    assert set(lines[:-1]) == {"operation failed due to a previous error during capture"} and len(lines) == 7
    assert lines[-1] == "nan"


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        ("pass", "None"),
        ("del x", "memory that it uses was freed"),
        ("x.data = x + 1", "memory that it uses was freed"),
    ],
)
def test_an_input_that_was_freed_is_an_error(tmp_path, freed, message):
    text = f"""
graph, out = capture(lambda: double(x, 1.0))
{freed}
print(error(graph.replay))
"""
    (line,) = run(tmp_path, GRAPH + text)
    assert message in line


def test_what_only_a_graph_refers_to_is_invalid_for_others(tmp_path):
    text = """
between = []
first, _ = capture(lambda: between.append(double(x, 1.0)))
second, out = capture(lambda: between[0] + 1)
first.replay()
second.replay()
print(out[1].item())
between.clear()
first.replay()
second.replay()
print(out[1].item())
"""
    assert run(tmp_path, GRAPH + text) == ["3.0", "nan"]


def test_captures_of_mtrain_wait_nowhere_and_leave_no_errors_at_the_exit(tmp_path):
    """After a failed capture, the pool is used on. Graphs that still exist at the exit are not reset."""
    text = """
from mtrain.graph_capture import CaptureError, GraphPool

pool = GraphPool(x.device)
try:
    pool.capture(lambda: kept.add_(x.sum().item()))
except CaptureError as error:
    print("stream is capturing" in str(error), kept.any().item())
kept.zero_()
with pool.prepared():
    first = pool.capture(lambda: kept.add_(double(x, 1.0)))
    second = pool.capture(lambda: kept.add_(x @ x))
kept.zero_()
first()
del first, pool
second()
print(torch.equal(kept, 2 * x + x @ x))
"""
    file = tmp_path / "script.py"
    file.write_text(GRAPH + text)
    done = simulate("run", str(file))
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines() == ["True True", "True"]
