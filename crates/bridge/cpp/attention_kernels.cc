// Attention of one group, block by block (Dao et al. 2022, FlashAttention): the scores of a block
// of queries and a block of keys lie in the cache, and are never written to memory.
//
// Compiled once for each width of vector registers (build.rs).
#include "attention_kernels.h"
#include "kernel_products.h"
#include <cmath>

namespace gpipe {

namespace {

// Queries and keys of a block. Scores of 48 x 256 take 48 KiB.
constexpr int64_t kQueries = 48, kKeys = 256;

// Rows of `size` elements, in float32 and side by side.
template <typename T>
void read(Rows<const T> from, int64_t first, int64_t count, int64_t size, float *to) {
  for (int64_t row = 0; row < count; row++)
    for (int64_t at = 0; at < size; at += kWidth)
      get_one(from.data + (first + row) * from.stride + at, kWidth).store(to + row * size + at);
}

template <typename T>
void write(const float *from, int64_t first, int64_t count, int64_t size, Rows<T> to) {
  for (int64_t row = 0; row < count; row++)
    for (int64_t at = 0; at < size; at += kWidth)
      put_one(to.data + (first + row) * to.stride + at, Vec::loadu(from + row * size + at), kWidth);
}

// x [keys, size] as [size, padded keys]. The columns behind the keys are 0.
void turned(const float *x, int64_t keys, int64_t padded, int64_t size, float *to) {
  transpose(x, size, keys, size, to, padded);
  for (int64_t d = 0; d < size; d++)
    for (int64_t key = keys; key < padded; key++)
      to[d * padded + key] = 0.0f;
}

// The memory that both directions work with.
struct Scratch {
  int64_t padded;
  float *wide[4]; // as large as keys and values of the head
  float *block[4]; // as large as a block of queries
  float *scores, *others;

  Scratch(const AttentionShape &shape, float *memory) : padded(rounded_up(shape.keys, kWidth)) {
    for (float *&one : wide) {
      one = memory;
      memory += padded * shape.size;
    }
    for (float *&one : block) {
      one = memory;
      memory += kQueries * shape.size;
    }
    scores = memory;
    others = memory + kQueries * kKeys;
  }
};

int64_t scratch_of(const AttentionShape &shape) {
  const int64_t padded = rounded_up(shape.keys, 16);
  return 4 * padded * shape.size + 4 * kQueries * shape.size + 2 * kQueries * kKeys;
}

// A block of queries and a block of keys of which some queries see some.
struct Block {
  int64_t query, queries; // the first, and how many
  int64_t key, keys;      // keys may be more than there are, up to a register's width
};

// Calls `call` with each block of keys that a query of the block sees.
template <typename Call>
void blocks_of_keys(const AttentionShape &shape, int64_t query, int64_t queries, Call &&call) {
  const int64_t begin = shape.first_key(query) / kWidth * kWidth;
  const int64_t end = rounded_up(shape.end_key(query + queries - 1), kWidth);
  for (int64_t key = begin; key < end; key += kKeys)
    call(Block{query, queries, key, end - key < kKeys ? end - key : kKeys});
}

// Which keys of a block a query sees: those from `from` on, before `to`.
struct Seen {
  int64_t from, to;

  Seen(const AttentionShape &shape, const Block &block, int64_t row) {
    from = shape.first_key(block.query + row) - block.key;
    to = shape.end_key(block.query + row) - block.key;
    from = from < 0 ? 0 : from > block.keys ? block.keys : from;
    to = to < from ? from : to > block.keys ? block.keys : to;
  }

  // Whether a register at this position has only keys that are seen.
  bool has_all(int64_t at) const { return at >= from && at + kWidth <= to; }

  // `x` where keys are seen, elsewhere `other`.
  Vec choose(int64_t at, Vec x, float other) const {
    const auto number = [](int64_t value) { return static_cast<float>(value); };
    const Vec own = Vec::arange(number(at), 1.0f);
    return Vec::blendv(Vec(other), x, (own >= Vec(number(from))) & (own < Vec(number(to))));
  }
};

// A head of queries, with the keys [size, padded keys] and the values [padded keys, size] that its
// group shares.
template <typename T>
void forward_head(const AttentionShape &shape, const Scratch &own, Rows<const T> q,
                  const float *keys, const float *values, Rows<T> y, float *sums) {
  const int64_t size = shape.size;
  const Vec scale(shape.scale);
  for (int64_t query = 0; query < shape.queries; query += kQueries) {
    const int64_t left = shape.queries - query, queries = left < kQueries ? left : kQueries;
    float *queried = own.block[0], *sum = own.block[1];
    float most[kQueries], total[kQueries];
    read(q, query, queries, size, queried);
    bool first = true;
    for (int64_t row = 0; row < queries; row++) {
      most[row] = -INFINITY;
      total[row] = 0.0f;
    }
    blocks_of_keys(shape, query, queries, [&](const Block &block) {
      product(queries, block.keys, size, queried, size, 1, keys + block.key, own.padded,
              own.scores, kKeys, /*adds=*/false);
      for (int64_t row = 0; row < queries; row++) {
        float *scores = own.scores + row * kKeys;
        const Seen seen(shape, block, row);
        Vec largest(-INFINITY);
        for (int64_t at = 0; at < block.keys; at += kWidth) {
          Vec own_scores = Vec::loadu(scores + at) * scale;
          if (!seen.has_all(at))
            own_scores = seen.choose(at, own_scores, -INFINITY);
          own_scores.store(scores + at);
          largest = at::vec::maximum(largest, own_scores);
        }
        const float before = most[row];
        const float now = at::vec::vec_reduce_all<float>(
            [](Vec &a, Vec &b) { return at::vec::maximum(a, b); }, largest);
        // A NaN stays, so that the result is one.
        most[row] = now > before || now != now ? now : before;
        if (most[row] == -INFINITY) {
          // No key of this block is seen, and none before it was.
          for (int64_t at = 0; at < block.keys; at += kWidth)
            Vec(0.0f).store(scores + at);
        } else {
          const Vec offset(most[row]);
          Vec added(0.0f);
          for (int64_t at = 0; at < block.keys; at += kWidth) {
            Vec weight = (Vec::loadu(scores + at) - offset).exp_u20();
            if (!seen.has_all(at))
              weight = seen.choose(at, weight, 0.0f);
            weight.store(scores + at);
            added = added + weight;
          }
          const float shrunk = first ? 0.0f : expf(before - most[row]);
          total[row] = total[row] * shrunk +
                       at::vec::vec_reduce_all<float>([](Vec &a, Vec &b) { return a + b; }, added);
          if (!first)
            for (int64_t at = 0; at < size; at += kWidth)
              (Vec::loadu(sum + row * size + at) * Vec(shrunk)).store(sum + row * size + at);
        }
      }
      product(queries, size, block.keys, own.scores, kKeys, 1, values + block.key * size, size, sum,
              size, /*adds=*/!first);
      first = false;
    });
    for (int64_t row = 0; row < queries; row++) {
      sums[query + row] = most[row] + logf(total[row]);
      const Vec part(1.0f / total[row]);
      for (int64_t at = 0; at < size; at += kWidth)
        (Vec::loadu(sum + row * size + at) * part).store(sum + row * size + at);
    }
    write(sum, query, queries, size, y);
  }
}

template <typename T>
void forward(const AttentionShape &shape, Heads<const T> q, Rows<const T> k, Rows<const T> v,
             Heads<T> y, float *sums, float *memory) {
  const Scratch own(shape, memory);
  const int64_t size = shape.size;
  float *keys = own.wide[0], *values = own.wide[1], *rows = own.wide[2];
  read(k, 0, shape.keys, size, rows);
  turned(rows, shape.keys, own.padded, size, keys);
  read(v, 0, shape.keys, size, values);
  for (int64_t at = shape.keys * size; at < own.padded * size; at++)
    values[at] = 0.0f;
  for (int64_t head = 0; head < shape.shared; head++)
    forward_head<T>(shape, own, q[head], keys, values, y[head], sums + head * shape.queries);
}

// What a group's heads of queries read, and add to.
struct Group {
  const float *keys, *values; // [size, padded keys]
  float *key_sums, *value_sums; // [padded keys, size]
};

// A head of queries. With p the weights, and D_i = dy_i y_i: dv = p^T dy, ds = p (dy v^T - D),
// dq = ds k scale, and dk = ds^T q scale.
template <typename T>
void backward_head(const AttentionShape &shape, const Scratch &own, const Group &group,
                   Rows<const T> q, Rows<const T> k, Rows<const T> y, const float *sums,
                   Rows<const T> dy, Rows<T> dq) {
  const int64_t size = shape.size;
  const float *keys = group.keys, *values = group.values;
  float *key_sums = group.key_sums, *value_sums = group.value_sums;
  const Vec scale(shape.scale);
  for (int64_t query = 0; query < shape.queries; query += kQueries) {
    const int64_t left = shape.queries - query, queries = left < kQueries ? left : kQueries;
    float *queried = own.block[0], *given = own.block[1], *sum = own.block[2], *out = own.block[3];
    float dots[kQueries];
    read(q, query, queries, size, queried);
    read(dy, query, queries, size, given);
    read(y, query, queries, size, out);
    for (int64_t row = 0; row < queries; row++) {
      Vec dot(0.0f);
      for (int64_t at = row * size; at < (row + 1) * size; at += kWidth)
        dot = at::vec::fmadd(Vec::loadu(given + at), Vec::loadu(out + at), dot);
      dots[row] = at::vec::vec_reduce_all<float>([](Vec &a, Vec &b) { return a + b; }, dot);
    }
    bool first = true;
    blocks_of_keys(shape, query, queries, [&](const Block &block) {
      product(queries, block.keys, size, queried, size, 1, keys + block.key, own.padded,
              own.scores, kKeys, /*adds=*/false);
      product(queries, block.keys, size, given, size, 1, values + block.key, own.padded,
              own.others, kKeys, /*adds=*/false);
      for (int64_t row = 0; row < queries; row++) {
        const Seen seen(shape, block, row);
        const Vec offset(sums[query + row]), dot(dots[row]);
        float *weights = own.scores + row * kKeys, *others = own.others + row * kKeys;
        for (int64_t at = 0; at < block.keys; at += kWidth) {
          Vec weight = (Vec::loadu(weights + at) * scale - offset).exp_u20();
          if (!seen.has_all(at))
            weight = seen.choose(at, weight, 0.0f);
          weight.store(weights + at);
          (weight * (Vec::loadu(others + at) - dot) * scale).store(others + at);
        }
      }
      product(block.keys, size, queries, own.scores, 1, kKeys, given, size,
              value_sums + block.key * size, size, /*adds=*/true);
      product(block.keys, size, queries, own.others, 1, kKeys, queried, size,
              key_sums + block.key * size, size, /*adds=*/true);
      for (int64_t row = 0; row < queries; row++)
        if (first)
          for (int64_t at = row * size; at < (row + 1) * size; at += kWidth)
            Vec(0.0f).store(sum + at);
      for (int64_t part = 0; part < block.keys; part += kQueries) {
        const int64_t after = block.keys - part, count = after < kQueries ? after : kQueries;
        const int64_t there = shape.keys - block.key - part;
        const int64_t real = count < there ? count : there;
        if (real <= 0)
          break;
        read(k, block.key + part, real, size, out);
        product(queries, size, real, own.others + part, kKeys, 1, out, size, sum, size,
                /*adds=*/true);
      }
      first = false;
    });
    write(sum, query, queries, size, dq);
  }
}

template <typename T>
void backward(const AttentionShape &shape, Heads<const T> q, Rows<const T> k, Rows<const T> v,
              Heads<const T> y, const float *sums, Heads<const T> dy, Heads<T> dq, Rows<T> dk,
              Rows<T> dv, float *memory) {
  const Scratch own(shape, memory);
  const int64_t size = shape.size, whole = own.padded * size;
  float *keys = own.wide[0], *values = own.wide[1], *key_sums = own.wide[2],
        *value_sums = own.wide[3];
  // The sums' memory serves as rows until they begin.
  float *rows = key_sums;
  read(v, 0, shape.keys, size, rows);
  turned(rows, shape.keys, own.padded, size, values);
  read(k, 0, shape.keys, size, rows);
  turned(rows, shape.keys, own.padded, size, keys);
  for (int64_t at = 0; at < whole; at++)
    key_sums[at] = value_sums[at] = 0.0f;
  const Group group{keys, values, key_sums, value_sums};
  for (int64_t head = 0; head < shape.shared; head++)
    backward_head<T>(shape, own, group, q[head], k, y[head], sums + head * shape.queries,
                     dy[head], dq[head]);
  write(key_sums, 0, shape.keys, size, dk);
  write(value_sums, 0, shape.keys, size, dv);
}

template <typename T> constexpr AttentionKernels<T> kernels() {
  return {scratch_of, forward<T>, backward<T>};
}

} // namespace

extern const AttentionKernels<float> GPIPE_ATTENTION_FLOAT;
extern const AttentionKernels<c10::BFloat16> GPIPE_ATTENTION_BFLOAT16;
const AttentionKernels<float> GPIPE_ATTENTION_FLOAT = kernels<float>();
const AttentionKernels<c10::BFloat16> GPIPE_ATTENTION_BFLOAT16 = kernels<c10::BFloat16>();

} // namespace gpipe
