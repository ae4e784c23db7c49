#include "quantized_product.h"

#include <algorithm>

#include "kernels.h"
#include "tile_product.h"

namespace draftline {
namespace {

constexpr int64_t kTile = kTileOutputs, kBlock = kBlockInputs;

// Nanoseconds of one block of a tile on one core, whatever the core: only the size of a piece of work depends on it.
int64_t block_ns(int64_t num_rows) { return std::max<int64_t>(40, 3 * num_rows); }

constexpr int64_t kPieceNs = 4000;          // a smaller piece of work is not worth handing out
constexpr int64_t kPanelBytes = 192 << 10;  // of quantised rows that stay in a core's cache while tiles pass
constexpr int64_t kPrefetchBytes = 4096;

}  // namespace

int64_t quantized_row_bytes(int64_t num_inputs) { return ceil_div(num_inputs, kBlock) * kRowBlockBytes; }

void quantize_group(const float* x, int64_t num_rows, int64_t num_inputs, int64_t bits, uint8_t* out) {
  kernels()->quantize_rows(x, num_rows, num_inputs, bits == 8 ? 128 : 1, out);
}

int64_t QuantizedProduct::num_tiles() const { return ceil_div(num_outputs, kTile); }

int64_t QuantizedProduct::piece_tiles() const {
  return std::max<int64_t>(1, kPieceNs / (ceil_div(num_inputs, kBlock) * block_ns(num_rows)));
}

void QuantizedProduct::multiply_piece(int64_t index, float* y, int64_t y_stride) const {
  const int64_t num_blocks = ceil_div(num_inputs, kBlock), row_bytes = quantized_row_bytes(num_inputs);
  const int64_t num_groups = ceil_div(num_rows, kGroupRows);
  const int64_t tile_bytes = num_blocks * bits * kTile * 4, tile_scales = num_blocks * kTile;
  const int64_t panel = std::max<int64_t>(1, kPanelBytes / (kGroupRows * row_bytes));  // in groups
  // One group alone waits for memory: it asks for what comes a little later, of which the second cache has more under
  // way at a time. Of several, each asks for its part of the next tile.
  const int64_t prefetch_step = 64 * ceil_div(bits, std::min(num_groups, panel));
  const auto multiply = bits == 8 ? kernels()->multiply_tile_8 : kernels()->multiply_tile_4;
  const int64_t first_tile = index * piece_tiles(), end_tile = std::min(first_tile + piece_tiles(), num_tiles());
  for (int64_t first_group = 0; first_group < num_groups; first_group += panel) {
    const int64_t end_group = std::min(first_group + panel, num_groups);
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
      for (int64_t group = first_group; group < end_group; ++group) {
        TileProduct product;
        product.codes = codes + tile * tile_bytes;
        product.scales = scales + tile * tile_scales;
        product.zeros = bits == 4 ? zeros + tile * tile_scales : nullptr;
        product.rows = rows + group * kGroupRows * row_bytes;
        product.num_blocks = num_blocks;
        product.num_rows = std::min(kGroupRows, num_rows - group * kGroupRows);
        product.num_outputs = std::min(kTile, num_outputs - tile * kTile);
        product.y = y + group * kGroupRows * y_stride + (tile - first_tile) * kTile;
        product.y_stride = y_stride;
        const int64_t first_line = std::min(group % panel * prefetch_step, 64 * bits) * num_blocks;
        product.prefetch = product.codes + (num_groups == 1 ? kPrefetchBytes : tile_bytes + first_line);
        product.prefetch_step = prefetch_step;
        product.prefetches_far = num_groups == 1;
        multiply(product);
      }
    }
  }
}

}  // namespace draftline
