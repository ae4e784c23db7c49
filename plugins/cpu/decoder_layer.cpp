#include "decoder_layer.h"

#include "kernels.h"

namespace draftline {

void SiluGate::compute(Call& call) const {
  const Tensor both = call.input(0);
  const int64_t num_rows = both.dims[0], size = both.dims[1] / 2;
  float* out = call.output<float>(0, std::array{num_rows, size});
  auto row = [&, kernel = kernels()->silu_gate](size_t t) {
    const float* gate = both.as<float>() + 2 * size * static_cast<int64_t>(t);
    kernel(gate, gate + size, out + size * static_cast<int64_t>(t), static_cast<size_t>(size));
  };
  call.parallel_for(static_cast<size_t>(num_rows), 0, row);
}

}  // namespace draftline
