// The finaliser of splitmix64, as randomness._mix has it.
extern "C" __global__ void mix(const unsigned long long* from, unsigned long long* to, long long total) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= total) return;
  unsigned long long x = from[i];
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  to[i] = x ^ (x >> 31);
}
