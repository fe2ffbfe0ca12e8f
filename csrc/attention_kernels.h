// Attention of a few queries over one block of keys. Included by float_{avx512,avx2,portable}.cc only.
//
// Order of float operations for one query, whatever shares the call: score = sum over the head's dimensions in order, one
// fused multiply-add each; max over the block; e^(score - max), summed per lane over pages in order; values accumulated
// over keys in order. Keys a query must not see take part with weight exactly 0, which changes no bit of a sum (finish
// turns -0 into +0). So tiles may be of any size; they only decide how often keys and values are loaded.
#pragma once
#include "float_kernels.h"
#include "simd.h"

namespace tidegate {
namespace {

// Accumulators of a tile stay in registers: rows x pages of scores, rows x vectors of values.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTilePages = 4, kTileVectors = 4;
#else
constexpr int kTileRows = 4, kTilePages = 1, kTileVectors = 1;
#endif
static_assert(kTilePages <= kAheadPages);

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls tile(rows, is first, row) for tiles that cover all rows; both constants are types.
template <class F>
TIDEGATE_INLINE void for_tiles(int num_rows, F tile) {
  int row = 0;
  const auto one = [&](auto rows) {
    if (row == 0)
      tile(rows, Constant<1>{}, row);
    else
      tile(rows, Constant<0>{}, row);
    row += rows.value;
  };
  while (row + kTileRows <= num_rows) one(Constant<kTileRows>{});
  if (kTileRows > 4 && row + 4 <= num_rows) one(Constant<4>{});
  if (row + 2 <= num_rows) one(Constant<2>{});
  if (row < num_rows) one(Constant<1>{});
}

// Keys and values come from memory at decode: the first pass over some pages asks for those that are needed next.
TIDEGATE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// scores[r][page p] for R rows and P pages of keys [k_dim][16]. Asks for as much of `next`, if there is any.
template <int R, int P, bool Ahead, class T>
TIDEGATE_INLINE void score_tile(const float* queries, int k_dim, const T* const* pages, const void* const* next, float* scores) {
  Vec16 acc[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) acc[r][p] = broadcast(0.0f);
  for (int d = 0; d < k_dim; ++d) {
    Vec16 keys[P];
    for (int p = 0; p < P; ++p) keys[p] = load(pages[p] + d * kLanes);
    if (Ahead)
      for (int p = 0; p < P; ++p) prefetch(static_cast<const T*>(next[p]) + d * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec16 q = broadcast(queries[r * k_dim + d]);
      for (int p = 0; p < P; ++p) acc[r][p] = fma(q, keys[p], acc[r][p]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(scores + r * kKeyBlock + p * kLanes, acc[r][p]);
}

template <int P, class T>
TIDEGATE_INLINE void score_group(const AttendBlock& b, const T* const* pages, int page, int first_page, int last_page) {
  const void* next[P];  // more keys, then the block's values
  for (int p = 0; p < P; ++p) {
    const int ahead = page + P + p;
    next[p] = ahead < last_page ? pages[ahead] : b.v_pages[first_page + ahead - last_page];
  }
  for_tiles(b.num_rows, [&](auto rows, auto is_first, int row) {
    score_tile<decltype(rows)::value, P, decltype(is_first)::value>(
        b.queries + static_cast<std::int64_t>(row) * b.k_dim, b.k_dim, pages + page, next,
        b.scores + row * kKeyBlock + page * kLanes);
  });
}

template <class T>
void score_block(const AttendBlock& b, const T* const* pages, int first_page, int last_page) {
  int page = first_page;
  for (; page + kTilePages <= last_page; page += kTilePages) score_group<kTilePages>(b, pages, page, first_page, last_page);
  for (; page < last_page; ++page) score_group<1>(b, pages, page, first_page, last_page);
}

// The scales of a page's int8 codes, which they follow.
TIDEGATE_INLINE Vec16 scales_of(const void* page, int dim) {
  return load(reinterpret_cast<const float*>(static_cast<const Int8*>(page) + dim * kLanes));
}

// Scores become weights; keys out of a row's sight get 0. Scales of int8 keys enter the scores here, those of values the
// weights, after these have been summed.
template <class T>
void softmax_block(const AttendBlock& b, int first_page, int last_page) {
  constexpr bool kScaled = sizeof(T) == 1;
  const Vec16 minus_infinity = broadcast(-__builtin_inff());
  for (int row = 0; row < b.num_rows; ++row) {
    float* const scores = b.scores + row * kKeyBlock;
    const int first = b.first[row], last = b.last[row];
    Vec16 highest = minus_infinity;
    for (int p = first_page; p < last_page; ++p) {
      const int from = first - p * kLanes, to = last - p * kLanes;
      Vec16 s = load(scores + p * kLanes);
      if (kScaled) s = s * scales_of(b.k_pages[p], b.k_dim);
      const bool is_cut = from > 0 || to < kLanes;
      if (is_cut)
        s = from < kLanes && to > 0 ? keep_lanes(s, from > 0 ? from : 0, to < kLanes ? to : kLanes, minus_infinity)
                                    : minus_infinity;
      if (kScaled || is_cut) store(scores + p * kLanes, s);
      highest = max(highest, s);
    }
    const float highest_score = max_of(highest);
    b.out.max[row] = highest_score;
    // A row without keys has nothing but -infinity: e^(-infinity - 0) = 0.
    const Vec16 offset = broadcast(highest_score == -__builtin_inff() ? 0.0f : highest_score);
    Vec16 sums = broadcast(0.0f);
    for (int p = first_page; p < last_page; ++p) {
      const Vec16 weight = exp_of(load(scores + p * kLanes) - offset);
      store(scores + p * kLanes, kScaled ? weight * scales_of(b.v_pages[p], b.keys_by_token ? b.k_dim : b.v_dim) : weight);
      sums = sums + weight;
    }
    store(b.out.sums + row * kLanes, sums);
  }
}

// acc of R rows, dimensions dim..dim + 16N - 1 (`lanes` of them if not Whole), over keys first..last-1.
template <int R, int N, bool Whole, bool Ahead, class T>
TIDEGATE_INLINE void value_tile(const AttendBlock& b, int row, int dim, int lanes, int first, int last) {
  constexpr int kLineNumbers = 64 / sizeof(T);
  Vec16 acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = broadcast(0.0f);
  for (int key = first; key < last;) {
    const int page = key / kLanes, end = last < (page + 1) * kLanes ? last : (page + 1) * kLanes;
    const int ahead = page + kAheadPages - (last + kLanes - 1) / kLanes;  // beyond the last page: the next block's keys
    const std::int64_t at = static_cast<std::int64_t>(key - page * kLanes) * b.v_stride + dim;
    const T* values = static_cast<const T*>(b.v_pages[page]) + at;
    const T* next = static_cast<const T*>(ahead < 0 ? b.v_pages[page + kAheadPages] : b.next_k_pages[ahead]) + at;
    const float* weights = b.scores + row * kKeyBlock + key;
    for (; key < end; ++key, values += b.v_stride, next += b.v_stride, ++weights) {
      Vec16 v[N];
      for (int n = 0; n < N; ++n) v[n] = Whole ? load(values + n * kLanes) : load_first(values, lanes);
      if (Ahead)
        for (int n = 0; n < N * kLanes; n += kLineNumbers) prefetch(next + n);
      for (int r = 0; r < R; ++r) {
        const Vec16 weight = broadcast(weights[r * kKeyBlock]);
        for (int n = 0; n < N; ++n) acc[r][n] = fma(weight, v[n], acc[r][n]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    float* const out = b.out.acc + static_cast<std::int64_t>(row + r) * b.v_dim + dim;
    for (int n = 0; n < N; ++n) {
      if (Whole)
        store(out + n * kLanes, acc[r][n]);
      else
        store_first(out, acc[r][n], lanes);
    }
  }
}

template <class T>
void value_block(const AttendBlock& b, int first, int last) {
  for (int dim = 0; dim < b.v_dim;) {
    const int left = b.v_dim - dim;
    for_tiles(b.num_rows, [&](auto rows, auto ahead, int row) {
      constexpr int R = decltype(rows)::value;
      constexpr bool kAhead = decltype(ahead)::value;
      if (left >= kTileVectors * kLanes)
        value_tile<R, kTileVectors, true, kAhead, T>(b, row, dim, 0, first, last);
      else if (left >= kLanes)
        value_tile<R, 1, true, kAhead, T>(b, row, dim, 0, first, last);
      else
        value_tile<R, 1, false, kAhead, T>(b, row, dim, left, first, last);
    });
    dim += left >= kTileVectors * kLanes ? kTileVectors * kLanes : kLanes;
  }
}

// panel [k_dim][16] float32 from keys [16][k_dim].
template <class T>
void make_panel(const T* keys, int k_dim, float* panel) {
  for (int d = 0; d < k_dim; d += kLanes) {
    const int lanes = k_dim - d < kLanes ? k_dim - d : kLanes;
    Vec16 square[kLanes];
    for (int t = 0; t < kLanes; ++t) {
      const T* const from = keys + static_cast<std::int64_t>(t) * k_dim + d;
      square[t] = lanes == kLanes ? load(from) : load_first(from, lanes);
    }
    transpose(square);
    for (int i = 0; i < lanes; ++i) store(panel + (d + i) * kLanes, square[i]);
  }
}

template <class T>
void attend_typed(const AttendBlock& b, int first, int last) {
  const int first_page = first / kPageTokens, last_page = (last + kPageTokens - 1) / kPageTokens;
  const T* const* const k_pages = reinterpret_cast<const T* const*>(b.k_pages);
  if (b.keys_by_token) {
    for (int page = first_page; page < last_page; page += kPanelPages) {
      const int end = page + kPanelPages < last_page ? page + kPanelPages : last_page;
      const float* panels[kBlockPages];
      for (int p = page; p < end; ++p) {
        float* const panel = b.panels + static_cast<std::int64_t>(p - page) * b.k_dim * kLanes;
        make_panel(k_pages[p], b.k_dim, panel);
        panels[p] = panel;
      }
      score_block(b, panels, page, end);
    }
  } else {
    score_block(b, k_pages, first_page, last_page);
  }
  softmax_block<T>(b, first_page, last_page);
  value_block<T>(b, first, last);
}

void attend_block(const AttendBlock& b) {
  int first = kKeyBlock, last = 0;
  for (int row = 0; row < b.num_rows; ++row) {
    if (b.first[row] >= b.last[row]) continue;
    first = first < b.first[row] ? first : b.first[row];
    last = last > b.last[row] ? last : b.last[row];
  }
  if (first > last) first = last = 0;  // nobody sees a key: the loops below run over nothing
  if (b.format == KvFormat::f16)
    attend_typed<Half>(b, first, last);
  else if (b.format == KvFormat::int8)
    attend_typed<Int8>(b, first, last);
  else
    attend_typed<float>(b, first, last);
}

// y[i] = a * y[i] + c * x[i]
TIDEGATE_INLINE void blend(float* y, float a, const float* x, float c, int n) {
  const Vec16 va = broadcast(a), vc = broadcast(c);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, fma(load(y + i), va, load(x + i) * vc));
  if (i < n) store_first(y + i, fma(load_first(y + i, n - i), va, load_first(x + i, n - i) * vc), n - i);
}

void merge(const Partial& total, const Partial& part, int num_rows, int v_dim) {
  for (int row = 0; row < num_rows; ++row) {
    const float old_max = total.max[row], part_max = part.max[row];
    if (part_max == -__builtin_inff()) continue;
    const float new_max = old_max > part_max ? old_max : part_max;
    const float a = exp_one(old_max - new_max), c = exp_one(part_max - new_max);
    const std::int64_t at = static_cast<std::int64_t>(row) * v_dim;
    blend(total.acc + at, a, part.acc + at, c, v_dim);
    blend(total.sums + row * kLanes, a, part.sums + row * kLanes, c, kLanes);
    total.max[row] = new_max;
  }
}

void finish(const float* acc, const float* sums, float max, const float* sink, float* out, int v_dim) {
  float sum = sum_of(load(sums)), share = 1.0f;
  if (sink != nullptr) {
    const float new_max = max > *sink ? max : *sink;
    share = exp_one(max - new_max);
    sum = sum * share + exp_one(*sink - new_max);
  }
  const Vec16 factor = broadcast(share / sum), zero = broadcast(0.0f);
  int i = 0;
  for (; i + kLanes <= v_dim; i += kLanes) store(out + i, load(acc + i) * factor + zero);
  if (i < v_dim) store_first(out + i, load_first(acc + i, v_dim - i) * factor + zero, v_dim - i);
}

}  // namespace
}  // namespace tidegate
