// Runs recorded calls of native operators without ONNX Runtime, and compares every byte of what they return, but any
// NaN is as good as any other.
//
//   replay FILE    FILE: of recording.py, little-endian; numbers are int64, texts and bytes have their length before
//   them
//
// Stands in for ONNX Runtime: the entries of its API that operators use, one thread.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "onnxruntime_api.h"

namespace draftline::ort {

struct Status {
  std::string message;
};
struct Value {
  ElementType type = kUndefined;
  std::vector<int64_t> dims;
  std::vector<char> room;
  char* bytes = nullptr;  // of a cache line, as ONNX Runtime's are
  size_t size = 0;

  void resize(size_t new_size) {
    size = new_size;
    room.assign(size + 64, 0);
    bytes = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
  }
};
struct KernelInfo {
  std::map<std::string, int64_t> integers;
  std::map<std::string, float> reals;
};
struct KernelContext {
  std::vector<Value*> inputs;
  std::map<size_t, Value> outputs;
  std::vector<ElementType> output_types;
};

}  // namespace draftline::ort

extern "C" draftline::ort::Status* RegisterCustomOps(draftline::ort::SessionOptions*, const draftline::ort::ApiBase*);
extern "C" const char* draftline_instruction_set();

namespace {

using namespace draftline::ort;

std::map<std::string, const CustomOp*> operators;

size_t element_size(ElementType type) {
  switch (type) {
    case kFloat:
    case kInt32:
      return 4;
    case kUint8:
    case kInt8:
      return 1;
    case kInt64:
      return 8;
    case kFloat16:
      return 2;
    default:
      std::fprintf(stderr, "replay: element type %d has no size here\n", type);
      std::exit(2);
  }
}

void unknown_entry() {
  std::fprintf(stderr, "replay: an operator calls an entry of OrtApi that has no stand-in here; add it\n");
  std::exit(2);
}

const Value* value_of(const ShapeInfo* info) { return reinterpret_cast<const Value*>(info); }

using Entry = void (*)();
template <typename Signature>
Entry entry(Signature* function) {
  return reinterpret_cast<Entry>(function);
}

// Each at its place in OrtApi; see onnxruntime_api.h.
const std::vector<Entry>& entries() {
  static std::vector<Entry> table(500, unknown_entry);
  table[0] = entry(+[](ErrorCode, const char* message) { return new Status{message}; });
  table[26] = entry(+[](const char*, CustomOpDomain**) -> Status* { return nullptr; });
  table[27] = entry(+[](CustomOpDomain*, const CustomOp* op) -> Status* {
    operators[op->get_name(op)] = op;
    return nullptr;
  });
  table[28] = entry(+[](SessionOptions*, CustomOpDomain*) -> Status* { return nullptr; });
  table[51] = entry(+[](Value* value, void** out) -> Status* {
    *out = value->bytes;
    return nullptr;
  });
  table[60] = entry(+[](const ShapeInfo* info, ElementType* out) -> Status* {
    *out = value_of(info)->type;
    return nullptr;
  });
  table[61] = entry(+[](const ShapeInfo* info, size_t* out) -> Status* {
    *out = value_of(info)->dims.size();
    return nullptr;
  });
  table[62] = entry(+[](const ShapeInfo* info, int64_t* out, size_t count) -> Status* {
    std::memcpy(out, value_of(info)->dims.data(), count * sizeof(int64_t));
    return nullptr;
  });
  table[65] = entry(+[](const Value* value, const ShapeInfo** out) -> Status* {
    *out = reinterpret_cast<const ShapeInfo*>(value);
    return nullptr;
  });
  table[85] = entry(+[](const KernelInfo* info, const char* name, float* out) -> Status* {
    *out = info->reals.at(name);
    return nullptr;
  });
  table[86] = entry(+[](const KernelInfo* info, const char* name, int64_t* out) -> Status* {
    *out = info->integers.at(name);
    return nullptr;
  });
  table[88] = entry(+[](const KernelContext* context, size_t* out) -> Status* {
    *out = context->inputs.size();
    return nullptr;
  });
  table[90] = entry(+[](const KernelContext* context, size_t index, const Value** out) -> Status* {
    *out = context->inputs[index];
    return nullptr;
  });
  table[91] =
      entry(+[](KernelContext* context, size_t index, const int64_t* dims, size_t count, Value** out) -> Status* {
        Value& value = context->outputs[index];
        value.type = context->output_types[index];
        value.dims.assign(dims, dims + count);
        size_t size = element_size(value.type);
        for (const int64_t dim : value.dims) size *= static_cast<size_t>(dim);
        value.resize(size);
        *out = &value;
        return nullptr;
      });
  table[93] = entry(+[](Status* status) { delete status; });
  table[99] = entry(+[](ShapeInfo*) {});
  table[274] =
      entry(+[](const KernelContext*, void (*function)(void*, size_t), size_t total, size_t, void* data) -> Status* {
        for (size_t i = total; i-- > 0;) function(data, i);
        return nullptr;
      });
  table[414] = entry(+[](const Value* value, ElementType* type, const int64_t** dims, size_t* num_dims) -> Status* {
    *type = value->type;
    *dims = value->dims.data();
    *num_dims = value->dims.size();
    return nullptr;
  });
  return table;
}

class Reader {
 public:
  explicit Reader(const char* path) : file_(std::fopen(path, "rb")) {
    if (file_ == nullptr) fail(path);
  }
  bool at_end() {
    const int next = std::fgetc(file_);
    std::ungetc(next, file_);
    return next == EOF;
  }
  int64_t integer() {
    int64_t value;
    read(&value, sizeof value);
    return value;
  }
  std::string text() {
    std::string value(static_cast<size_t>(integer()), '\0');
    read(value.data(), value.size());
    return value;
  }
  Value value() {
    Value value;
    value.type = static_cast<ElementType>(integer());
    if (value.type == kUndefined) return value;  // an optional input that is absent
    value.dims.resize(static_cast<size_t>(integer()));
    for (int64_t& dim : value.dims) dim = integer();
    value.resize(static_cast<size_t>(integer()));
    read(value.bytes, value.size);
    return value;
  }

 private:
  [[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "replay: a recording is readable and whole; got %s\n", what);
    std::exit(2);
  }
  void read(void* out, size_t size) {
    if (std::fread(out, 1, size, file_) != size) fail("an early end");
  }
  std::FILE* file_;
};

struct Count {
  int calls = 0, different = 0;
  size_t bytes = 0;
};

// Which NaN an operation gives is the processor's choice. No word of an integer output looks like one but that of a -1.
bool is_same(const char* got, const char* expected, size_t size) {
  if (std::memcmp(got, expected, size) == 0) return true;
  if (size % sizeof(float) != 0) return false;
  for (size_t i = 0; i < size; i += sizeof(float)) {
    float x, y;
    std::memcpy(&x, got + i, sizeof(x));
    std::memcpy(&y, expected + i, sizeof(y));
    if (std::memcmp(&x, &y, sizeof(x)) != 0 && !(x != x && y != y)) return false;
  }
  return true;
}

void replay_call(Reader& reader, std::map<std::string, Count>& counts) {
  const std::string name = reader.text();
  KernelInfo info;
  for (int64_t left = reader.integer(); left > 0; --left) {
    const std::string attribute = reader.text();
    info.integers[attribute] = reader.integer();
  }
  for (int64_t left = reader.integer(); left > 0; --left) {
    const std::string attribute = reader.text();
    const std::string value = reader.text();
    std::memcpy(&info.reals[attribute], value.data(), sizeof(float));
  }
  std::deque<Value> inputs(static_cast<size_t>(reader.integer()));
  KernelContext context;
  for (Value& input : inputs) {
    input = reader.value();
    context.inputs.push_back(input.type == kUndefined ? nullptr : &input);
  }
  std::vector<Value> expected(static_cast<size_t>(reader.integer()));
  for (Value& value : expected) {
    value = reader.value();
    context.output_types.push_back(value.type);
  }
  const CustomOp* op = operators.at(name);
  const Api* api = reinterpret_cast<const Api*>(entries().data());
  void* kernel = nullptr;
  Status* status = op->create_kernel_v2(op, api, &info, &kernel);
  if (status == nullptr) status = op->compute_v2(kernel, &context);
  if (status != nullptr) {
    std::fprintf(stderr, "replay: %s\n", status->message.c_str());
    std::exit(1);
  }
  op->destroy(kernel);
  Count& count = counts[name];
  ++count.calls;
  bool same = true;
  for (size_t i = 0; i < expected.size(); ++i) {
    const Value& got = context.outputs[i];
    count.bytes += expected[i].size;
    same = same && got.size == expected[i].size && is_same(got.bytes, expected[i].bytes, got.size);
  }
  count.different += !same;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: replay FILE\n");
    return 2;
  }
  const ApiBase base{[](uint32_t) { return reinterpret_cast<const Api*>(entries().data()); }, [] { return "1.32.0"; }};
  if (Status* status = RegisterCustomOps(nullptr, &base)) {
    std::fprintf(stderr, "replay: %s\n", status->message.c_str());
    return 2;
  }
  std::map<std::string, Count> counts;
  for (Reader reader(argv[1]); !reader.at_end();) replay_call(reader, counts);
  int different = 0;
  for (const auto& [name, count] : counts) {
    std::printf("%s %s: %d calls, %zu bytes, %d calls differ\n", draftline_instruction_set(), name.c_str(), count.calls,
                count.bytes, count.different);
    different += count.different;
  }
  return different == 0 && !counts.empty() ? 0 : 1;
}
