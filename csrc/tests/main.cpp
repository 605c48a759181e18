// Runs every kernel on buffers of exactly the promised size, for the address and undefined-behaviour sanitizers, and
// compares with plain loops. Prints one line and returns 0, or says what is wrong and returns 1.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <vector>

#include "../quantkit_cpu.h"

namespace {

std::mt19937 rng(7);
int failures = 0;

int random_int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
float random_float() { return std::normal_distribution<float>()(rng); }

template <class T>
struct Aligned {  // exactly `count` elements: one byte further is a sanitizer report
  explicit Aligned(int64_t count) : data(static_cast<T*>(aligned_alloc(64, static_cast<size_t>(count) * sizeof(T)))) {}
  ~Aligned() { free(data); }
  T* const data;
};

void expect(double error, double limit, const char* what, const qk_shape& s, int tokens) {
  if (error <= limit) return;
  failures++;
  printf("%s: relative error %.2e (limit %.0e) at %dx%d, %d bits, group %d, zero %d, order %d, %d tokens\n", what, error, limit,
         s.rows, s.cols, s.bits, s.group, s.has_zero, s.has_order, tokens);
}

struct Dense {  // a packed weight and the same as plain floats
  qk_weight weight;
  std::unique_ptr<Aligned<uint8_t>> data;
  std::vector<float> values, bias;
};

Dense random_dense(qk_shape s) {
  Dense d;
  d.weight.shape = s;
  const int group = s.group ? s.group : s.cols, groups = (s.cols + group - 1) / group, half = s.bits == 4 ? 8 : 128;
  std::vector<uint8_t> codes(static_cast<size_t>(s.rows * s.cols)), zeros(static_cast<size_t>(s.rows * groups));
  std::vector<float> scales(static_cast<size_t>(s.rows * groups));
  std::vector<int32_t> order(static_cast<size_t>(s.cols));
  for (auto& c : codes) c = static_cast<uint8_t>(random_int(0, 2 * half - 1));
  for (auto& z : zeros) z = static_cast<uint8_t>(random_int(0, 2 * half - 1));
  for (auto& v : scales) v = random_float() * 0.01f;
  for (int k = 0; k < s.cols; k++) order[static_cast<size_t>(k)] = s.has_order ? s.cols - 1 - k : k;
  d.bias.resize(static_cast<size_t>(s.rows));
  for (auto& b : d.bias) b = s.has_bias ? random_float() : 0.0f;
  d.values.resize(codes.size());
  for (int r = 0; r < s.rows; r++) {
    for (int p = 0; p < s.cols; p++) {
      const int at = r * s.cols + order[static_cast<size_t>(p)], cell = r * groups + p / group;
      const int zero = s.has_zero ? zeros[static_cast<size_t>(cell)] : half;
      d.values[static_cast<size_t>(at)] = static_cast<float>(codes[static_cast<size_t>(at)] - zero) * scales[static_cast<size_t>(cell)];
    }
  }
  d.data = std::make_unique<Aligned<uint8_t>>(qk_packed_bytes(&s));
  d.weight.data = d.data->data;
  if (qk_pack(&s, codes.data(), 0, scales.data(), s.has_zero ? zeros.data() : nullptr, s.has_order ? order.data() : nullptr,
              s.has_bias ? d.bias.data() : nullptr, d.data->data)) {
    failures++;
    printf("pack refused: %s\n", qk_last_error());
  }
  return d;
}

void test_linear(const qk_shape& s, int tokens) {
  const Dense d = random_dense(s);
  std::vector<float> x(static_cast<size_t>(tokens * s.cols)), y(static_cast<size_t>(tokens * s.rows));
  for (auto& v : x) v = static_cast<float>(random_int(-64, 64)) / 16.0f;  // bf16 numbers
  const double limits[] = {3e-2, 2e-5, 2e-5, 3e-2, 5e-5};                 // by qk_precision
  for (int precision = QK_INT8; precision <= QK_INT16; precision++) {
    if (qk_linear(&d.weight, x.data(), y.data(), tokens, QK_F32, precision)) failures++, printf("refused: %s\n", qk_last_error());
    double error = 0, norm = 1e-30;
    for (int m = 0; m < tokens; m++) {
      for (int r = 0; r < s.rows; r++) {
        double sum = d.bias[static_cast<size_t>(r)], squares = sum * sum;
        for (int k = 0; k < s.cols; k++) {
          const double term = double{d.values[static_cast<size_t>(r * s.cols + k)]} * x[static_cast<size_t>(m * s.cols + k)];
          sum += term, squares += term * term;  // the size a sum of such terms has, were it not to cancel
        }
        const double off = sum - y[static_cast<size_t>(m * s.rows + r)];
        error += off * off, norm += squares;
      }
    }
    expect(sqrt(error / norm), limits[precision], "linear", s, tokens);
  }
  std::vector<float> row(static_cast<size_t>(s.cols));
  qk_unpack_row(&d.weight, s.rows - 1, row.data());
  if (memcmp(row.data(), &d.values[static_cast<size_t>((s.rows - 1) * s.cols)], sizeof(float) * row.size())) {
    expect(1, 0, "unpacked row", s, tokens);
  }
}

// A model of random weights: prefill in chunks must give what single steps give, in every kind of cache.
void test_model(int cache, int window) {
  const int hidden = 48, inner = 40, heads = 3, dim = 48, vocab = 53, capacity = 45, layers = 2, half = dim / 2;
  const auto shape = [](int rows, int cols) { return qk_shape{rows, cols, 4, 32, QK_F32, 1, 0, 1}; };
  std::vector<Dense> weights;
  weights.reserve(16);
  const auto weight = [&](int rows, int cols) { return weights.push_back(random_dense(shape(rows, cols))), weights.back().weight; };
  std::vector<float> ones(64, 1.0f), cos_table(static_cast<size_t>(capacity * half)), sin_table(cos_table.size());
  for (int t = 0; t < capacity; t++) {
    for (int i = 0; i < half; i++) {
      const float angle = static_cast<float>(t) / powf(100.0f, static_cast<float>(i) / half);
      cos_table[static_cast<size_t>(t * half + i)] = cosf(angle);
      sin_table[static_cast<size_t>(t * half + i)] = sinf(angle);
    }
  }
  std::vector<qk_layer> blocks(layers);
  for (auto& b : blocks) {
    b = qk_layer{};
    b.q = weight(heads * dim, hidden), b.k = weight(dim, hidden), b.v = weight(dim, hidden), b.o = weight(hidden, heads * dim);
    b.gate = weight(inner, hidden), b.up = weight(inner, hidden), b.down = weight(hidden, inner);
    b.input_norm = b.mlp_norm = b.q_norm = b.k_norm = b.mlp_post_norm = ones.data();
    b.cos = cos_table.data(), b.sin = sin_table.data();
    b.window = window;
  }
  qk_model_config c{};
  c.layers = layers, c.hidden = hidden, c.intermediate = inner, c.heads = heads, c.kv_heads = 1, c.head_dim = dim;
  c.rotary_dim = dim, c.vocab = vocab, c.capacity = capacity, c.chunk = 7, c.cache = cache, c.precision = QK_INT16;
  c.head_precision = QK_FP32, c.eps = 1e-6f, c.embed_scale = 1.0f, c.attn_scale = 0.15f;
  c.embed = c.head = weight(vocab, hidden);
  c.final_norm = ones.data();
  c.blocks = blocks.data();
  void* model = qk_model_create(&c);
  if (!model) {
    failures++;
    printf("model refused: %s\n", qk_last_error());
    return;
  }
  std::vector<int32_t> ids(static_cast<size_t>(capacity));
  for (auto& id : ids) id = random_int(0, vocab - 1);
  std::vector<float> all(static_cast<size_t>(capacity * vocab)), one(static_cast<size_t>(vocab));
  failures += qk_model_forward(model, ids.data(), capacity, 0, 1, all.data());
  double error = 0, norm = 1e-30;
  for (int t = 0; t < capacity; t++) {
    failures += qk_model_forward(model, &ids[static_cast<size_t>(t)], 1, t, 0, one.data());
    for (int i = 0; i < vocab; i++) {
      const double want = all[static_cast<size_t>(t * vocab + i)], off = want - one[static_cast<size_t>(i)];
      error += off * off, norm += want * want;
    }
  }
  if (!(sqrt(error / norm) < 1e-4)) {
    failures++;
    printf("model: steps differ from prefill by %.2e (cache %d, window %d)\n", sqrt(error / norm), cache, window);
  }
  if (qk_model_forward(model, ids.data(), 1, capacity, 0, one.data()) == 0) failures++, printf("overlong sequence accepted\n");
  int32_t made[8];
  if (qk_model_generate(model, 1, 3, 8, nullptr, 0, made, nullptr) != 8) failures++, printf("generate stopped early\n");
  qk_model_free(model);
}

}  // namespace

int main() {
  const int shapes[][2] = {{1, 16}, {16, 16}, {33, 70}, {40, 200}, {17, 1}, {5, 333}};
  for (const auto& sh : shapes) {
    for (int bits : {4, 8}) {
      for (int group : {0, 32, 64}) {
        for (int tokens : {1, 2, 11}) {
          const int odd = (group / 32 + tokens) & 1;
          test_linear({sh[0], sh[1], bits, group, QK_F32, odd, !odd, odd}, tokens);
        }
      }
    }
  }
  for (int cache : {QK_CACHE_F32, QK_CACHE_BF16, QK_CACHE_INT8}) {
    test_model(cache, 0);
    test_model(cache, 18);
  }
  std::vector<uint8_t> bytes(1 << 20, 1);
  if (!(qk_read_seconds(bytes.data(), static_cast<int64_t>(bytes.size())) > 0)) failures++, printf("no time passed\n");
  printf("%s with %d threads: %d failures\n", qk_isa(), qk_threads(), failures);
  return failures != 0;
}
