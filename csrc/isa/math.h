// exp and what follows from it, over sixteen lanes.
#pragma once

namespace qk {
namespace QK_ISA {

// e^x to about 2 ulp (Cephes' polynomial); arguments below -87 give about 1e-38 instead of zero.
QK_INLINE F f_exp(F x) {
  x = f_min(f_max(x, f_set1(-87.0f)), f_set1(88.0f));
  const F n = f_round(f_mul(x, f_set1(1.44269504088896341f)));
  F r = f_fma(n, f_set1(-0.693359375f), x);  // ln 2 in two parts keeps r exact
  r = f_fma(n, f_set1(2.12194440e-4f), r);
  F p = f_set1(1.9875691500e-4f);
  p = f_fma(p, r, f_set1(1.3981999507e-3f));
  p = f_fma(p, r, f_set1(8.3334519073e-3f));
  p = f_fma(p, r, f_set1(4.1665795894e-2f));
  p = f_fma(p, r, f_set1(1.6666665459e-1f));
  p = f_fma(p, r, f_set1(5.0000001201e-1f));
  p = f_fma(f_mul(r, r), p, f_add(r, f_set1(1.0f)));
  return f_ldexp(p, n);
}

QK_INLINE F f_sigmoid(F x) {
  return f_div(f_set1(1.0f), f_add(f_set1(1.0f), f_exp(f_sub(f_zero(), x))));
}

QK_INLINE F f_silu(F x) { return f_mul(x, f_sigmoid(x)); }

// 0.5 (1 + tanh u) is sigmoid(2u).
QK_INLINE F f_gelu_tanh(F x) {
  const F cubic = f_fma(f_mul(f_set1(0.044715f), f_mul(x, x)), x, x);
  return f_mul(x, f_sigmoid(f_mul(f_set1(2.0f * 0.7978845608028654f), cubic)));
}

}  // namespace QK_ISA
}  // namespace qk
