// What the library shows: RegisterCustomOps for ONNX Runtime, and two functions for whoever loads it.
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstring>
#include <mutex>
#include <string>

#include "chosen_linear.h"
#include "chosen_quantized_matmul.h"
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

#if defined(__x86_64__)
// By the processor's own answers: what compilers offer, __builtin_cpu_supports(), says no to everything where the
// runtime library is that of zig 0.17.
const Kernels* find_best() {
  unsigned a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return nullptr;
  constexpr unsigned kFma = 1u << 12, kSystemSaves = 1u << 27, kAvx = 1u << 28, kHalves = 1u << 29;
  constexpr unsigned kAvxAndMore = kFma | kSystemSaves | kAvx | kHalves;
  if ((c & kAvxAndMore) != kAvxAndMore) return nullptr;
  unsigned saved, saved_high;  // registers that the system keeps for each thread
  asm("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  constexpr unsigned kVectors = 0x06, kWideVectors = 0xe6;
  constexpr unsigned kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  constexpr unsigned kVnni = 1u << 11;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b & kAvx2) == 0) return nullptr;
  if ((saved & kVectors) != kVectors) return nullptr;
  const bool is_wide = (b & kAvx512) == kAvx512 && (c & kVnni) != 0 && (saved & kWideVectors) == kWideVectors;
  return is_wide ? &avx512_vnni::kKernels : &avx2::kKernels;
}
#elif defined(__aarch64__)
const Kernels* find_best() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? &neon_dotprod::kKernels : &neon::kKernels; }
#else
const Kernels* find_best() { return nullptr; }
#endif

const Kernels* const kBest = find_best();

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
      describe<GeluGate>(),
      describe<AddNorm>(),
      describe<RotatedHeads>(),
      describe<Linear>(),
      describe<QuantizedMatMul>(),
      describe<QuantizedEmbedding>(),
      describe<ChosenLinear>(),
      describe<ChosenQuantizedMatMul>(),
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
