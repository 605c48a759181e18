// Packed weights seen from the engine: checks, pointers, and buffers of prepared activations.
#pragma once
#include "buffer.h"
#include "kernels.h"

namespace qk {

// nullptr when the shape can be packed, else the sentence that says why not.
const char* why_not(const qk_shape& shape);

Linear open(const qk_weight& weight);

// The kind of activations a weight gets under a precision, given what the instruction set offers.
ActKind act_kind(const Linear& w, int precision);
inline bool per_token(int precision) { return precision == QK_INT8_TOKEN; }

// Room for `tokens` rows prepared for any of the linears it was sized by.
class ActBuffer {
 public:
  void fit(const Linear& w, int tokens);  // grow only; call before threads share it
  Acts view(const Linear& w) const;       // row and group strides of this weight
  float* scratch() const { return scratch_; }

 private:
  Buffer codes_, scales_, sums_, scratch_buffer_;
  void* code_data_ = nullptr;
  float *scale_data_ = nullptr, *sum_data_ = nullptr, *scratch_ = nullptr;
};

// Row of W, dequantized: out has cols floats.
void unpack_row(const Linear& w, int row, float* out);

}  // namespace qk
