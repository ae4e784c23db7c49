#include "chosen_rows.h"

namespace draftline {

ChosenRows::ChosenRows(const int64_t* ids, int64_t num_rows, int64_t num_matrices)
    : order_(static_cast<size_t>(num_rows)) {
  std::vector<int64_t> counts(static_cast<size_t>(num_matrices));
  for (int64_t row = 0; row < num_rows; ++row) {
    if (ids[row] < 0 || ids[row] >= num_matrices)
      throw Error("ids are 0 .. " + std::to_string(num_matrices - 1) + "; got " + std::to_string(ids[row]));
    ++counts[static_cast<size_t>(ids[row])];
  }
  std::vector<int64_t>& next = counts;  // where a matrix's next row goes
  int64_t first = 0;
  for (int64_t matrix = 0; matrix < num_matrices; ++matrix) {
    const int64_t count = counts[static_cast<size_t>(matrix)];
    if (count > 0) runs_.push_back({matrix, first, count});
    next[static_cast<size_t>(matrix)] = first;
    first += count;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    order_[static_cast<size_t>(next[static_cast<size_t>(ids[row])]++)] = row;
  }
}

int64_t choices_of_row(const Tensor& x, const Tensor& ids) {
  if (x.num_dims != 2 || ids.num_dims != 1) throw Error("x is a matrix and ids a vector");
  if ((x.dims[0] == 0) != (ids.dims[0] == 0) || (x.dims[0] > 0 && ids.dims[0] % x.dims[0] != 0))
    throw Error("as many ids a row of x; got " + std::to_string(ids.dims[0]) + " for " + std::to_string(x.dims[0]));
  return x.dims[0] == 0 ? 1 : ids.dims[0] / x.dims[0];
}

}  // namespace draftline
