#include "decoder_layer.h"

#include "kernels.h"

namespace draftline {
namespace {

// Elements that a thread should be given at once: waking it costs as much as a few thousand of them.
constexpr int64_t kElementsOfTask = 8192;

// Calls function(t) for every row, whose elements decide how many rows are a task.
template <typename Function>
void for_rows(Call& call, int64_t num_rows, int64_t elements_of_row, const Function& function) {
  const int64_t rows_of_task = std::max<int64_t>(1, kElementsOfTask / elements_of_row);
  auto task = [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * rows_of_task;
    for (int64_t t = first; t < std::min(first + rows_of_task, num_rows); ++t) function(t);
  };
  call.parallel_for(static_cast<size_t>((num_rows + rows_of_task - 1) / rows_of_task), 0, task);
}

using GateKernel = void (*)(const float* gate, const float* up, float* out, size_t count);

void gate_rows(Call& call, GateKernel kernel, bool up_first) {
  const Tensor both = call.input(0);
  if (both.num_dims != 2 || both.dims[1] % 2 != 0) throw Error("the input is a matrix of two equal halves");
  const int64_t num_rows = both.dims[0], size = both.dims[1] / 2;
  float* out = call.output<float>(0, std::array{num_rows, size});
  if (size == 0) return;
  for_rows(call, num_rows, size, [&](int64_t t) {
    const float* first = both.as<float>() + 2 * size * t;
    const float *gate = first + (up_first ? size : 0), *up = first + (up_first ? 0 : size);
    kernel(gate, up, out + size * t, static_cast<size_t>(size));
  });
}

}  // namespace

void SiluGate::compute(Call& call) const { gate_rows(call, kernels()->silu_gate, up_first_); }

void GeluGate::compute(Call& call) const { gate_rows(call, kernels()->gelu_gate, false); }

void AddNorm::compute(Call& call) const {
  const Tensor x = call.input(0), y = call.input(1), weight = call.input(2);
  const int64_t num_rows = x.dims[0], size = x.dims[1];
  if (size < 1) throw Error("rows have an element at least");
  check_shape(x, "x", {num_rows, size});
  check_shape(y, "y", {num_rows, size});
  check_shape(weight, "weight", {size});
  float* total = call.output<float>(0, std::array{num_rows, size});
  float* normed = call.output<float>(1, std::array{num_rows, size});
  for_rows(call, num_rows, size, [&, kernel = kernels()->add_norm](int64_t t) {
    const int64_t at = t * size;
    kernel(x.as<float>() + at, y.as<float>() + at, static_cast<size_t>(size), weight.as<float>(), epsilon_, total + at,
           normed + at);
  });
}

RotatedHeads::RotatedHeads(const Attributes& attributes)
    : num_heads_(attributes.size("num_heads")),
      num_kv_heads_(attributes.size("num_kv_heads")),
      size_(attributes.size("head_size")),
      epsilon_(attributes.real("epsilon")) {
  if (size_ % 2 != 0) throw Error("head_size is even; got " + std::to_string(size_));
}

void RotatedHeads::compute(Call& call) const {
  const Tensor qkv = call.input(0), cosines = call.input(1), sines = call.input(2), position_ids = call.input(3);
  const Tensor q_norm = call.input(4), k_norm = call.input(5);
  const int64_t num_rows = position_ids.dims[0], num_positions = cosines.dims[0], half = cosines.dims[1];
  const int64_t q_size = num_heads_ * size_, kv_size = num_kv_heads_ * size_, qkv_size = q_size + 2 * kv_size;
  check_shape(position_ids, "position_ids", {num_rows});
  check_shape(qkv, "qkv", {num_rows, qkv_size});
  if (half < 1 || 2 * half > size_) {
    throw Error("cosines have 1 to " + std::to_string(size_ / 2) + " columns; got " + std::to_string(half));
  }
  check_shape(cosines, "cosines", {num_positions, half});
  check_shape(sines, "sines", {num_positions, half});
  if (q_norm.is_given() != k_norm.is_given()) throw Error("q_norm and k_norm are both given or neither");
  if (q_norm.is_given()) {
    check_shape(q_norm, "q_norm", {size_});
    check_shape(k_norm, "k_norm", {size_});
  }
  const auto* positions = position_ids.as<int32_t>();
  for (int64_t t = 0; t < num_rows; ++t) {
    if (positions[t] < 0 || positions[t] >= num_positions) {
      throw Error("position_ids are 0 .. " + std::to_string(num_positions - 1) + "; got " +
                  std::to_string(positions[t]) + " in row " + std::to_string(t));
    }
  }
  float* q = call.output<float>(0, std::array{num_rows, num_heads_, size_});
  float* k = call.output<float>(1, std::array{num_rows, num_kv_heads_, size_});
  float* v = call.output<float>(2, std::array{num_rows, num_kv_heads_, size_});
  for_rows(call, num_rows, qkv_size, [&, kernel = kernels()->rotate_heads](int64_t t) {
    const float* row = qkv.as<float>() + t * qkv_size;
    const float* cosine = cosines.as<float>() + positions[t] * half;
    const float* sine = sines.as<float>() + positions[t] * half;
    const auto rotate = [&](const float* heads, int64_t count, const Tensor& norm, float* out) {
      kernel(heads, static_cast<size_t>(count), static_cast<size_t>(size_), static_cast<size_t>(half), cosine, sine,
             norm.as<float>(), epsilon_, out);
    };
    rotate(row, num_heads_, q_norm, q + t * q_size);
    rotate(row + q_size, num_kv_heads_, k_norm, k + t * kv_size);
    std::memcpy(v + t * kv_size, row + q_size + kv_size, static_cast<size_t>(kv_size) * sizeof(float));
  });
}

}  // namespace draftline
