#include "kernels.h"

namespace gpipe {

extern const FusedKernels<float> fused_float_plain, fused_float_avx2, fused_float_avx512;
extern const FusedKernels<c10::BFloat16> fused_bfloat16_plain, fused_bfloat16_avx2,
    fused_bfloat16_avx512;
extern const AttentionKernels<float> attention_float_plain, attention_float_avx2,
    attention_float_avx512;
extern const AttentionKernels<c10::BFloat16> attention_bfloat16_plain, attention_bfloat16_avx2,
    attention_bfloat16_avx512;
extern const ImageKernels images_plain, images_avx2, images_avx512;
extern const ProductKernels products_plain, products_avx2, products_avx512;

namespace {

enum class Width { Plain, Avx2, Avx512 };

// The processor is asked once.
Width width() {
#if defined(__x86_64__)
  static const Width own = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      return Width::Avx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? Width::Avx2
                                                                           : Width::Plain;
  }();
  return own;
#else
  return Width::Plain;
#endif
}

} // namespace

#if defined(__x86_64__)
#define GPIPE_BY_WIDTH(name)                                                                       \
  return width() == Width::Avx512 ? name##_avx512 : width() == Width::Avx2 ? name##_avx2           \
                                                                           : name##_plain
#else
#define GPIPE_BY_WIDTH(name) return name##_plain
#endif

template <> const FusedKernels<float> &fused_kernels() { GPIPE_BY_WIDTH(fused_float); }
template <> const FusedKernels<c10::BFloat16> &fused_kernels() { GPIPE_BY_WIDTH(fused_bfloat16); }
template <> const AttentionKernels<float> &attention_kernels() { GPIPE_BY_WIDTH(attention_float); }
template <> const AttentionKernels<c10::BFloat16> &attention_kernels() {
  GPIPE_BY_WIDTH(attention_bfloat16);
}
const ImageKernels &image_kernels() { GPIPE_BY_WIDTH(images); }
const ProductKernels &product_kernels() { GPIPE_BY_WIDTH(products); }

} // namespace gpipe
