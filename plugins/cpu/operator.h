// An operator as a C++ class: what ONNX Runtime's C API asks for, made from what the class says of itself.
//
//   struct Example {
//     static constexpr const char* kName = "Example";
//     static constexpr ort::ElementType kInputs[] = {ort::kFloat};   // kUndefined: any type, the kernel asks
//     static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
//     static constexpr size_t kNumRequired = 1;                      // later inputs are optional
//     explicit Example(const Attributes& attributes);                // throws Error
//     void compute(Call& call) const;                                // throws Error; called from one thread at a time
//   };
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "onnxruntime_api.h"

namespace draftline {

// Becomes the error of the node.
using Error = std::runtime_error;

namespace detail {

// Whether shapes are read without an object on the heap; set when the operators are registered.
inline bool shapes_in_place = false;

inline void check(const ort::Api& api, ort::Status* status, const char* what) {
  if (status == nullptr) return;
  api.release_status(status);
  throw Error(std::string("ONNX Runtime refuses: ") + what);
}

}  // namespace detail

class Attributes {
 public:
  Attributes(const ort::Api& api, const ort::KernelInfo* info) : api_(api), info_(info) {}

  int64_t integer(const char* name) const {
    int64_t value = 0;
    detail::check(api_, api_.int_attribute(info_, name, &value), name);
    return value;
  }
  // Whether an integer is there and not 0.
  bool flag(const char* name) const {
    int64_t value = 0;
    ort::Status* absent = api_.int_attribute(info_, name, &value);
    if (absent != nullptr) api_.release_status(absent);
    return absent == nullptr && value != 0;
  }
  // A number of things, small enough for products of three.
  int64_t size(const char* name) const {
    constexpr int64_t kMost = 1 << 20;
    const int64_t value = integer(name);
    if (value < 1 || value > kMost)
      throw Error(std::string(name) + " is 1 .. " + std::to_string(kMost) + "; got " + std::to_string(value));
    return value;
  }
  float real(const char* name) const {
    float value = 0;
    detail::check(api_, api_.float_attribute(info_, name, &value), name);
    return value;
  }

 private:
  const ort::Api& api_;
  const ort::KernelInfo* info_;
};

constexpr size_t kMaxDims = 6;

// A tensor of a call; `data` is null for an optional input that is absent, and may be for one without elements.
struct Tensor {
  void* data = nullptr;
  ort::ElementType type = ort::kUndefined;
  size_t num_dims = 0;
  std::array<int64_t, kMaxDims> dims{};

  bool is_given() const { return type != ort::kUndefined; }

  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

// Throws Error unless a tensor has the shape.
inline void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> dims) {
  if (tensor.num_dims == dims.size() && std::equal(dims.begin(), dims.end(), tensor.dims.begin())) return;
  std::string rule = std::string(name) + " has the shape";
  for (int64_t size : dims) rule += " " + std::to_string(size);
  rule += "; got";
  for (size_t i = 0; i < tensor.num_dims; ++i) rule += " " + std::to_string(tensor.dims[i]);
  throw Error(rule);
}

class Call {
 public:
  Call(const ort::Api& api, ort::KernelContext* context) : api_(api), context_(context) {}

  Tensor input(size_t index) const {
    size_t count = 0;
    detail::check(api_, api_.input_count(context_, &count), "input count");
    Tensor tensor;
    if (index >= count) return tensor;
    const ort::Value* value = nullptr;
    detail::check(api_, api_.input(context_, index, &value), "input");
    if (value == nullptr) return tensor;
    if (detail::shapes_in_place) {
      const int64_t* dims = nullptr;
      detail::check(api_, api_.shape_reference(value, &tensor.type, &dims, &tensor.num_dims), "shape");
      check_num_dims(tensor);
      std::copy_n(dims, tensor.num_dims, tensor.dims.begin());
    } else {
      read_shape(value, tensor);
    }
    detail::check(api_, api_.data(value, &tensor.data), "data");
    return tensor;
  }

  template <typename T, size_t N>
  T* output(size_t index, const std::array<int64_t, N>& dims) {
    ort::Value* value = nullptr;
    detail::check(api_, api_.output(context_, index, dims.data(), N, &value), "output");
    void* data = nullptr;
    detail::check(api_, api_.data(value, &data), "data");
    return static_cast<T*>(data);
  }

  // Calls function(i) for i = 0 .. total - 1 from the session's threads. Which thread runs which i must not matter to
  // the result. `num_batches`: how many runs of neighbouring i are handed out; 0 = each i by itself. What the function
  // throws, the first of several, is thrown here once all threads have left it; no thread of ONNX Runtime sees it.
  template <typename Function>
  void parallel_for(size_t total, size_t num_batches, Function& function) {
    if (total == 0) return;
    if (total == 1) return function(size_t{0});
    struct Work {
      Function& function;
      std::atomic_flag has_failed = ATOMIC_FLAG_INIT;
      std::exception_ptr error{};
    } work{function};
    auto run = [](void* data, size_t index) {
      auto& [call_function, has_failed, error] = *static_cast<Work*>(data);
      try {
        call_function(index);
      } catch (...) {
        if (!has_failed.test_and_set()) error = std::current_exception();
      }
    };
    detail::check(api_, api_.parallel_for(context_, run, total, num_batches, &work), "parallel_for");
    if (work.error != nullptr) std::rethrow_exception(work.error);
  }

 private:
  static void check_num_dims(const Tensor& tensor) {
    if (tensor.num_dims > kMaxDims) throw Error("a tensor has 6 dimensions at most");
  }

  void read_shape(const ort::Value* value, Tensor& tensor) const {
    ort::ShapeInfo* info = nullptr;
    detail::check(api_, api_.shape_info(value, &info), "shape");
    api_.release_status(api_.element_type(info, &tensor.type));
    api_.release_status(api_.num_dimensions(info, &tensor.num_dims));
    if (tensor.num_dims <= kMaxDims) api_.release_status(api_.dimensions(info, tensor.dims.data(), tensor.num_dims));
    api_.release_shape_info(info);
    check_num_dims(tensor);
  }

  const ort::Api& api_;
  ort::KernelContext* context_;
};

// The description of operator Op that ONNX Runtime reads; lives as long as the library.
template <typename Op>
const ort::CustomOp* describe() {
  struct Kernel {
    Op op;
    const ort::Api& api;
  };
  static constexpr size_t kNumInputs = std::size(Op::kInputs), kNumOutputs = std::size(Op::kOutputs);
  static const ort::CustomOp description = [] {
    ort::CustomOp o{};
    o.version = ort::kApiVersion;
    o.get_name = [](const ort::CustomOp*) { return Op::kName; };
    o.get_provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
    o.get_input_type = [](const ort::CustomOp*, size_t i) { return Op::kInputs[i]; };
    o.get_input_count = [](const ort::CustomOp*) { return kNumInputs; };
    o.get_output_type = [](const ort::CustomOp*, size_t i) { return Op::kOutputs[i]; };
    o.get_output_count = [](const ort::CustomOp*) { return kNumOutputs; };
    o.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    o.get_input_characteristic = [](const ort::CustomOp*, size_t i) {
      return i < Op::kNumRequired ? ort::kRequired : ort::kOptional;
    };
    o.get_output_characteristic = [](const ort::CustomOp*, size_t) { return ort::kRequired; };
    o.get_input_memory = [](const ort::CustomOp*, size_t) { return ort::kMemoryDefault; };
    const auto none = [](const ort::CustomOp*) { return 1; };
    o.get_variadic_input_min = none;
    o.get_variadic_input_same = none;
    o.get_variadic_output_min = none;
    o.get_variadic_output_same = none;
    o.create_kernel_v2 = [](const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info,
                            void** out) -> ort::Status* {
      try {
        *out = new Kernel{Op(Attributes(*api, info)), *api};
        return nullptr;
      } catch (const std::exception& error) {
        return api->create_status(ort::kInvalidArgument, (std::string(Op::kName) + ": " + error.what()).c_str());
      }
    };
    o.compute_v2 = [](void* kernel, ort::KernelContext* context) -> ort::Status* {
      const auto& [op, api] = *static_cast<Kernel*>(kernel);
      try {
        Call call(api, context);
        op.compute(call);
        return nullptr;
      } catch (const std::exception& error) {
        return api.create_status(ort::kFail, (std::string(Op::kName) + ": " + error.what()).c_str());
      }
    };
    o.get_start_version = [](const ort::CustomOp*) { return 1; };
    o.get_end_version = [](const ort::CustomOp*) { return 1; };
    return o;
  }();
  return &description;
}

}  // namespace draftline
