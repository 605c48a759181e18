// Growable 64-byte aligned memory, zeroed when it grows; huge pages when it is large.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "layout.h"

namespace qk {

constexpr int64_t kHugePage = 2 << 20;

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data_); }

  // At least `bytes` and one vector more, so that a whole-vector access at the end stays inside.
  void* reserve(int64_t bytes) {
    if (bytes + 64 <= size_) return data_;
    free(data_);
    const int64_t align = bytes >= kHugePage ? kHugePage : 128;
    size_ = round_up(bytes + 64, align);
    data_ = aligned_alloc(static_cast<size_t>(align), static_cast<size_t>(size_));
    if (!data_) throw std::bad_alloc();
    qk_advise_huge(data_, size_);
    memset(data_, 0, static_cast<size_t>(size_));
    return data_;
  }
  template <class T>
  T* reserve_of(int64_t count) {
    return static_cast<T*>(reserve(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace qk
