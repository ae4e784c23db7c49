#include "linear.h"

#include "kernels.h"
#include "linear_product.h"
#include "scratch.h"

namespace draftline {
namespace {

// Nanoseconds of one output on one core, whatever the core: only the size of a piece of work depends on it.
int64_t output_ns(int64_t num_rows, int64_t num_inputs) {
  return std::max<int64_t>(1, num_inputs * std::max<int64_t>(20, num_rows) / 60);
}

constexpr int64_t kPieceNs = 4000;         // a smaller piece of work is not worth handing out
constexpr int64_t kOneRowPieceNs = 16000;  // of one row: memory is read faster in longer runs
constexpr int64_t kPieceOutputs = 16;      // of many rows: what a core reads again for each panel of them

}  // namespace

int64_t outputs_of_piece(int64_t num_rows, int64_t num_inputs) {
  const int64_t piece_ns = num_rows == 1 ? kOneRowPieceNs : kPieceNs;
  const int64_t least = std::max(kPieceOutputs, piece_ns / output_ns(num_rows, num_inputs));
  return ceil_div(least, kOutputGroup) * kOutputGroup;
}

void Linear::compute(Call& call) const {
  const Tensor x = call.input(0), weight = call.input(1);
  if (x.num_dims != 2 || weight.num_dims != 2 || x.dims[1] != weight.dims[1])
    throw Error("x and weight are matrices with the same number of columns; got " + std::to_string(x.dims[1]) +
                " and " + std::to_string(weight.dims[1]));
  const int64_t num_rows = x.dims[0], num_inputs = x.dims[1], num_outputs = weight.dims[0];
  if (num_inputs < 1) throw Error("rows have an element at least");
  float* y = call.output<float>(0, std::array{num_rows, num_outputs});
  if (num_rows == 0 || num_outputs == 0) return;

  const int64_t piece = outputs_of_piece(num_rows, num_inputs);
  auto multiply_piece = [&, kernel = kernels()->multiply_rows](size_t index) {
    const int64_t first = static_cast<int64_t>(index) * piece;
    LinearProduct product;
    product.x = x.as<float>();
    product.weight = weight.as<float>() + first * num_inputs;
    product.num_rows = num_rows;
    product.num_inputs = num_inputs;
    product.num_outputs = std::min(piece, num_outputs - first);
    product.y = y + first;
    product.y_stride = num_outputs;
    kernel(product);
  };
  call.parallel_for(static_cast<size_t>(ceil_div(num_outputs, piece)), 0, multiply_piece);
}

}  // namespace draftline
