// Multiplies in TensorFloat-32.
// mma.m16n8k8: lane = 4 g + t holds A[g | g+8][t | t+4], B[t | t+4][g], D[g | g+8][2t | 2t+1].
__device__ __forceinline__ unsigned rounded(float x) {  // to TensorFloat-32
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void mma(float (&d)[4], float a0, float a1, float a2, float a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(rounded(a0)), "r"(rounded(a1)), "r"(rounded(a2)), "r"(rounded(a3)), "r"(b0), "r"(b1));
}
