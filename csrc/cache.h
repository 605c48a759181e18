// The key/value cache of one layer.
#pragma once
#include "buffer.h"
#include "kernels.h"

namespace qk {

class LayerCache {
 public:
  void allocate(int cache, int kv_heads, int dim, int64_t capacity) {
    const int64_t tokens = round_up(capacity, 16), element = cache == QK_CACHE_F32 ? 4 : cache == QK_CACHE_BF16 ? 2 : 1;
    head_bytes_ = tokens * dim * element;
    const bool scaled = cache == QK_CACHE_INT8;
    key_scales_ = scaled ? tokens * ((dim + kKeyGroup - 1) / kKeyGroup) : 0;
    value_scales_ = scaled ? tokens : 0;
    k_ = static_cast<uint8_t*>(keys_.reserve(head_bytes_ * kv_heads));
    v_ = static_cast<uint8_t*>(values_.reserve(head_bytes_ * kv_heads));
    k_scale_ = key_scale_buffer_.reserve_of<float>(key_scales_ * kv_heads);
    v_scale_ = value_scale_buffer_.reserve_of<float>(value_scales_ * kv_heads);
    bytes_ = 2 * head_bytes_ * kv_heads + 4 * (key_scales_ + value_scales_) * kv_heads;
  }
  KvHead head(int64_t h) const {
    return {k_ + h * head_bytes_, k_scale_ + h * key_scales_, v_ + h * head_bytes_, v_scale_ + h * value_scales_};
  }
  int64_t bytes() const { return bytes_; }

 private:
  Buffer keys_, values_, key_scale_buffer_, value_scale_buffer_;
  uint8_t *k_ = nullptr, *v_ = nullptr;
  float *k_scale_ = nullptr, *v_scale_ = nullptr;
  int64_t head_bytes_ = 0, key_scales_ = 0, value_scales_ = 0, bytes_ = 0;
};

}  // namespace qk
