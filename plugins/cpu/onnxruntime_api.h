// The part of ONNX Runtime's C API that custom operators need.
//
// ONNX Runtime ships no headers in its wheels, and its C API is stable: entries of OrtApi keep their place in every
// later version, so each is declared here by its place. Source of the places and signatures: the documented order of
// struct OrtApi and struct OrtCustomOp, API version 18 (ONNX Runtime 1.18), the first with everything used here
// but shape_reference().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace draftline::ort {

constexpr uint32_t kApiVersion = 18;

// Opaque to us.
struct Status;
struct Value;
struct ShapeInfo;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

enum ElementType : int {
  kUndefined = 0,  // any
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
};

enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum MemoryType : int { kMemoryDefault = 0 };

// OrtApi: a table of function pointers. `at` is the place of an entry.
class Api {
 public:
  Status* create_status(ErrorCode code, const char* message) const {
    return at<Status*(ErrorCode, const char*)>(0)(code, message);
  }
  Status* create_domain(const char* name, CustomOpDomain** out) const {
    return at<Status*(const char*, CustomOpDomain**)>(26)(name, out);
  }
  Status* add_op(CustomOpDomain* domain, const struct CustomOp* op) const {
    return at<Status*(CustomOpDomain*, const struct CustomOp*)>(27)(domain, op);
  }
  Status* add_domain(SessionOptions* options, CustomOpDomain* domain) const {
    return at<Status*(SessionOptions*, CustomOpDomain*)>(28)(options, domain);
  }
  Status* data(const Value* value, void** out) const { return at<Status*(const Value*, void**)>(51)(value, out); }
  Status* element_type(const ShapeInfo* info, ElementType* out) const {
    return at<Status*(const ShapeInfo*, ElementType*)>(60)(info, out);
  }
  Status* num_dimensions(const ShapeInfo* info, size_t* out) const {
    return at<Status*(const ShapeInfo*, size_t*)>(61)(info, out);
  }
  Status* dimensions(const ShapeInfo* info, int64_t* out, size_t count) const {
    return at<Status*(const ShapeInfo*, int64_t*, size_t)>(62)(info, out, count);
  }
  Status* shape_info(const Value* value, ShapeInfo** out) const {
    return at<Status*(const Value*, ShapeInfo**)>(65)(value, out);
  }
  Status* float_attribute(const KernelInfo* info, const char* name, float* out) const {
    return at<Status*(const KernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  Status* int_attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return at<Status*(const KernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  Status* input_count(const KernelContext* context, size_t* out) const {
    return at<Status*(const KernelContext*, size_t*)>(88)(context, out);
  }
  Status* input(const KernelContext* context, size_t index, const Value** out) const {
    return at<Status*(const KernelContext*, size_t, const Value**)>(90)(context, index, out);
  }
  Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t count, Value** out) const {
    return at<Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>(91)(context, index, dims, count, out);
  }
  // The shape in place, where ONNX Runtime's version has_shape_reference().
  Status* shape_reference(const Value* value, ElementType* type, const int64_t** dims, size_t* num_dims) const {
    return at<Status*(const Value*, ElementType*, const int64_t**, size_t*)>(414)(value, type, dims, num_dims);
  }
  void release_status(Status* status) const { at<void(Status*)>(93)(status); }
  void release_shape_info(ShapeInfo* info) const { at<void(ShapeInfo*)>(99)(info); }
  // Calls function(data, 0 .. total - 1) from the threads of the session, in `num_batches` runs of neighbours.
  Status* parallel_for(const KernelContext* context, void (*function)(void*, size_t), size_t total, size_t num_batches,
                       void* data) const {
    return at<Status*(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(274)(
        context, function, total, num_batches, data);
  }

 private:
  template <typename Signature>
  Signature* at(size_t place) const {
    return reinterpret_cast<Signature* const*>(this)[place];
  }
};

// Whether ONNX Runtime `version` has the last entry of API version 24, "1.24.0" or later.
inline bool has_shape_reference(const char* version) {
  int major = 0, minor = 0;
  return std::sscanf(version, "%d.%d", &major, &minor) == 2 && (major > 1 || (major == 1 && minor >= 24));
}

struct ApiBase {
  const Api* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

// OrtCustomOp: what an operator tells ONNX Runtime about itself. Field by field the layout of the C API.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_provider)(const CustomOp*);
  ElementType (*get_input_type)(const CustomOp*, size_t);
  size_t (*get_input_count)(const CustomOp*);
  ElementType (*get_output_type)(const CustomOp*, size_t);
  size_t (*get_output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  Characteristic (*get_input_characteristic)(const CustomOp*, size_t);
  Characteristic (*get_output_characteristic)(const CustomOp*, size_t);
  MemoryType (*get_input_memory)(const CustomOp*, size_t);
  int (*get_variadic_input_min)(const CustomOp*);
  int (*get_variadic_input_same)(const CustomOp*);
  int (*get_variadic_output_min)(const CustomOp*);
  int (*get_variadic_output_same)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shapes)(const CustomOp*, void*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  size_t (*get_may_inplace)(int**, int**);
  void (*release_may_inplace)(int*, int*);
  size_t (*get_alias_map)(int**, int**);
  void (*release_alias_map)(int*, int*);
};

}  // namespace draftline::ort
