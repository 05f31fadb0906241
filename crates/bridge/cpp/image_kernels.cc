// Compiled once for each width of vector registers (build.rs).
#include "image_kernels.h"
#include "kernel_vectors.h"
#include <cmath>

namespace gpipe {

namespace {

// How many registers a loop over pixels works on at once.
constexpr int64_t kRegisters = 4;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

// Calls `work(channel, count, registers)` for groups of channels. `registers` is a constant of the
// type: kRegisters whole ones, or one that holds `count` channels.
template <int64_t N> struct Registers {
  static constexpr int64_t size = N;
};
template <typename Work> void groups(int64_t channels, Work &&work) {
  int64_t at = 0;
  for (; at + kRegisters * Vec::size() <= channels; at += kRegisters * Vec::size())
    work(at, Vec::size(), Registers<kRegisters>());
  for (; at < channels; at += Vec::size())
    work(at, least(Vec::size(), channels - at), Registers<1>());
}

// Pixels of a block: few enough that it stays in a cache. The number depends on the channels of all
// threads together, not on how they are divided.
int64_t block_of(const Pixels &pixels) {
  return most(16, least(128, 8192 / most(1, pixels.all)));
}

// Some pixels and a group of channels, in `n` registers of `count` channels each.
template <int64_t n> struct Block {
  int64_t first, rows;  // the first pixel, and how many
  int64_t at, count;    // the first channel
  int64_t all;          // channels of a pixel

  // Calls `work(place, i)` with the offset of each pixel's register `i`.
  template <typename Work> void visit(Work &&work) const {
    for (int64_t row = first; row < first + rows; row++)
      for (int64_t i = 0; i < n; i++)
        work(row * all + at + i * Vec::size(), i);
  }
  // Calls `work(channel, i)` with the first channel of each register.
  template <typename Work> void channels(Work &&work) const {
    for (int64_t i = 0; i < n; i++)
      work(at + i * Vec::size(), i);
  }
};

// Calls `work(block, registers)` for each block of pixels and each group of its channels.
template <typename Work> void each_block(const Pixels &pixels, Work &&work) {
  const int64_t block = block_of(pixels);
  for (int64_t row = 0; row < pixels.rows; row += block) {
    const int64_t rows = least(block, pixels.rows - row);
    groups(pixels.channels, [&](int64_t at, int64_t count, auto registers) {
      work(Block<decltype(registers)::size>{row, rows, at, count, pixels.all}, registers);
    });
  }
}

template <typename T>
void statistics(Pixels pixels, const T *x, double eps, float *mean, float *inverse) {
  each_block(pixels, [&](const auto &block, auto registers) {
    constexpr int64_t n = decltype(registers)::size;
    const float own = static_cast<float>(block.rows), before = static_cast<float>(block.first);
    const float part = own / (before + own);
    const Vec each(1.0f / own), share(part), between(before * part);
    Vec sums[n], squares[n];
    for (int64_t i = 0; i < n; i++)
      sums[i] = squares[i] = Vec(0.0f);
    block.visit(
        [&](int64_t place, int64_t i) { sums[i] = sums[i] + get_one(x + place, block.count); });
    for (int64_t i = 0; i < n; i++)
      sums[i] = sums[i] * each;
    block.visit([&](int64_t place, int64_t i) {
      const Vec apart = get_one(x + place, block.count) - sums[i];
      squares[i] = squares[i] + apart * apart;
    });
    block.channels([&](int64_t channel, int64_t i) {
      if (block.first > 0) {
        const Vec had = get_one(mean + channel, block.count), apart = sums[i] - had;
        const Vec had_squares = get_one(inverse + channel, block.count);
        squares[i] = had_squares + squares[i] + apart * apart * between;
        sums[i] = had + apart * share;
      }
      put_one(mean + channel, sums[i], block.count);
      put_one(inverse + channel, squares[i], block.count);
    });
  });
  const double rows = static_cast<double>(pixels.rows);
  for (int64_t at = 0; at < pixels.channels; at++) {
    // As in libtorch: without a variance and an eps the inverse is 0.
    const double spread = inverse[at] / rows + eps;
    inverse[at] = spread == 0.0 ? 0.0f : static_cast<float>(1.0 / sqrt(spread));
  }
}

// The vectors of a batch norm in registers.
template <int64_t n> struct Channels {
  Vec mean[n], inverse[n], scale[n], bias[n];
  bool relu;
  Channels(const Norm &norm, const Block<n> &block, bool relu) : relu(relu) {
    block.channels([&](int64_t channel, int64_t i) {
      mean[i] = get_one(norm.mean + channel, block.count);
      inverse[i] = get_one(norm.inverse + channel, block.count);
      scale[i] = inverse[i] * get_one(norm.weight + channel, block.count);
      bias[i] = get_one(norm.bias + channel, block.count);
    });
  }
  // Without weight and bias.
  Vec plain(Vec x, int64_t i) const { return (x - mean[i]) * inverse[i]; }
  Vec normed(Vec x, int64_t i) const { return (x - mean[i]) * scale[i] + bias[i]; }
  Vec active(Vec x, int64_t i) const {
    return relu ? at::vec::maximum(normed(x, i), Vec(0.0f)) : normed(x, i);
  }
  // What ReLU leaves of a gradient.
  Vec passed(Vec dy, Vec x, int64_t i) const {
    return relu ? Vec::blendv(dy, Vec(0.0f), normed(x, i) <= Vec(0.0f)) : dy;
  }
};

template <typename T>
void normalise(Pixels pixels, const T *x, Norm norm, bool relu, T *y) {
  each_block(pixels, [&](const auto &block, auto registers) {
    const Channels<decltype(registers)::size> own(norm, block, relu);
    block.visit([&](int64_t place, int64_t i) {
      put_one(y + place, own.active(get_one(x + place, block.count), i), block.count);
    });
  });
}

template <typename T>
void norm_sums(Pixels pixels, const T *dy, const T *x, Norm norm, bool relu, float *dweight,
               float *dbias) {
  each_block(pixels, [&](const auto &block, auto registers) {
    constexpr int64_t n = decltype(registers)::size;
    const Channels<n> own(norm, block, relu);
    Vec sums[n], products[n];
    for (int64_t i = 0; i < n; i++)
      sums[i] = products[i] = Vec(0.0f);
    block.visit([&](int64_t place, int64_t i) {
      const Vec value = get_one(x + place, block.count);
      const Vec given = own.passed(get_one(dy + place, block.count), value, i);
      sums[i] = sums[i] + given;
      products[i] = products[i] + given * own.plain(value, i);
    });
    block.channels([&](int64_t channel, int64_t i) {
      if (block.first > 0) {
        products[i] = get_one(dweight + channel, block.count) + products[i];
        sums[i] = get_one(dbias + channel, block.count) + sums[i];
      }
      put_one(dweight + channel, products[i], block.count);
      put_one(dbias + channel, sums[i], block.count);
    });
  });
}

// With n = (x - mean) inverse: dx = inverse weight (dy - mean(dy) - n mean(dy n)).
template <typename T>
void norm_backward(Pixels pixels, const T *dy, const T *x, Norm norm, bool relu,
                   const float *dweight, const float *dbias, T *dx) {
  const Vec each(1.0f / static_cast<float>(pixels.rows));
  each_block(pixels, [&](const auto &block, auto registers) {
    constexpr int64_t n = decltype(registers)::size;
    const Channels<n> own(norm, block, relu);
    Vec given_mean[n], product_mean[n];
    block.channels([&](int64_t channel, int64_t i) {
      given_mean[i] = get_one(dbias + channel, block.count) * each;
      product_mean[i] = get_one(dweight + channel, block.count) * each;
    });
    block.visit([&](int64_t place, int64_t i) {
      const Vec value = get_one(x + place, block.count);
      const Vec given = own.passed(get_one(dy + place, block.count), value, i);
      const Vec apart = given - given_mean[i] - own.plain(value, i) * product_mean[i];
      put_one(dx + place, apart * own.scale[i], block.count);
    });
  });
}

// A window of one image: where its value goes, and which pixels of the image it covers.
struct Window {
  int64_t output;                            // offset
  int64_t top, left;                         // of the whole window
  int64_t first_row, rows, first_column, columns; // from, and up to
  int64_t count() const { return (rows - first_row) * (columns - first_column); }
};

template <typename Work> void each_window(const Windows &w, Work &&work) {
  for (int64_t i = 0; i < w.out_height; i++)
    for (int64_t j = 0; j < w.out_width; j++) {
      const int64_t top = i * w.stride - w.padding, left = j * w.stride - w.padding;
      work(Window{(i * w.out_width + j) * w.channels, top, left, most(0, top),
                  least(top + w.size, w.height), most(0, left),
                  least(left + w.size, w.width)});
    }
}

// Calls `work(offset, position)` with a pixel's offset in the image and its number in the window.
template <typename Work> void each_pixel(const Windows &w, const Window &window, Work &&work) {
  for (int64_t row = window.first_row; row < window.rows; row++)
    for (int64_t column = window.first_column; column < window.columns; column++)
      work((row * w.width + column) * w.channels,
           (row - window.top) * w.size + column - window.left);
}

void max_pool(Windows windows, const float *x, float *y, uint8_t *which) {
  each_window(windows, [&](const Window &window) {
    groups(windows.channels, [&](int64_t at, int64_t count, auto registers) {
      constexpr int64_t n = decltype(registers)::size;
      Vec largest[n], found[n];
      bool first = true;
      each_pixel(windows, window, [&](int64_t offset, int64_t position) {
        const Vec own(static_cast<float>(position));
        for (int64_t i = 0; i < n; i++) {
          const Vec value = get_one(x + offset + at + i * Vec::size(), count);
          if (first) {
            largest[i] = value;
            found[i] = own;
            continue;
          }
          // As in libtorch: a value that is not a number is the largest.
          const Vec is_larger = (value > largest[i]) | (value != value);
          largest[i] = Vec::blendv(largest[i], value, is_larger);
          found[i] = Vec::blendv(found[i], own, is_larger);
        }
        first = false;
      });
      for (int64_t i = 0; i < n; i++) {
        const int64_t place = window.output + at + i * Vec::size();
        put_one(y + place, largest[i], count);
        float positions[Vec::size()];
        found[i].store(positions);
        for (int64_t c = 0; c < count; c++)
          which[place + c] = static_cast<uint8_t>(positions[c]);
      }
    });
  });
}

void max_pool_backward(Windows windows, const float *dy, const uint8_t *which, float *dx) {
  each_window(windows, [&](const Window &window) {
    int64_t offsets[256]; // of the window's pixels
    each_pixel(windows, window,
               [&](int64_t offset, int64_t position) { offsets[position] = offset; });
    const float *given = dy + window.output;
    const uint8_t *found = which + window.output;
    for (int64_t channel = 0; channel < windows.channels; channel++)
      dx[offsets[found[channel]] + channel] += given[channel];
  });
}

void average_pool(Windows windows, const float *x, float *y) {
  each_window(windows, [&](const Window &window) {
    const Vec share(static_cast<float>(window.count()));
    groups(windows.channels, [&](int64_t at, int64_t count, auto registers) {
      constexpr int64_t n = decltype(registers)::size;
      Vec sums[n];
      for (int64_t i = 0; i < n; i++)
        sums[i] = Vec(0.0f);
      each_pixel(windows, window, [&](int64_t offset, int64_t) {
        for (int64_t i = 0; i < n; i++)
          sums[i] = sums[i] + get_one(x + offset + at + i * Vec::size(), count);
      });
      for (int64_t i = 0; i < n; i++)
        put_one(y + window.output + at + i * Vec::size(), sums[i] / share, count);
    });
  });
}

void average_pool_backward(Windows windows, const float *dy, float *dx) {
  each_window(windows, [&](const Window &window) {
    const Vec share(static_cast<float>(window.count()));
    groups(windows.channels, [&](int64_t at, int64_t count, auto registers) {
      constexpr int64_t n = decltype(registers)::size;
      Vec shares[n];
      for (int64_t i = 0; i < n; i++)
        shares[i] = get_one(dy + window.output + at + i * Vec::size(), count) / share;
      each_pixel(windows, window, [&](int64_t offset, int64_t) {
        for (int64_t i = 0; i < n; i++) {
          float *to = dx + offset + at + i * Vec::size();
          put_one(to, get_one(to, count) + shares[i], count);
        }
      });
    });
  });
}

} // namespace

extern const ImageKernels GPIPE_IMAGES;
const ImageKernels GPIPE_IMAGES = {
    {statistics<float>, normalise<float>, norm_sums<float>, norm_backward<float>},
    {statistics<c10::BFloat16>, normalise<c10::BFloat16>, norm_sums<c10::BFloat16>,
     norm_backward<c10::BFloat16>},
    max_pool, max_pool_backward, average_pool, average_pool_backward,
};

} // namespace gpipe
