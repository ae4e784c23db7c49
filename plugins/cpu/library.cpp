// What the library shows: RegisterCustomOps for ONNX Runtime, and two functions for whoever loads it.
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstring>
#include <mutex>
#include <string>

#include "decoder_layer.h"
#include "kernels.h"
#include "linear.h"
#include "operator.h"
#include "quantized_matmul.h"
#include "sample.h"
#include "tree_attention.h"

#define DRAFTLINE_EXPORT extern "C" __attribute__((visibility("default")))

namespace draftline {
namespace {

const Kernels* const kBest = []() -> const Kernels* {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    return &avx512_vnni::kKernels;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2::kKernels;
  return nullptr;
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) return &neon_dotprod::kKernels;
  return &neon::kKernels;
#else
  return nullptr;
#endif
}();

// Which runs wherever kBest does.
#if defined(__x86_64__)
const Kernels* const kLeast = &avx2::kKernels;
#elif defined(__aarch64__)
const Kernels* const kLeast = &neon::kKernels;
#else
const Kernels* const kLeast = nullptr;
#endif

const Kernels* chosen = kBest;

ort::Status* create_domain(const ort::Api& api, ort::CustomOpDomain** out) {
  // clang-format off
  const ort::CustomOp* const ops[] = {
      describe<SiluGate>(),
      describe<AddNorm>(),
      describe<RotatedHeads>(),
      describe<Linear>(),
      describe<QuantizedMatMul>(),
      describe<QuantizedEmbedding>(),
      describe<Sample>(),
      describe<TopCandidates>(),
      describe<TreeAttention>(),
  };
  // clang-format on
  ort::CustomOpDomain* domain = nullptr;
  if (ort::Status* status = api.create_domain("draftline", &domain)) return status;
  for (const ort::CustomOp* op : ops) {
    if (ort::Status* status = api.add_op(domain, op)) return status;
  }
  *out = domain;  // with all of them or not at all
  return nullptr;
}

}  // namespace

const Kernels* kernels() { return chosen; }

}  // namespace draftline

// The instruction set in use, "" where this processor runs no kernel.
DRAFTLINE_EXPORT const char* draftline_instruction_set() {
  return draftline::chosen == nullptr ? "" : draftline::chosen->name;
}

// For tests: use another instruction set that this processor runs. Returns whether it is one. Not while a session runs.
DRAFTLINE_EXPORT int draftline_use_instruction_set(const char* name) {
  if (draftline::kBest == nullptr) return 0;
  for (const draftline::Kernels* kernels : {draftline::kBest, draftline::kLeast}) {
    if (std::strcmp(kernels->name, name) == 0) {
      draftline::chosen = kernels;
      return 1;
    }
  }
  return 0;
}

DRAFTLINE_EXPORT draftline::ort::Status* RegisterCustomOps(draftline::ort::SessionOptions* options,
                                                           const draftline::ort::ApiBase* base) {
  using namespace draftline;
  const ort::Api* api = base->get_api(ort::kApiVersion);
  if (api == nullptr) {
    const std::string text = std::string("draftline: needs ONNX Runtime 1.18 or later; got ") + base->get_version();
    return base->get_api(1)->create_status(ort::kFail, text.c_str());
  }
  if (kernels() == nullptr)
    return api->create_status(ort::kFail, "draftline: this processor has neither AVX2 nor NEON");
  static std::mutex mutex;
  static ort::CustomOpDomain* domain = nullptr;  // of the process: sessions may outlive each other
  const std::lock_guard<std::mutex> lock(mutex);
  if (domain == nullptr) {
    detail::shapes_in_place = ort::has_shape_reference(base->get_version());
    if (ort::Status* status = create_domain(*api, &domain)) return status;
  }
  return api->add_domain(options, domain);
}
