// Which keys the rows of a step attend to, derived once per call from contexts and masks.
//
// A row's keys are ordered by position: committed tokens, then its ancestors in the step by depth, itself last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace draftline {

struct Sequence {
  int64_t context;        // committed tokens
  const int32_t* blocks;  // of the committed tokens
  int64_t first_row;
};

struct Row {
  int64_t begin, end;        // positions of its keys; the last is its own
  const int32_t* ancestors;  // in-step tokens of its sequence at positions `context`, `context` + 1, ..
};

// Neighbouring rows of a sequence that are computed together. Positions `shared_begin` .. `shared_end` hold the same
// keys in all of them, and all of them attend there; equal where there are none, and then not before any `begin`.
struct RowTile {
  const Sequence* sequence;
  int64_t first_row, num_rows;
  int64_t begin, end;  // of any of its rows
  int64_t shared_begin, shared_end;
};

class VisibleKeys {
 public:
  struct Inputs {
    const int32_t *block_table, *context_lengths, *sequence_starts, *packed_mask;
    int64_t num_rows, num_sequences, max_blocks, num_mask_words;
    int64_t num_blocks, block_size, window;
  };

  // Throws Error where the inputs break the contract.
  void derive(const Inputs& inputs, int64_t max_tile_rows);

  const std::vector<RowTile>& tiles() const { return tiles_; }
  const Row& row(int64_t index) const { return rows_[static_cast<size_t>(index)]; }

 private:
  int32_t* list_ancestors(const Inputs& inputs, const Sequence& sequence, int64_t num_rows, int32_t* place);
  void cut_tiles(const Sequence& sequence, int64_t num_rows, int64_t max_tile_rows);

  // Kept from call to call: nothing is allocated once they have grown.
  std::vector<Sequence> sequences_;
  std::vector<Row> rows_;
  std::vector<RowTile> tiles_;
  std::vector<int32_t> identity_, ancestors_, depths_;
};

}  // namespace draftline
