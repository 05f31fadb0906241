// The kernels of images.cc, compiled once for each width of vector registers
// (image_kernels.cc).
//
// Images are in channels-last layout: the channels of a pixel lie side by side, and the pixels
// behind each other. What is computed for a channel depends neither on the values of other channels
// nor on the number of threads.
#pragma once
#include <c10/util/BFloat16.h>
#include <cstdint>

namespace gpipe {

// Some channels of `rows` pixels that have `all` channels each. Pointers are to the first of these
// channels.
struct Pixels {
  int64_t rows, all, channels;
};

// A batch norm's vectors, an element for each channel. Null where the pass does not need it.
struct Norm {
  const float *weight, *bias, *mean, *inverse;
};

// Windows of `size` x `size` pixels over an image of `channels` channels. Padding is left out of
// maxima and averages.
struct Windows {
  int64_t height, width, channels, out_height, out_width, size, stride, padding;
};

// Those of a batch norm of images in dtype T. They compute in float32.
template <typename T> struct NormKernels {
  // Mean and 1 / sqrt(variance + eps) of each channel. The variance is of the differences from the
  // mean of a block that is in the cache; blocks are joined as in Chan et al. 1979.
  void (*statistics)(Pixels pixels, const T *x, double eps, float *mean, float *inverse);
  // y = (x - mean) inverse weight + bias, or its ReLU.
  void (*normalise)(Pixels pixels, const T *x, Norm norm, bool relu, T *y);
  // The gradients of weight and bias. With `relu` of the norm's ReLU.
  void (*norm_sums)(Pixels pixels, const T *dy, const T *x, Norm norm, bool relu, float *dweight,
                    float *dbias);
  // The gradient of x, from those of weight and bias.
  void (*norm_backward)(Pixels pixels, const T *dy, const T *x, Norm norm, bool relu,
                        const float *dweight, const float *dbias, T *dx);
};

struct ImageKernels {
  NormKernels<float> norm;
  NormKernels<c10::BFloat16> norm_bfloat16;
  // The largest value of each window of one image, and which of its pixels has it. Pooling is in
  // float32.
  void (*max_pool)(Windows windows, const float *x, float *y, uint8_t *which);
  // Adds to `dx`.
  void (*max_pool_backward)(Windows windows, const float *dy, const uint8_t *which, float *dx);
  void (*average_pool)(Windows windows, const float *x, float *y);
  // Adds to `dx`.
  void (*average_pool_backward)(Windows windows, const float *dy, float *dx);
};

} // namespace gpipe
