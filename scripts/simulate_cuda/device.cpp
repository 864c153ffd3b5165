// A CUDA device that exists in name only, for builds of PyTorch without CUDA.
//
// The memory of a tensor on `cuda:0` is memory of the host. An operation on it runs the kernel for CPUs on an alias
// of the tensor that claims to be on the CPU. Dispatch, device checks, autocast, autograd and pinned memory are
// PyTorch's own. Python is told about each operation, copy and wait of the host.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

namespace {

using at::Tensor;
const c10::Device gpu(c10::kCUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, gpu);

// ------------------------------------------------------------------------------------------------- reports

// Called with "operation", "copy" or "wait", and a name. The operation fails if the result is not 0.
using Report = int (*)(const char* kind, const char* name);
std::atomic<Report> reporter{nullptr};

void report(const char* kind, const std::string& name) {
  const Report call = reporter;
  TORCH_CHECK(!call || !call(kind, name.c_str()), "called a synchronizing CUDA operation: ", name);
}

// ------------------------------------------------------------------------------------------- pinned memory

std::mutex pinned_lock;
std::unordered_set<const void*> pinned; // the beginnings of the storages

bool is_pinned(const void* storage) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  return pinned.count(storage) > 0;
}

void free_pinned(void* storage) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(storage);
  }
  c10::free_cpu(storage);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* storage = c10::alloc_cpu(bytes);
    if (storage) {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned.insert(storage);
    }
    return {storage, storage, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
PinnedAllocator pinned_allocator;

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

// ------------------------------------------------------------------------------------------------- aliases

// A tensor with the same memory on another device, or the tensor itself if it is there.
Tensor alias(const Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device() == device) return tensor;
  const c10::Storage kept = tensor.storage();
  return at::for_blob(tensor.numel() ? tensor.mutable_data_ptr() : nullptr, tensor.sizes())
      .strides(tensor.strides())
      .deleter([kept](void*) {})
      .options(at::TensorOptions().dtype(tensor.dtype()).device(device))
      .target_device(device)
      .resizeable_storage()
      .allocator(c10::GetCPUAllocator())
      .make_tensor();
}

Tensor on_cpu(const Tensor& tensor) {
  return alias(tensor, c10::kCPU);
}

Tensor on_gpu(const Tensor& tensor) {
  return alias(tensor, gpu);
}

// After an operation has resized the CPU alias of a GPU tensor, gives the GPU tensor the same sizes and memory.
void follow_resize(const Tensor& tensor, const Tensor& resized) {
  const bool is_new = resized.numel() && (!tensor.numel() || resized.data_ptr() != tensor.data_ptr());
  if (is_new) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(
        resized.mutable_data_ptr(), new Tensor(resized), [](void* kept) { delete static_cast<Tensor*>(kept); }, gpu));
    storage->set_nbytes(resized.storage().nbytes());
  }
  if (is_new || resized.sizes() != tensor.sizes() || resized.strides() != tensor.strides())
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        resized.sizes(), resized.strides(), is_new ? 0 : tensor.storage_offset());
}

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

// The tensors of one operation: those on the GPU, and their aliases.
struct Arguments {
  std::vector<std::pair<Tensor, Tensor>> pairs;
  bool any_on_cpu = false;

  Tensor to_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      any_on_cpu |= tensor.defined() && tensor.dim() > 0; // single numbers may be on the CPU
      return tensor;
    }
    for (const auto& [ours, on_host] : pairs)
      if (ours.is_same(tensor)) return on_host;
    return pairs.emplace_back(tensor, on_cpu(tensor)).second;
  }

  Tensor to_gpu(const Tensor& tensor) {
    for (const auto& [ours, on_host] : pairs)
      if (on_host.is_same(tensor)) return ours;
    return on_gpu(tensor);
  }
};

// Replaces the tensors in a value.
template <class Function>
void change_tensors(c10::IValue& value, Function change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    value = changed;
  }
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
  if (!is_view(schema) && !without_kernel.count(name)) report("operation", name);
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && (*stack)[first + 2].toBool()) {
    (*stack)[first] = (*stack)[first].toTensor().to(at::kFloat); // only the kernel for GPUs includes this conversion
    (*stack)[first + 2] = false;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  operation.callBoxed(stack);
  for (const auto& [ours, on_host] : arguments.pairs) follow_resize(ours, on_host);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    change_tensors((*stack)[i], [&](const Tensor& tensor) { return arguments.to_gpu(tensor); });
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return on_gpu(at::empty(size, at::TensorOptions().dtype(dtype).device(c10::kCPU), format));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return on_gpu(at::empty_strided(size, stride, at::TensorOptions().dtype(dtype).device(c10::kCPU)));
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
  on_cpu(self).copy_(on_cpu(source));
  return self;
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

// --------------------------------------------------------------------------------------- for Python's ctypes

extern "C" {
void set_reporter(Report function) {
  reporter = function;
}
void use_attention_of_gpu(int use) {
  attention_of_gpu = use;
}
}
