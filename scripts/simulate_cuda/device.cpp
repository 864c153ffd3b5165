// A CUDA device that exists in name only, for builds of PyTorch without CUDA.
//
// The memory of a tensor on `cuda:0` is memory of the host. An operation on it runs the kernel for CPUs on an alias
// of the tensor that claims to be on the CPU. Dispatch, device checks, autocast, autograd and pinned memory are
// PyTorch's own. Python is told about each operation, copy and wait of the host. `graphs.h` simulates CUDA graphs.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.h"

#include <string>
#include <unordered_set>

namespace {

const c10::Stream stream(c10::Stream::DEFAULT, gpu);

// -------------------------------------------------------------------------------------------------- device

struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  c10::Device getDevice() const override { return gpu; }
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
};

// ---------------------------------------------------------------------------------------------- operations

using Names = std::unordered_set<std::string>;
// Operations for which the host has to wait: it needs the size or the value of the result.
const Names waiting = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave"};
// PyTorch copies indices that are on the CPU, for which the host waits. Any other operation with a CPU tensor is an
// error.
const Names indexing = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::_unsafe_index_put",
    "aten::_index_put_impl_"};
const Names without_kernel = {"aten::resize_", "aten::set_", "aten::is_set_to",
    "aten::_has_compatible_shallow_copy_type"};

// Whether an operation only returns a view, for which nothing runs on the device.
bool is_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  const auto* aliasing = schema.returns()[0].alias_info();
  return aliasing && !aliasing->isWrite();
}

// Runs the kernel for CPUs with tensors on the CPU.
void execute(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const std::string& name = operation.schema().name();
  auto* first = &(*stack)[stack->size() - operation.schema().arguments().size()];
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && first[2].toBool()) {
    first[0] = first[0].toTensor().to(at::kFloat); // only the kernel for GPUs includes this conversion
    first[2] = false;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  operation.callBoxed(stack);
}

// Adds an operation to a graph, after it was executed once: with `inputs`, and with tensors of the results' memory.
void capture(simulation::Graph* graph, const c10::OperatorHandle& operation, torch::jit::Stack inputs,
    const Arguments& arguments, const torch::jit::Stack& stack) {
  for (auto& value : inputs)
    change_tensors(value, [&](const Tensor& tensor) {
      if (const Tensor* ours = arguments.of_alias(tensor)) return of_memory(*ours);
      return tensor.defined() ? tensor.clone() : tensor; // a number on the CPU, of which kernels get the value
    });
  torch::jit::Stack results(stack.end() - operation.schema().returns().size(), stack.end());
  for (auto& value : results) change_tensors(value, of_memory);
  graph->add([operation, inputs, results] {
    torch::jit::Stack replayed = inputs;
    execute(operation, &replayed);
    std::vector<Tensor> sources;
    for (auto& value : replayed)
      change_tensors(value, [&](const Tensor& tensor) { return sources.emplace_back(tensor); });
    size_t next = 0;
    for (auto value : results)
      change_tensors(value, [&](const Tensor& target) {
        const Tensor& source = sources[next++];
        if (target.defined() && target.data_ptr() != source.data_ptr()) target.copy_(source);
        return target;
      });
  });
}

// Runs any operation on the CPU.
void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const std::string& name = schema.name();
  const size_t first = stack->size() - schema.arguments().size();
  Arguments arguments;
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    change_tensors(value, [&](const Tensor& tensor) { return arguments.to_cpu(tensor); });
    if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(c10::kCPU);
  }
  if (arguments.any_on_cpu && !arguments.pairs.empty()) {
    TORCH_CHECK(indexing.count(name), "Expected all tensors to be on the same device, but found at least two devices, ",
        "cuda:0 and cpu! (", name, ")");
    report("wait", name + " with indices on the CPU");
  }
  if (waiting.count(name)) report("wait", name);
  const bool has_kernel = !is_view(schema) && !without_kernel.count(name);
  if (has_kernel) report("operation", name);
  auto* graph = has_kernel ? capturing() : nullptr;
  torch::jit::Stack inputs;
  if (graph) {
    inputs.assign(stack->begin() + first, stack->end());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto* aliasing = schema.arguments()[i].alias_info();
      const bool written = aliasing && aliasing->isWrite();
      change_tensors(inputs[i], [&](const Tensor& tensor) {
        if (const Tensor* ours = arguments.of_alias(tensor)) graph->use(*ours, written);
        return tensor;
      });
    }
  }
  execute(operation, stack);
  for (const auto& [ours, on_host] : arguments.pairs) follow_resize(ours, on_host);
  for (size_t i = first; i < stack->size(); ++i)
    change_tensors((*stack)[i], [&](const Tensor& tensor) {
      if (const Tensor* ours = arguments.of_alias(tensor)) return *ours;
      return graph ? owned(on_gpu(tensor)) : on_gpu(tensor);
    });
  if (graph) capture(graph, operation, std::move(inputs), arguments, *stack);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return owned(on_gpu(at::empty(size, at::TensorOptions().dtype(dtype).device(c10::kCPU), format)));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return owned(on_gpu(at::empty_strided(size, stride, at::TensorOptions().dtype(dtype).device(c10::kCPU))));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const Tensor& of_host = self.is_cuda() ? source : self;
  if (self.is_cuda() && source.is_cuda()) {
    report("operation", "aten::copy_");
  } else if (self.numel()) {
    report("copy", self.is_cuda() ? "to the device" : "to the host");
    if (!non_blocking || !is_pinned(of_host.storage().data()))
      report("wait", self.is_cuda() ? "a copy to the device" : "a copy to the host");
  }
  auto* graph = capturing();
  if (graph) {
    graph->use(source, false);
    graph->use(self, true);
    graph->add([to = of_memory(self), from = of_memory(source)] { to.copy_(from); });
  }
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

// A kernel of Python is about to run, or to be captured under this number. It may write to any of its tensors.
using Launch = int (*)(int64_t number);
Launch launcher = nullptr;

void launch(at::TensorList tensors, int64_t number) {
  report("operation", "a Triton kernel");
  auto* graph = capturing();
  if (!graph) return;
  for (const Tensor& tensor : tensors) graph->use(tensor, true);
  graph->add([number] { TORCH_CHECK(!launcher(number), "a Triton kernel has failed"); });
}

at::Scalar local_scalar(const Tensor& self) {
  report("wait", "a value is read");
  return on_cpu(self).item();
}

// What an H100 chooses without cuDNN, for tensors without data only: CPUs do not have these kernels.
std::atomic<bool> attention_of_gpu{false};

int64_t choose_attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double,
    bool, std::optional<double>, bool) {
  auto kind = at::SDPBackend::math;
  if (attention_of_gpu && query.scalar_type() != at::kDouble) {
    const bool flash = query.scalar_type() != at::kFloat && !mask;
    kind = flash ? at::SDPBackend::flash_attention : at::SDPBackend::efficient_attention;
  }
  return static_cast<int64_t>(kind);
}

} // namespace

// ----------------------------------------------------------------------------------------------- registration

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
namespace native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &::choose_attention)
}
} // namespace at
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard);

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, c10::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  // PyTorch has kernels of GPUs for these. Without them, several other operations would be counted.
  for (const char* name : {"native_layer_norm", "native_dropout_backward", "_foreach_norm.Scalar",
           "_foreach_add_.Scalar", "_foreach_sub_.List", "_foreach_mul_.Scalar", "_foreach_mul_.Tensor",
           "_foreach_lerp_.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY(simulate_cuda, m) {
  m.def("launch(Tensor[] tensors, int number) -> ()");
  m.impl("launch", c10::DispatchKey::CUDA, &launch);
  m.impl("launch", c10::DispatchKey::Meta, [](at::TensorList, int64_t) {});
}

// --------------------------------------------------------------------------------------- for Python's ctypes

using simulation::Graph;

extern "C" {
void set_launcher(Launch function) {
  launcher = function;
}
Graph* begin_capture() {
  return simulation::current = new Graph;
}
// Returns whether the capture has failed.
int end_capture(Graph* graph) {
  simulation::current = nullptr;
  graph->end_capture();
  return graph->failed;
}
int is_capturing() {
  return capturing() != nullptr;
}
// Reports a wait. Returns whether it was not permitted in a capture.
int wait_in_capture() {
  auto* graph = capturing();
  if (graph) graph->failed = true;
  return graph != nullptr;
}
// Returns what is wrong, or nothing. The text is valid until the next call.
const char* replay(Graph* graph) {
  static std::string error;
  c10::impl::ExcludeDispatchKeyGuard without_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  try {
    report("operation", "a CUDA graph");
    graph->replay();
    return nullptr;
  } catch (const c10::Error& failure) {
    error = failure.what_without_backtrace();
    return error.c_str();
  }
}
void free_graph(Graph* graph) {
  delete graph;
}
void set_reporter(Report function) {
  reporter = function;
}
void use_attention_of_gpu(int use) {
  attention_of_gpu = use;
}
}
