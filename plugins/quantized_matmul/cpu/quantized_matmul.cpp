#include "quantized_matmul.h"

#include <vector>

#include "kernels.h"
#include "tile_product.h"

namespace draftline {
namespace {

constexpr int64_t kTile = kTileOutputs, kBlock = kBlockInputs;
constexpr size_t kAlignment = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> expected) {
  if (tensor.num_dims == expected.size() && std::equal(expected.begin(), expected.end(), tensor.dims.begin())) return;
  std::string text = std::string(name) + " has the shape";
  for (const int64_t dim : expected) text += " " + std::to_string(dim);
  throw Error(text);
}

// Memory of the calling thread that calls share: it grows to what the largest one needs.
uint8_t* scratch(size_t num_bytes) {
  thread_local std::vector<uint8_t> memory;
  if (memory.size() < num_bytes + kAlignment) memory.resize(num_bytes + kAlignment);
  const size_t offset = -reinterpret_cast<uintptr_t>(memory.data()) % kAlignment;
  return memory.data() + offset;
}

// Nanoseconds of one block of a tile on one core, whatever the core: only the size of a piece of work depends on it.
int64_t block_ns(int64_t num_rows) { return std::max<int64_t>(40, 3 * num_rows); }

constexpr int64_t kPieceNs = 4000;           // a smaller piece of work is not worth handing out
constexpr int64_t kPanelBytes = 192 << 10;   // of quantised rows that stay in a core's cache while tiles pass
constexpr int64_t kSerialInputs = 16 << 10;  // as many inputs are quantised before a second thread has woken
constexpr int64_t kPrefetchBytes = 4096;

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

  // Rows stand in groups, and a group block by block, each block with its rows side by side.
  const int64_t num_groups = ceil_div(num_rows, kGroupRows), row_bytes = num_blocks * kRowBlockBytes;
  uint8_t* rows = scratch(static_cast<size_t>(num_rows * row_bytes));
  const auto rows_of = [=](int64_t group) { return std::min(kGroupRows, num_rows - group * kGroupRows); };
  const Kernels& run = *kernels();
  auto quantize_group = [&](size_t index) {
    const int64_t group = static_cast<int64_t>(index), first = group * kGroupRows;
    run.quantize_rows(x.as<float>() + first * num_inputs_, rows_of(group), num_inputs_, bits_ == 8 ? 128 : 1,
                      rows + first * row_bytes);
  };
  if (num_rows * num_inputs_ <= kSerialInputs) {
    for (int64_t group = 0; group < num_groups; ++group) quantize_group(static_cast<size_t>(group));
  } else {
    call.parallel_for(static_cast<size_t>(num_groups), 0, quantize_group);
  }

  const auto multiply = bits_ == 8 ? run.multiply_tile_8 : run.multiply_tile_4;
  const int64_t tile_bytes = num_blocks * bits_ * kTile * 4, tile_scales = num_blocks * kTile;
  const int64_t piece = std::max<int64_t>(1, kPieceNs / (num_blocks * block_ns(num_rows)));
  const int64_t panel = std::max<int64_t>(1, kPanelBytes / (kGroupRows * row_bytes));  // in groups
  // One group alone waits for memory: it asks for what comes a little later, of which the second cache has more under
  // way at a time. Of several, each asks for its part of the next tile.
  const int64_t prefetch_step = 64 * ceil_div(bits_, std::min(num_groups, panel));
  const auto first_line = [=](int64_t group) {
    return std::min(group % panel * prefetch_step, 64 * bits_) * num_blocks;
  };
  auto multiply_piece = [&](size_t index) {
    const int64_t first_tile = static_cast<int64_t>(index) * piece;
    const int64_t end_tile = std::min(first_tile + piece, num_tiles);
    for (int64_t first_group = 0; first_group < num_groups; first_group += panel) {
      const int64_t end_group = std::min(first_group + panel, num_groups);
      for (int64_t tile = first_tile; tile < end_tile; ++tile) {
        for (int64_t group = first_group; group < end_group; ++group) {
          TileProduct product;
          product.codes = codes.as<uint8_t>() + tile * tile_bytes;
          product.scales = scales.as<float>() + tile * tile_scales;
          product.zeros = bits_ == 4 ? zeros.as<uint8_t>() + tile * tile_scales : nullptr;
          product.rows = rows + group * kGroupRows * row_bytes;
          product.num_blocks = num_blocks;
          product.num_rows = rows_of(group);
          product.num_outputs = std::min(kTile, num_outputs_ - tile * kTile);
          product.y = y + group * kGroupRows * num_outputs_ + tile * kTile;
          product.y_stride = num_outputs_;
          product.prefetch = product.codes + (num_groups == 1 ? kPrefetchBytes : tile_bytes + first_line(group));
          product.prefetch_step = prefetch_step;
          product.prefetches_far = num_groups == 1;
          multiply(product);
        }
      }
    }
  };
  call.parallel_for(static_cast<size_t>(ceil_div(num_tiles, piece)), 0, multiply_piece);
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
