// CUDA graphs of the simulated device.
//
// A GPU does not execute what is captured. The simulation does, since later operations of the host depend on it, and
// undoes it at the end: memory from before the capture gets its values back, and memory allocated in it is filled
// with invalid values (NaN, -1), which remain until a replay. A replay executes what was captured on the same memory,
// with the numbers that the host had then. After it, memory that only the graph refers to is invalid again: on a GPU,
// another graph of the same pool may use it.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace simulation {

using at::Tensor;

// A tensor on the CPU with the memory of any tensor, which it does not keep alive.
inline Tensor of_memory(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::from_blob(tensor.numel() ? tensor.mutable_data_ptr() : nullptr, tensor.sizes(), tensor.strides(),
      at::TensorOptions().dtype(tensor.dtype()));
}

class Graph {
public:
  // Memory that was allocated in the capture stays allocated as long as the graph exists.
  void own(const Tensor& tensor) {
    owned.emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage());
  }

  // Has to be called before an operation of the capture reads or writes a tensor.
  void use(const Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.numel()) return;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (owned.count(storage)) return;
    Input& input = inputs.try_emplace(storage, storage).first->second;
    if (written && input.before.empty()) {
      const char* data = static_cast<const char*>(storage->data());
      input.before.assign(data, data + storage->nbytes());
    }
  }

  void add(std::function<void()> step) {
    steps.push_back(std::move(step));
  }

  void end_capture() {
    for (auto& [storage, input] : inputs) {
      const auto kept = input.storage.lock();
      if (kept && kept->data() == input.data && !input.before.empty())
        std::memcpy(kept->mutable_data(), input.before.data(), input.before.size());
      input.before = {};
    }
    for (auto& [_, storage] : owned) invalidate(storage);
  }

  void replay() {
    for (auto& [_, input] : inputs) {
      const auto kept = input.storage.lock();
      TORCH_CHECK(kept && kept->data() == input.data,
          "a CUDA graph is replayed, but memory that it uses was freed or moved after the capture");
    }
    for (auto& step : steps) step();
    for (auto& [_, storage] : owned)
      if (storage.use_count() == 1) invalidate(storage);
  }

  bool failed = false;
  const std::thread::id thread = std::this_thread::get_id();

private:
  // Memory from before the capture. The weak pointer keeps the address of the storage from being used again.
  struct Input {
    explicit Input(c10::StorageImpl* storage)
        : storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)), data(storage->data()) {}
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    std::vector<char> before; // its values, if the capture writes to it
  };

  static void invalidate(const c10::Storage& storage) {
    if (storage.nbytes()) std::memset(storage.mutable_data(), 0xFF, storage.nbytes());
  }

  std::vector<std::function<void()>> steps;
  std::unordered_map<c10::StorageImpl*, c10::Storage> owned;
  std::unordered_map<c10::StorageImpl*, Input> inputs;
};

inline Graph* current = nullptr; // the graph whose capture has begun

// The graph that captures what this thread does: one stream per device is enough for that, except that other threads
// go on meanwhile, as in `capture_error_mode="thread_local"`. Threads of a backward pass belong to the capture.
inline Graph* capturing() {
  Graph* graph = current;
  const bool ours = graph &&
      (graph->thread == std::this_thread::get_id() || torch::autograd::get_current_graph_task_id() != -1);
  return ours ? graph : nullptr;
}

} // namespace simulation
