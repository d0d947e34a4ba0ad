// The hash behind all random numbers of clients. randomness._mix and cpu_dropout.c have the same.

typedef unsigned long long uint64;

__device__ __forceinline__ uint64 mixed(uint64 x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
