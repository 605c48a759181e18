// A whole decoder forward pass in one call: Llama, Qwen, Gemma and Mistral shapes.
#pragma once
#include <memory>
#include <vector>

#include "cache.h"
#include "linear.h"
#include "pool.h"

namespace qk {

struct Block {
  Linear q, k, v, o, gate, up, down;
  const float *input_norm, *q_norm, *k_norm, *attn_post_norm, *mlp_norm, *mlp_post_norm;
  const float *cos, *sin;
  int window;
  LayerCache cache;
};

// Rows on their way through the network. With one token every thread keeps a copy of its own and computes the
// (small) norms redundantly, which saves barriers; with several there is one copy and threads share the rows.
struct Lane {
  Buffer x_buffer, normed_buffer, attn_buffer;
  float *x = nullptr, *normed = nullptr, *attn = nullptr;
  ActBuffer acts[3];  // q/k/v may differ in group or order
};

class Model {
 public:
  explicit Model(const qk_model_config& config);
  // See qk_model_forward. The ids are known to be in range and to fit.
  void forward(const int32_t* ids, int tokens, int64_t position, bool all, float* logits);
  int argmax() const { return argmax_; }
  const qk_model_config& config() const { return c_; }
  int64_t cache_bytes() const;

 private:
  struct Pass;  // one forward pass as seen by one thread (model.cpp)

  void fit(Lane& lane, int tokens);
  void forward_chunk(const int32_t* ids, int tokens, int64_t position, int head_rows, float* logits);

  qk_model_config c_;
  int64_t hidden16_, inner16_, q_width_, kv_width_, vocab16_;
  int group_;  // query heads per kv head
  bool embed_packed_;
  Linear embed_, head_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // one per thread
  Lane shared_;
  struct Scratch {
    Buffer query, order;
    std::vector<Partial> partials;
  };
  std::vector<std::unique_ptr<Scratch>> scratch_;  // one per thread
  Buffer q_buffer_, k_buffer_, v_buffer_, proj_buffer_, gate_buffer_, up_buffer_, inner_buffer_, logits_buffer_;
  float *q_, *k_, *v_, *proj_, *gate_, *up_, *inner_, *logits_;
  std::vector<Partial> partials_;  // [thread][head], one-token passes
  std::vector<int> best_;          // [thread]
  int argmax_ = -1;
};

}  // namespace qk
