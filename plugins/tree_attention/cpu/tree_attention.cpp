#include "tree_attention.h"

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "tile_attention.h"

namespace draftline {
namespace {

constexpr int64_t kChunk = static_cast<int64_t>(kKeyChunk), kMaxTileRows = 32;
// In the unit of cost(), about 50 picoseconds: what is worth handing to another thread, and how many items at most.
constexpr int64_t kSmallestItem = 80'000, kMaxItems = 64;

// Memory that only grows, at the begin of a cache line.
class Scratch {
 public:
  float* floats(size_t count) {
    constexpr size_t kAlign = 64;
    if (count > capacity_) {
      memory_ = std::make_unique<char[]>(count * sizeof(float) + kAlign);
      capacity_ = count;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<float*>((address + kAlign - 1) / kAlign * kAlign);
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t capacity_ = 0;
};

// Chunks of keys of a part: what one thread computes at a time. Where a part has several items they leave a partial for
// each chunk, and whoever ends last merges those; an item alone merges as it goes. The order is that of the chunks.
struct Item {
  TilePart part;
  int64_t first_chunk, end_chunk;
  size_t group;  // of the items of a part
};

struct Group {
  int64_t first_chunk, num_chunks;
  int32_t num_items;
  size_t partials;  // place of its first
};

// What a thread that calls compute() keeps from call to call.
struct Plan {
  VisibleKeys visible;
  std::vector<Item> items;
  std::vector<Group> groups;
  std::unique_ptr<std::atomic<int32_t>[]> num_open;  // items of each group
  size_t max_open = 0;
  Scratch partials, new_halves;
};

int64_t cost(const AttentionTensors& in, size_t num_queries, int64_t num_keys) {
  const int64_t memory = 3 * static_cast<int64_t>(in.element_size);
  return num_keys * in.head_size * (memory + static_cast<int64_t>(num_queries));
}

// Calls function(part, cost) for the parts of each tile.
template <typename Function>
void for_parts(const AttentionTensors& in, const VisibleKeys& visible, Function function) {
  const int64_t group = in.num_heads / in.num_kv_heads, most = static_cast<int64_t>(kMaxTileQueries);
  for (const RowTile& tile : visible.tiles()) {
    for (int64_t head = 0; head < in.num_heads;) {
      const int64_t kv_head = head / group, num_heads = std::min((kv_head + 1) * group - head, most);
      const TilePart part{&tile, &visible.row(tile.first_row), kv_head, head, num_heads};
      function(part, cost(in, part.num_queries(), tile.end - tile.begin));
      head += num_heads;
    }
  }
}

void cut_items(const AttentionTensors& in, Plan& plan) {
  plan.items.clear();
  plan.groups.clear();
  int64_t total = 0;
  for_parts(in, plan.visible, [&](const TilePart&, int64_t part_cost) { total += part_cost; });
  const int64_t wanted = std::max(kSmallestItem, total / kMaxItems);
  size_t num_partials = 0;
  for_parts(in, plan.visible, [&](const TilePart& part, int64_t part_cost) {
    const int64_t first = part.tile->begin / kChunk, num_chunks = (part.tile->end + kChunk - 1) / kChunk - first;
    const int64_t num_items = std::max<int64_t>(1, std::min(num_chunks, part_cost / wanted));
    for (int64_t i = 0; i < num_items; ++i) {
      const int64_t begin = first + i * num_chunks / num_items, end = first + (i + 1) * num_chunks / num_items;
      plan.items.push_back({part, begin, end, plan.groups.size()});
    }
    plan.groups.push_back({first, num_chunks, static_cast<int32_t>(num_items), num_partials});
    if (num_items > 1) num_partials += static_cast<size_t>(num_chunks) * part.num_queries();
  });
  plan.partials.floats(num_partials * partial_size(static_cast<size_t>(in.head_size)));
  if (plan.groups.size() > plan.max_open) {
    plan.max_open = plan.groups.size();
    plan.num_open = std::make_unique<std::atomic<int32_t>[]>(plan.max_open);
  }
  for (size_t i = 0; i < plan.groups.size(); ++i) plan.num_open[i].store(plan.groups[i].num_items);
}

void compute_item(const AttentionTensors& in, Plan& plan, float* shared_partials, const Item& item) {
  static thread_local Scratch scratch;
  const size_t size = static_cast<size_t>(in.head_size), stride = partial_size(size);
  const size_t num_queries = item.part.num_queries();
  const Group& group = plan.groups[item.group];
  float* totals = scratch.floats(num_queries * (2 * stride + padded_head_size(size)));
  const auto merge = [&](const float* partials) {
    for (size_t i = 0; i < num_queries; ++i) in.kernels->merge(totals + i * stride, partials + i * stride, size);
  };
  TileAttention attention(in, item.part, totals + 2 * num_queries * stride);
  const auto partials_of = [&](int64_t chunk) {
    return shared_partials + (group.partials + static_cast<size_t>(chunk - group.first_chunk) * num_queries) * stride;
  };
  if (group.num_items > 1) {
    for (int64_t chunk = item.first_chunk; chunk < item.end_chunk; ++chunk) {
      attention.compute(chunk, partials_of(chunk));
    }
    if (plan.num_open[item.group].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    std::memcpy(totals, partials_of(group.first_chunk), num_queries * stride * sizeof(float));
    for (int64_t i = 1; i < group.num_chunks; ++i) merge(partials_of(group.first_chunk + i));
  } else {
    float* partials = totals + num_queries * stride;
    attention.compute(item.first_chunk, totals);
    for (int64_t chunk = item.first_chunk + 1; chunk < item.end_chunk; ++chunk) {
      attention.compute(chunk, partials);
      merge(partials);
    }
  }
  attention.finish(totals);
}

void require(bool holds, const char* rule) {
  if (!holds) throw Error(rule);
}

bool has_dims(const Tensor& tensor, std::initializer_list<int64_t> dims) {
  return tensor.num_dims == dims.size() && std::equal(dims.begin(), dims.end(), tensor.dims.begin());
}

}  // namespace

TreeAttention::TreeAttention(const Attributes& attributes)
    : num_heads_(attributes.size("num_heads")),
      num_kv_heads_(attributes.size("num_kv_heads")),
      head_size_(attributes.size("head_size")),
      block_size_(attributes.size("block_size")),
      window_(attributes.integer("window")),
      scale_(attributes.real("scale")),
      softcap_(attributes.real("softcap")) {
  require(num_heads_ % num_kv_heads_ == 0, "num_heads: whole num_kv_heads");
  require(softcap_ >= 0.0f && softcap_ < INFINITY, "softcap: 0 or greater");
}

void TreeAttention::compute(Call& call) const {
  static thread_local Plan plan;
  const Tensor q = call.input(0), k_new = call.input(1), v_new = call.input(2), kv_pool = call.input(3);
  const Tensor table = call.input(4), contexts = call.input(5), starts = call.input(6), mask = call.input(7);
  const Tensor sinks = call.input(8);
  const int64_t num_rows = q.dims[0], num_sequences = contexts.dims[0];
  require(has_dims(q, {num_rows, num_heads_, head_size_}), "q: [T, H, D]");
  require(has_dims(k_new, {num_rows, num_kv_heads_, head_size_}), "k_new: [T, K, D]");
  require(has_dims(v_new, {num_rows, num_kv_heads_, head_size_}), "v_new: [T, K, D]");
  require(has_dims(kv_pool, {kv_pool.dims[0], 2, num_kv_heads_, block_size_, head_size_}),
          "kv_pool: [num_blocks, 2, K, S, D]");
  require(kv_pool.type == ort::kFloat || kv_pool.type == ort::kFloat16, "kv_pool: float32 or float16");
  require(has_dims(table, {num_sequences, table.dims[1]}), "block_table: [B, max_blocks]");
  require(has_dims(contexts, {num_sequences}) && has_dims(starts, {num_sequences + 1}),
          "context_lengths: [B]; sequence_starts: [B + 1]");
  require(has_dims(mask, {num_rows, mask.dims[1]}), "packed_mask: [T, W]");
  require(has_dims(sinks, {num_heads_}), "sinks: [H]");

  const int64_t group = num_heads_ / num_kv_heads_, most = static_cast<int64_t>(kMaxTileQueries);
  const int64_t tile_rows = std::max<int64_t>(1, std::min(kMaxTileRows, most / std::min(group, most)));
  plan.visible.derive({table.as<int32_t>(), contexts.as<int32_t>(), starts.as<int32_t>(), mask.as<int32_t>(), num_rows,
                       num_sequences, table.dims[1], mask.dims[1], kv_pool.dims[0], block_size_, window_},
                      tile_rows);
  const AttentionKernels* kernels = draftline::kernels()->attention;
  AttentionTensors in{q.as<float>(),
                      k_new.as<char>(),
                      v_new.as<char>(),
                      kv_pool.as<char>(),
                      sinks.as<float>(),
                      call.output<float>(0, std::array{num_rows, num_heads_ * head_size_}),
                      num_heads_,
                      num_kv_heads_,
                      head_size_,
                      block_size_,
                      sizeof(float),
                      scale_,
                      softcap_,
                      kernels,
                      kernels->scores_float,
                      kernels->values_float};
  if (kv_pool.type == ort::kFloat16) {
    // A row must have the same bits whether its ancestors are in the step or committed.
    const size_t count = static_cast<size_t>(num_rows * num_kv_heads_ * head_size_);
    auto* halves = reinterpret_cast<uint16_t*>(plan.new_halves.floats(count));
    kernels->round_to_halves(k_new.as<float>(), count, halves);
    kernels->round_to_halves(v_new.as<float>(), count, halves + count);
    in.k_new = reinterpret_cast<const char*>(halves);
    in.v_new = reinterpret_cast<const char*>(halves + count);
    in.element_size = sizeof(uint16_t);
    in.scores = kernels->scores_half;
    in.values = kernels->values_half;
  }
  cut_items(in, plan);
  float* partials = plan.partials.floats(0);
  auto item = [&, &own_plan = plan](size_t i) { compute_item(in, own_plan, partials, own_plan.items[i]); };
  call.parallel_for(plan.items.size(), 0, item);
}

}  // namespace draftline
