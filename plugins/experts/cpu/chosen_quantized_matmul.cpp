#include "chosen_quantized_matmul.h"

#include "chosen_rows.h"
#include "quantized_product.h"
#include "tile_product.h"

namespace draftline {

ChosenQuantizedMatMul::ChosenQuantizedMatMul(const Attributes& attributes)
    : bits_(attributes.integer("bits")),
      num_inputs_(attributes.size("num_inputs")),
      num_outputs_(attributes.size("num_outputs")) {
  if (bits_ != 8 && bits_ != 4) throw Error("bits is 8 or 4");
}

void ChosenQuantizedMatMul::compute(Call& call) const {
  const Tensor x = call.input(0), ids = call.input(1), codes = call.input(2), scales = call.input(3);
  const Tensor zeros = call.input(4);
  const int64_t num_choices = choices_of_row(x, ids), num_rows = ids.dims[0], num_matrices = codes.dims[0];
  const int64_t num_tiles = ceil_div(num_outputs_, kTileOutputs), num_blocks = ceil_div(num_inputs_, kBlockInputs);
  check_shape(x, "x", {x.dims[0], num_inputs_});
  check_shape(codes, "codes", {num_matrices, num_tiles, num_blocks, bits_, kTileOutputs, 4});
  check_shape(scales, "scales", {num_matrices, num_tiles, num_blocks, kTileOutputs});
  if (bits_ == 4) check_shape(zeros, "zeros", {num_matrices, num_tiles, num_blocks, kTileOutputs});
  float* y = call.output<float>(0, std::array{num_rows, num_outputs_});
  if (num_rows == 0) return;

  const ChosenRows rows(ids.as<int64_t>(), num_rows, num_matrices);
  const int64_t* order = rows.order().data();
  thread_local Scratch quantized_memory;
  const int64_t row_bytes = quantized_row_bytes(num_inputs_);
  uint8_t* quantized = quantized_memory.get(static_cast<size_t>(num_rows * row_bytes));
  const auto quantize = [&](const ChosenRows::Run& run, int64_t group) {
    const int64_t first = run.first + group * kGroupRows;
    const int64_t count = std::min(kGroupRows, run.num_rows - group * kGroupRows);
    thread_local Scratch memory;
    auto* gathered = reinterpret_cast<float*>(memory.get(static_cast<size_t>(count * num_inputs_) * sizeof(float)));
    for (int64_t r = 0; r < count; ++r) {
      const float* row = x.as<float>() + order[first + r] / num_choices * num_inputs_;
      std::copy_n(row, num_inputs_, gathered + r * num_inputs_);
    }
    quantize_group(gathered, count, num_inputs_, bits_, quantized + first * row_bytes);
  };
  const auto num_groups = [](const ChosenRows::Run& run) { return ceil_div(run.num_rows, kGroupRows); };
  if (num_rows * num_inputs_ <= kSerialInputs) {
    for (const ChosenRows::Run& run : rows.runs()) {
      for (int64_t group = 0; group < num_groups(run); ++group) quantize(run, group);
    }
  } else {
    rows.for_pieces(call, num_groups, quantize);
  }

  const auto product_of = [&](const ChosenRows::Run& run) {
    const int64_t first = run.matrix * num_tiles * num_blocks * kTileOutputs;  // of scales
    QuantizedProduct product;
    product.codes = codes.as<uint8_t>() + first * bits_ * 4;
    product.scales = scales.as<float>() + first;
    product.zeros = bits_ == 4 ? zeros.as<uint8_t>() + first : nullptr;
    product.rows = quantized + run.first * row_bytes;
    product.bits = bits_;
    product.num_rows = run.num_rows;
    product.num_inputs = num_inputs_;
    product.num_outputs = num_outputs_;
    return product;
  };
  rows.for_pieces(
      call, [&](const ChosenRows::Run& run) { return product_of(run).num_pieces(); },
      [&](const ChosenRows::Run& run, int64_t piece) {
        const QuantizedProduct product = product_of(run);
        const int64_t size = product.piece_tiles() * kTileOutputs, first = piece * size;
        const int64_t count = std::min(size, num_outputs_ - first);
        thread_local Scratch memory;
        auto* part = reinterpret_cast<float*>(memory.get(static_cast<size_t>(run.num_rows * count) * sizeof(float)));
        product.multiply_piece(piece, part, count);
        for (int64_t r = 0; r < run.num_rows; ++r) {
          std::copy_n(part + r * count, count, y + order[run.first + r] * num_outputs_ + first);
        }
      });
}

}  // namespace draftline
