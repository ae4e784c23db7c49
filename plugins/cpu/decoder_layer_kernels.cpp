// Compiled once per instruction set.
#include "kernels.h"
#include "simd.h"

namespace draftline::DRAFTLINE_ISA {
namespace {

int lanes_left(size_t i, size_t count) { return static_cast<int>(count - i < kLanes ? count - i : kLanes); }

// Of a row, by 16 lanes and then their tree.
float sum_of_squares(const float* x, size_t size) {
  F16 squares = set(0.0f);
  for (size_t i = 0; i < size; i += kLanes) {
    const F16 part = load_first(x + i, lanes_left(i, size));
    squares = fma(part, part, squares);
  }
  return sum(squares);
}

// out = x * weight / rms(x); out may be x. All NaN where the squares have no finite sum: zeros would hide it.
void norm(const float* x, size_t size, const float* weight, float epsilon, float* out) {
  const float mean = sum_of_squares(x, size) / static_cast<float>(size) + epsilon;
  const F16 scale = set(mean < INFINITY ? 1.0f / __builtin_sqrtf(mean) : NAN);
  for (size_t i = 0; i < size; i += kLanes) {
    const int n = lanes_left(i, size);
    store_first(out + i, mul(mul(load_first(x + i, n), scale), load_first(weight + i, n)), n);
  }
}

// out = gate * sigmoid(argument(gate)) * up.
template <typename Argument>
void sigmoid_gate(const float* gate, const float* up, float* out, size_t count, const Argument& argument) {
  const F16 one = set(1.0f);
  for (size_t i = 0; i < count; i += kLanes) {
    const int n = lanes_left(i, count);
    const F16 g = load_first(gate + i, n);
    const F16 sigmoid = div(one, add(one, exp(sub(set(0.0f), argument(g)))));
    store_first(out + i, mul(mul(g, sigmoid), load_first(up + i, n)), n);
  }
}

}  // namespace

void silu_gate(const float* gate, const float* up, float* out, size_t count) {
  sigmoid_gate(gate, up, out, count, [](F16 g) { return g; });
}

void gelu_gate(const float* gate, const float* up, float* out, size_t count) {
  const F16 slope = set(1.5957691216057308f), cubic = set(0.071354816272600248f);  // 2 sqrt(2 / pi), 0.044715 of it
  sigmoid_gate(gate, up, out, count, [&](F16 g) { return mul(g, fma(mul(g, g), cubic, slope)); });
}

void add_norm(const float* x, const float* y, size_t size, const float* weight, float epsilon, float* total,
              float* normed) {
  for (size_t i = 0; i < size; i += kLanes) {
    const int n = lanes_left(i, size);
    store_first(total + i, add(load_first(x + i, n), load_first(y + i, n)), n);
  }
  norm(total, size, weight, epsilon, normed);
}

void rotate_heads(const float* heads, size_t num_heads, size_t size, size_t half, const float* cosines,
                  const float* sines, const float* norm_weight, float epsilon, float* out) {
  for (size_t head = 0; head < num_heads; ++head, heads += size, out += size) {
    const float* x = heads;
    if (norm_weight != nullptr) {
      norm(heads, size, norm_weight, epsilon, out);
      x = out;
    } else {
      for (size_t i = 2 * half; i < size; i += kLanes) {
        const int n = lanes_left(i, size);
        store_first(out + i, load_first(heads + i, n), n);
      }
    }
    for (size_t i = 0; i < half; i += kLanes) {
      const int n = lanes_left(i, half);
      const F16 a = load_first(x + i, n), b = load_first(x + half + i, n);
      const F16 cosine = load_first(cosines + i, n), sine = load_first(sines + i, n);
      store_first(out + i, sub(mul(a, cosine), mul(b, sine)), n);
      store_first(out + half + i, add(mul(b, cosine), mul(a, sine)), n);
    }
  }
}

}  // namespace draftline::DRAFTLINE_ISA
