// Eight neighbouring numbers, which a thread loads and stores at once, as floats. In memory they are bfloat16 where BF16
// is set, and float32 otherwise; they begin at a multiple of 16 bytes.

struct Eight {
  float v[8];
};

#if BF16
typedef unsigned short Number;

__device__ __forceinline__ float number(Number bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ __forceinline__ Number rounded(float x) {
  Number bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ Eight load(const Number* from) {
  const uint4 bits = *(const uint4*)from;
  const unsigned pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  Eight e;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    e.v[2 * i] = __uint_as_float(pairs[i] << 16);
    e.v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
  return e;
}

__device__ __forceinline__ void store(Number* to, const Eight& e) {
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(e.v[2 * i + 1]), "f"(e.v[2 * i]));
  *(uint4*)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
#else
typedef float Number;

__device__ __forceinline__ float number(Number x) { return x; }

__device__ __forceinline__ Number rounded(float x) { return x; }

__device__ __forceinline__ Eight load(const Number* from) {
  const float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ void store(Number* to, const Eight& e) {
  *(float4*)to = make_float4(e.v[0], e.v[1], e.v[2], e.v[3]);
  *(float4*)(to + 4) = make_float4(e.v[4], e.v[5], e.v[6], e.v[7]);
}
#endif

__device__ __forceinline__ Eight load_floats(const float* from) {
  Eight e;
#pragma unroll
  for (int j = 0; j < 8; j++) e.v[j] = from[j];
  return e;
}
