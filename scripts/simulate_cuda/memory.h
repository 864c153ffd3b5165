// What the simulated device reports, and its memory: pinned memory, and tensors that share memory with others.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "graphs.h"

namespace {

using at::Tensor;
using simulation::capturing;
using simulation::of_memory;
const c10::Device gpu(c10::kCUDA, 0);

// ------------------------------------------------------------------------------------------------- reports

// Called with "operation", "copy", "wait" or "captured", and a name. The operation fails if the result is not 0.
using Report = int (*)(const char* kind, const char* name);
std::atomic<Report> reporter{nullptr};

void report(const char* kind, const std::string& name) {
  if (auto* graph = capturing()) {
    graph->failed |= !std::strcmp(kind, "wait");
    TORCH_CHECK(!graph->failed, "operation not permitted when stream is capturing: ", name);
    kind = "captured";
  }
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

// A new tensor on the GPU. If it was made in a capture, the graph owns its memory.
Tensor owned(Tensor tensor) {
  if (auto* graph = capturing(); graph && tensor.defined()) graph->own(tensor);
  return tensor;
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

  // The tensor on the GPU of which this is the alias.
  const Tensor* of_alias(const Tensor& tensor) const {
    for (const auto& [ours, on_host] : pairs)
      if (on_host.is_same(tensor)) return &ours;
    return nullptr;
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

} // namespace
