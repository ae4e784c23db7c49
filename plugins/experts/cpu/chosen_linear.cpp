#include "chosen_linear.h"

#include "chosen_rows.h"
#include "kernels.h"
#include "linear.h"
#include "linear_product.h"
#include "scratch.h"

namespace draftline {

void ChosenLinear::compute(Call& call) const {
  const Tensor x = call.input(0), ids = call.input(1), weight = call.input(2);
  const int64_t num_choices = choices_of_row(x, ids), num_rows = ids.dims[0];
  if (weight.num_dims != 3 || weight.dims[2] != x.dims[1] || x.dims[1] < 1)
    throw Error("x and matrices have the same number of columns, one at least; got " + std::to_string(x.dims[1]) +
                " and " + std::to_string(weight.dims[2]));
  const int64_t num_inputs = x.dims[1], num_outputs = weight.dims[1];
  float* y = call.output<float>(0, std::array{num_rows, num_outputs});
  if (num_rows == 0 || num_outputs == 0) return;

  const ChosenRows rows(ids.as<int64_t>(), num_rows, weight.dims[0]);
  const int64_t* order = rows.order().data();
  thread_local Scratch gathered_memory;
  const size_t row_bytes = static_cast<size_t>(num_inputs) * sizeof(float);
  auto* gathered = reinterpret_cast<float*>(gathered_memory.get(static_cast<size_t>(num_rows) * row_bytes));
  for (int64_t place = 0; place < num_rows; ++place) {
    std::memcpy(gathered + place * num_inputs, x.as<float>() + order[place] / num_choices * num_inputs, row_bytes);
  }
  rows.for_pieces(
      call,
      [=](const ChosenRows::Run& run) { return ceil_div(num_outputs, outputs_of_piece(run.num_rows, num_inputs)); },
      [&, kernel = kernels()->multiply_rows](const ChosenRows::Run& run, int64_t piece) {
        const int64_t size = outputs_of_piece(run.num_rows, num_inputs), first = piece * size;
        const int64_t count = std::min(size, num_outputs - first);
        thread_local Scratch memory;
        auto* part = reinterpret_cast<float*>(memory.get(static_cast<size_t>(run.num_rows * count) * sizeof(float)));
        LinearProduct product;
        product.x = gathered + run.first * num_inputs;
        product.weight = weight.as<float>() + (run.matrix * num_outputs + first) * num_inputs;
        product.num_rows = run.num_rows;
        product.num_inputs = num_inputs;
        product.num_outputs = count;
        product.y = part;
        product.y_stride = count;
        kernel(product);
        for (int64_t r = 0; r < run.num_rows; ++r) {
          std::copy_n(part + r * count, count, y + order[run.first + r] * num_outputs + first);
        }
      });
}

}  // namespace draftline
