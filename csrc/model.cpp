#include "model.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <chrono>

#include "error.h"

namespace qk {

Model::Model(const qk_model_config& config) : c_(config) {
  const int threads = team_size();
  hidden16_ = round_up(c_.hidden, 16);
  inner16_ = round_up(c_.intermediate, 16);
  q_width_ = int64_t{c_.heads} * c_.head_dim;
  kv_width_ = int64_t{c_.kv_heads} * c_.head_dim;
  vocab16_ = round_up(c_.vocab, 16);
  group_ = c_.heads / c_.kv_heads;
  embed_packed_ = c_.embed_table == nullptr;
  if (embed_packed_) embed_ = open(c_.embed);
  head_ = open(c_.head);
  for (int i = 0; i < c_.layers; i++) {
    const qk_layer& from = c_.blocks[i];
    auto b = std::make_unique<Block>();
    b->q = open(from.q), b->k = open(from.k), b->v = open(from.v), b->o = open(from.o);
    b->gate = open(from.gate), b->up = open(from.up), b->down = open(from.down);
    b->input_norm = from.input_norm, b->q_norm = from.q_norm, b->k_norm = from.k_norm;
    b->attn_post_norm = from.attn_post_norm, b->mlp_norm = from.mlp_norm, b->mlp_post_norm = from.mlp_post_norm;
    b->cos = from.cos, b->sin = from.sin, b->window = from.window;
    b->cache.allocate(c_.cache, c_.kv_heads, c_.head_dim, c_.capacity);
    blocks_.push_back(std::move(b));
  }
  c_.blocks = nullptr;  // the caller's array need not outlive this constructor

  const int chunk = c_.chunk;
  q_ = q_buffer_.reserve_of<float>(chunk * q_width_);
  k_ = k_buffer_.reserve_of<float>(chunk * kv_width_);
  v_ = v_buffer_.reserve_of<float>(chunk * kv_width_);
  proj_ = proj_buffer_.reserve_of<float>(chunk * hidden16_);
  gate_ = gate_buffer_.reserve_of<float>(chunk * inner16_);
  up_ = up_buffer_.reserve_of<float>(chunk * inner16_);
  inner_ = inner_buffer_.reserve_of<float>(chunk * inner16_);
  logits_ = logits_buffer_.reserve_of<float>(vocab16_);
  fit(shared_, chunk);
  for (int id = 0; id < threads; id++) {
    lanes_.push_back(std::make_unique<Lane>());
    fit(*lanes_.back(), 1);
    scratch_.push_back(std::make_unique<Scratch>());
    scratch_.back()->query.reserve_of<float>(group_ * c_.head_dim);
    scratch_.back()->order.reserve_of<float>(std::max({hidden16_, inner16_, q_width_}));
    scratch_.back()->partials.resize(static_cast<size_t>(group_));
  }
  partials_.resize(static_cast<size_t>(threads * c_.heads));
  best_.resize(static_cast<size_t>(threads));
}

void Model::fit(Lane& lane, int tokens) {
  lane.x = lane.x_buffer.reserve_of<float>(tokens * hidden16_);
  lane.normed = lane.normed_buffer.reserve_of<float>(tokens * hidden16_);
  lane.attn = lane.attn_buffer.reserve_of<float>(tokens * q_width_);
  for (const auto& b : blocks_) {
    for (const Linear* w : {&b->q, &b->o, &b->gate, &b->down}) lane.acts[0].fit(*w, tokens);
    for (const Linear* w : {&b->k, &b->up}) lane.acts[1].fit(*w, tokens);
    lane.acts[2].fit(b->v, tokens);
  }
  lane.acts[0].fit(head_, tokens);
}

int64_t Model::cache_bytes() const {
  int64_t sum = 0;
  for (const auto& b : blocks_) sum += b->cache.bytes();
  return sum;
}

struct Model::Pass {
  Model& m;
  const Kernels& kernels;
  const int id, threads;
  Barrier& barrier;
  const int tokens;
  const int64_t position;
  const bool single;
  Lane& lane;
  Scratch& scratch;
  const Share rows;  // those whose norms and preparation this thread does

  Pass(Model& model, int tokens, int64_t position, int id, int threads, Barrier& barrier)
      : m(model),
        kernels(qk::kernels()),
        id(id),
        threads(threads),
        barrier(barrier),
        tokens(tokens),
        position(position),
        single(tokens == 1),
        lane(single ? *model.lanes_[static_cast<size_t>(id)] : model.shared_),
        scratch(*model.scratch_[static_cast<size_t>(id)]),
        rows(single ? Share(1, 0, 1) : Share(tokens, id, threads)) {}

  float* query() const { return static_cast<float*>(scratch.query.reserve(0)); }
  float* order_scratch() const { return static_cast<float*>(scratch.order.reserve(0)); }

  // ---- linears that share an input ----------------------------------------------------------------------------

  struct Projection {
    const Linear* w;
    float* y;
    int64_t ldy;
  };

  static bool same_input(const Linear& a, ActKind ka, const Linear& b, ActKind kb) {
    return ka == kb && a.group == b.group && a.cols16 == b.cols16 && !a.order && !b.order;
  }

  // y = x[first_row .. +count] @ W^T for up to three weights; this thread writes its share of the tiles.
  void project(const Projection* list, int n, const float* x, int64_t ldx, int precision, int first_row, int count) {
    ActKind kinds[3];
    int source[3];  // the first weight whose prepared activations serve this one too
    for (int i = 0; i < n; i++) {
      kinds[i] = act_kind(*list[i].w, precision);
      source[i] = i;
      for (int j = i - 1; j >= 0; j--) {
        if (same_input(*list[i].w, kinds[i], *list[j].w, kinds[j])) source[i] = source[j];
      }
      if (source[i] != i) continue;
      const Acts acts = lane.acts[i].view(*list[i].w);
      for (int64_t r = std::max<int64_t>(rows.first, first_row); r < std::min<int64_t>(rows.last, first_row + count); r++) {
        kernels.prepare(*list[i].w, kinds[i], per_token(precision), x + r * ldx, order_scratch(), acts, r - first_row);
      }
    }
    if (!single) barrier.wait();
    for (int i = 0; i < n; i++) {
      const Linear& w = *list[i].w;
      const Share tiles(w.tiles, id, threads);
      const Acts acts = lane.acts[source[i]].view(w);
      kernels.linear[w.kind][kinds[i]](w, acts, count, list[i].y, list[i].ldy, tiles.first, tiles.last);
    }
  }

  // ---- the parts of a block -----------------------------------------------------------------------------------

  void embed(const int32_t* ids) {
    for (int64_t r = rows.first; r < rows.last; r++) {
      float* x = lane.x + r * m.hidden16_;
      if (m.embed_packed_) {
        unpack_row(m.embed_, ids[r], x);
      } else {
        const int64_t size = m.c_.embed_type == QK_F32 ? 4 : 2;
        const uint8_t* row = static_cast<const uint8_t*>(m.c_.embed_table) + ids[r] * int64_t{m.c_.hidden} * size;
        kernels.load(row, m.c_.embed_type, x, m.c_.hidden);
      }
      if (m.c_.embed_scale != 1.0f) kernels.scale(x, m.c_.embed_scale, static_cast<int>(m.hidden16_));
    }
  }

  void norm_rows(const float* weight) {
    for (int64_t r = rows.first; r < rows.last; r++) norm(lane.x + r * m.hidden16_, weight, lane.normed + r * m.hidden16_);
  }

  void norm(const float* x, const float* weight, float* y) { kernels.rmsnorm(x, weight, m.c_.eps, m.c_.hidden, y); }

  // x += proj, or its norm where the architecture has one behind the sublayer
  void add_rows(const float* post_norm) {
    for (int64_t r = rows.first; r < rows.last; r++) {
      const float* y = m.proj_ + r * m.hidden16_;
      if (post_norm) {
        norm(y, post_norm, lane.normed + r * m.hidden16_);
        y = lane.normed + r * m.hidden16_;
      }
      kernels.add(lane.x + r * m.hidden16_, y, static_cast<int>(m.hidden16_));
    }
  }

  // Norm (if any) and rotary embedding of one head, in place. Rotated halves: dimensions i and i + rotary_dim / 2.
  void turn(float* head, const float* norm_weight, const Block& b, int64_t at) {
    if (norm_weight) kernels.rmsnorm(head, norm_weight, m.c_.eps, m.c_.head_dim, head);
    const int half = m.c_.rotary_dim / 2;
    const float *cos = b.cos + at * half, *sin = b.sin + at * half;
    for (int i = 0; i < half; i++) {
      const float low = head[i], high = head[i + half];
      head[i] = low * cos[i] - high * sin[i];
      head[i + half] = high * cos[i] + low * sin[i];
    }
  }

  void append(Block& b, int64_t row, int64_t head) {
    const int64_t at = row * m.kv_width_ + head * m.c_.head_dim;
    turn(m.k_ + at, b.k_norm, b, position + row);
    kernels.kv_append(m.c_.cache, b.cache.head(head), position + row, m.k_ + at, m.v_ + at, m.c_.head_dim);
  }

  // The query heads of one kv head against tokens [from, to). The queries are copied first: other threads read them.
  void attend(const Block& b, int64_t row, int64_t head, int64_t from, int64_t to, Partial* out) {
    const int dim = m.c_.head_dim, count = m.group_ * dim;
    memcpy(query(), m.q_ + row * m.q_width_ + head * count, sizeof(float) * static_cast<size_t>(count));
    for (int r = 0; r < m.group_; r++) turn(query() + r * dim, b.q_norm, b, position + row);
    kernels.scale(query(), m.c_.attn_scale, count);
    for (int r = 0; r < m.group_; r += kMaxQueryRows) {
      kernels.attend(m.c_.cache, b.cache.head(head), query() + r * dim, std::min(kMaxQueryRows, m.group_ - r), dim, from,
                     to, out + r);
    }
  }

  int64_t first_visible(const Block& b, int64_t at) const {
    return b.window ? std::max<int64_t>(0, at - b.window + 1) : 0;
  }

  // One token: the blocks of 16 tokens of all kv heads are dealt out evenly, so a head may be split; whoever has a
  // head's last block appends the new token to it first.
  void attend_one(Block& b) {
    const int dim = m.c_.head_dim;
    const int64_t from = first_visible(b, position), to = position + 1;
    const int64_t block0 = from / 16, blocks = (to + 15) / 16 - block0;
    Partial* mine = &m.partials_[static_cast<size_t>(id * m.c_.heads)];
    for (int h = 0; h < m.c_.heads; h++) mine[h].sum = 0.0f;
    const Share share(blocks * m.c_.kv_heads, id, threads);
    for (int64_t i = share.first; i < share.last;) {
      const int64_t head = i / blocks, end = std::min(share.last, (head + 1) * blocks);
      const int64_t first = (block0 + i - head * blocks) * 16, last = (block0 + end - head * blocks) * 16;
      if (end == (head + 1) * blocks) append(b, 0, head);
      attend(b, 0, head, std::max(from, first), std::min(to, last), mine + head * m.group_);
      i = end;
    }
    barrier.wait();
    for (int h = 0; h < m.c_.heads; h++) {
      kernels.merge(&m.partials_[static_cast<size_t>(h)], m.c_.heads, threads, dim, lane.attn + h * dim);
    }
  }

  void attend_many(Block& b) {
    const int dim = m.c_.head_dim;
    const int64_t units = int64_t{tokens} * m.c_.kv_heads;
    for (int64_t u = id; u < units; u += threads) append(b, u / m.c_.kv_heads, u % m.c_.kv_heads);
    barrier.wait();
    for (int64_t u = id; u < units; u += threads) {  // dealt in turn: later tokens see more
      const int64_t row = u / m.c_.kv_heads, head = u % m.c_.kv_heads, at = position + row;
      attend(b, row, head, first_visible(b, at), at + 1, scratch.partials.data());
      for (int r = 0; r < m.group_; r++) {
        kernels.merge(&scratch.partials[static_cast<size_t>(r)], 1, 1, dim,
                      lane.attn + row * m.q_width_ + (head * m.group_ + r) * dim);
      }
    }
    barrier.wait();
  }

  void gated(const Block& b) {  // each thread has the same tiles of gate and up, so it can multiply them at once
    const Share tiles(b.gate.tiles, id, threads);
    const int64_t c0 = tiles.first * 16;
    const int n = static_cast<int>((tiles.last - tiles.first) * 16);
    for (int64_t r = 0; r < tokens; r++) {
      const int64_t at = r * m.inner16_ + c0;
      kernels.glu(m.c_.activation, m.gate_ + at, m.up_ + at, m.inner_ + at, n);
    }
  }

  void block(Block& b) {
    const int precision = m.c_.precision;
    norm_rows(b.input_norm);
    const Projection qkv[] = {{&b.q, m.q_, m.q_width_}, {&b.k, m.k_, m.kv_width_}, {&b.v, m.v_, m.kv_width_}};
    project(qkv, 3, lane.normed, m.hidden16_, precision, 0, tokens);
    barrier.wait();
    single ? attend_one(b) : attend_many(b);
    const Projection o{&b.o, m.proj_, m.hidden16_};
    project(&o, 1, lane.attn, m.q_width_, precision, 0, tokens);
    barrier.wait();
    add_rows(b.attn_post_norm);
    norm_rows(b.mlp_norm);
    const Projection gate_up[] = {{&b.gate, m.gate_, m.inner16_}, {&b.up, m.up_, m.inner16_}};
    project(gate_up, 2, lane.normed, m.hidden16_, precision, 0, tokens);
    gated(b);
    barrier.wait();
    const Projection down{&b.down, m.proj_, m.hidden16_};
    project(&down, 1, m.inner_, m.inner16_, precision, 0, tokens);
    barrier.wait();
    add_rows(b.mlp_post_norm);
  }

  // Logits of the last `count` rows; copies them out and finds the largest of the last row.
  void head(int count, float* logits) {
    norm_rows(m.c_.final_norm);
    const Projection head{&m.head_, m.logits_, m.vocab16_};
    project(&head, 1, lane.normed, m.hidden16_, m.c_.head_precision, tokens - count, count);
    const Share tiles(m.head_.tiles, id, threads);
    const int64_t c0 = tiles.first * 16, c1 = std::min<int64_t>(tiles.last * 16, m.c_.vocab), n = std::max<int64_t>(0, c1 - c0);
    for (int r = 0; logits && r < count; r++) {
      memcpy(logits + r * int64_t{m.c_.vocab} + c0, m.logits_ + r * m.vocab16_ + c0, sizeof(float) * static_cast<size_t>(n));
    }
    const int best = kernels.argmax(m.logits_ + (count - 1) * m.vocab16_ + c0, static_cast<int>(n));
    m.best_[static_cast<size_t>(id)] = best < 0 ? -1 : best + static_cast<int>(c0);
  }
};

void Model::forward_chunk(const int32_t* ids, int tokens, int64_t position, int head_rows, float* logits) {
  if (head_rows > 1) logits_ = logits_buffer_.reserve_of<float>(head_rows * vocab16_);
  run_team_on([&](int id, int threads, Barrier& barrier) {
    Pass pass(*this, tokens, position, id, threads, barrier);
    pass.embed(ids);
    for (auto& b : blocks_) pass.block(*b);
    if (head_rows) pass.head(head_rows, logits);
  });
  if (!head_rows) return;
  const float* last = logits_ + (head_rows - 1) * vocab16_;
  argmax_ = 0;
  for (int best : best_) {
    if (best >= 0 && last[best] > last[argmax_]) argmax_ = best;
  }
}

void Model::forward(const int32_t* ids, int tokens, int64_t position, bool all, float* logits) {
  for (int done = 0; done < tokens;) {
    const int count = std::min(c_.chunk, tokens - done);
    const bool last = done + count == tokens;
    float* out = logits && all ? logits + int64_t{done} * c_.vocab : logits;
    forward_chunk(ids + done, count, position + done, all ? count : last ? 1 : 0, out);
    done += count;
  }
}

namespace {

const char* config_fault(const qk_model_config& c) {
  if (c.heads % c.kv_heads) return "the number of heads must be a multiple of the number of kv heads";
  if (c.head_dim % 16 || c.head_dim > kMaxHeadDim) return "head_dim must be a multiple of 16, up to 256";
  if (c.rotary_dim % 2 || c.rotary_dim > c.head_dim) return "rotary_dim must be even and at most head_dim";
  if (c.hidden % 16) return "the hidden size must be a multiple of 16";
  if (c.capacity < 1 || c.chunk < 1) return "capacity and chunk must be positive";
  if (!c.embed_table && !c.embed.data) return "there is no embedding";
  return nullptr;
}

int forward_fault(const Model& m, const int32_t* ids, int32_t tokens, int32_t position) {
  const qk_model_config& c = m.config();
  if (tokens < 1 || position < 0) return fail("a forward pass needs at least one token and a position of 0 or more");
  if (int64_t{position} + tokens > c.capacity) {
    return fail("position %d + %d tokens exceeds the cache of %d tokens", position, tokens, c.capacity);
  }
  for (int32_t i = 0; i < tokens; i++) {
    if (ids[i] < 0 || ids[i] >= c.vocab) return fail("token id %d is outside the vocabulary of %d", ids[i], c.vocab);
  }
  return 0;
}

}  // namespace
}  // namespace qk

QK_API void* qk_model_create(const qk_model_config* config) {
  if (const char* fault = qk::config_fault(*config)) return qk::fail("%s", fault), nullptr;
  try {
    return new qk::Model(*config);
  } catch (const std::bad_alloc&) {
    return qk::fail("not enough memory for the cache of %d tokens", config->capacity), nullptr;
  }
}

QK_API void qk_model_free(void* model) { delete static_cast<qk::Model*>(model); }

QK_API int qk_model_forward(void* model, const int32_t* ids, int32_t tokens, int32_t position, int32_t all, float* logits) {
  qk::Model& m = *static_cast<qk::Model*>(model);
  if (int fault = qk::forward_fault(m, ids, tokens, position)) return fault;
  m.forward(ids, tokens, position, all != 0, logits);
  return 0;
}

QK_API int32_t qk_model_argmax(void* model) { return static_cast<qk::Model*>(model)->argmax(); }

QK_API int qk_model_generate(void* model, int32_t first, int32_t position, int32_t count, const int32_t* stops,
                             int32_t stop_count, int32_t* out, double* seconds) {
  using Clock = std::chrono::steady_clock;
  qk::Model& m = *static_cast<qk::Model*>(model);
  int32_t id = first;
  for (int32_t i = 0; i < count; i++) {
    const auto start = Clock::now();
    if (qk::forward_fault(m, &id, 1, position + i)) return -1;
    m.forward(&id, 1, position + i, false, nullptr);
    out[i] = id = m.argmax();
    if (seconds) seconds[i] = std::chrono::duration<double>(Clock::now() - start).count();
    if (std::find(stops, stops + stop_count, id) != stops + stop_count) return i + 1;
  }
  return count;
}

QK_API int64_t qk_model_cache_bytes(const void* model) { return static_cast<const qk::Model*>(model)->cache_bytes(); }
