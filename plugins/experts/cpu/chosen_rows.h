// Rows in the order of the matrices that they choose.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "operator.h"

namespace draftline {

class ChosenRows {
 public:
  // Rows that chose one matrix: order()[first .. first + num_rows - 1].
  struct Run {
    int64_t matrix, first, num_rows;
  };

  // `ids`, one a row, each below num_matrices.
  ChosenRows(const int64_t* ids, int64_t num_rows, int64_t num_matrices);

  // Rows by their matrix; of one matrix in the order in which they came.
  const std::vector<int64_t>& order() const { return order_; }
  // Of the matrices that a row chose.
  const std::vector<Run>& runs() const { return runs_; }

  // Calls function(run, piece) for all pieces of all runs, of which count(run) says how many there are.
  template <typename Count, typename Function>
  void for_pieces(Call& call, const Count& count, const Function& function) const {
    std::vector<int64_t> ends;  // of runs, in pieces counted through
    int64_t total = 0;
    for (const Run& run : runs_) ends.push_back(total += count(run));
    auto task = [&](size_t index) {
      const auto at = static_cast<int64_t>(index);
      const auto number = std::upper_bound(ends.begin(), ends.end(), at) - ends.begin();
      function(runs_[static_cast<size_t>(number)], number == 0 ? at : at - ends[static_cast<size_t>(number) - 1]);
    };
    call.parallel_for(static_cast<size_t>(total), 0, task);
  }

 private:
  std::vector<int64_t> order_;
  std::vector<Run> runs_;
};

// The number of rows of y that one of x gives: x [num_rows, ..], ids [..]. Throws Error.
int64_t choices_of_row(const Tensor& x, const Tensor& ids);

}  // namespace draftline
