#include "quantized_matmul.h"

#include "quantized_product.h"
#include "tile_product.h"

namespace draftline {
namespace {

constexpr int64_t kTile = kTileOutputs, kBlock = kBlockInputs;

}  // namespace

QuantizedMatMul::QuantizedMatMul(const Attributes& attributes)
    : bits_(attributes.integer("bits")),
      num_inputs_(attributes.size("num_inputs")),
      num_outputs_(attributes.size("num_outputs")) {
  if (bits_ != 8 && bits_ != 4) throw Error("bits is 8 or 4");
}

void QuantizedMatMul::compute(Call& call) const {
  const Tensor x = call.input(0), codes = call.input(1), scales = call.input(2), zeros = call.input(3);
  const int64_t num_rows = x.dims[0], num_tiles = ceil_div(num_outputs_, kTile);
  const int64_t num_blocks = ceil_div(num_inputs_, kBlock);
  check_shape(x, "x", {num_rows, num_inputs_});
  check_shape(codes, "codes", {num_tiles, num_blocks, bits_, kTile, 4});
  check_shape(scales, "scales", {num_tiles, num_blocks, kTile});
  if (bits_ == 4) check_shape(zeros, "zeros", {num_tiles, num_blocks, kTile});
  float* y = call.output<float>(0, std::array{num_rows, num_outputs_});
  if (num_rows == 0) return;

  thread_local Scratch memory;
  const int64_t row_bytes = quantized_row_bytes(num_inputs_);
  uint8_t* rows = memory.get(static_cast<size_t>(num_rows * row_bytes));
  auto quantize = [&](size_t index) {
    const int64_t first = static_cast<int64_t>(index) * kGroupRows;
    quantize_group(x.as<float>() + first * num_inputs_, std::min(kGroupRows, num_rows - first), num_inputs_, bits_,
                   rows + first * row_bytes);
  };
  const auto num_groups = static_cast<size_t>(ceil_div(num_rows, kGroupRows));
  if (num_rows * num_inputs_ <= kSerialInputs) {
    for (size_t group = 0; group < num_groups; ++group) quantize(group);
  } else {
    call.parallel_for(num_groups, 0, quantize);
  }

  const QuantizedProduct product{codes.as<uint8_t>(), scales.as<float>(), zeros.as<uint8_t>(), rows, bits_, num_rows,
                                 num_inputs_,         num_outputs_};
  auto multiply = [&, tiles = product.piece_tiles()](size_t index) {
    const auto piece = static_cast<int64_t>(index);
    product.multiply_piece(piece, y + piece * tiles * kTile, num_outputs_);
  };
  call.parallel_for(static_cast<size_t>(product.num_pieces()), 0, multiply);
}

QuantizedEmbedding::QuantizedEmbedding(const Attributes& attributes) : num_inputs_(attributes.size("num_inputs")) {}

void QuantizedEmbedding::compute(Call& call) const {
  const Tensor codes = call.input(0), scales = call.input(1), ids = call.input(2);
  const int64_t num_rows = ids.dims[0], num_tiles = codes.dims[0], num_blocks = ceil_div(num_inputs_, kBlock);
  check_shape(codes, "codes", {num_tiles, num_blocks, 8, kTile, 4});
  check_shape(scales, "scales", {num_tiles, num_blocks, kTile});
  check_shape(ids, "ids", {num_rows});
  for (int64_t t = 0; t < num_rows; ++t) {
    const int64_t id = ids.as<int32_t>()[t];
    if (id < 0 || id >= num_tiles * kTile) throw Error("an id is a row of the table; got " + std::to_string(id));
  }
  float* rows = call.output<float>(0, std::array{num_rows, num_inputs_});
  auto look_up = [&](size_t index) {
    const int64_t t = static_cast<int64_t>(index), id = ids.as<int32_t>()[t], tile = id / kTile, lane = id % kTile;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t at = tile * num_blocks + block, size = std::min(kBlock, num_inputs_ - block * kBlock);
      const uint8_t* code = codes.as<uint8_t>() + at * kBlock * kTile + lane * 4;
      const float scale = scales.as<float>()[at * kTile + lane];
      float* out = rows + t * num_inputs_ + block * kBlock;
      for (int64_t i = 0; i < size; ++i) out[i] = static_cast<float>(code[i / 4 * 4 * kTile + i % 4] - 128) * scale;
    }
  };
  if (num_rows * num_inputs_ > kSerialInputs) return call.parallel_for(static_cast<size_t>(num_rows), 0, look_up);
  for (int64_t t = 0; t < num_rows; ++t) look_up(static_cast<size_t>(t));
}

}  // namespace draftline
