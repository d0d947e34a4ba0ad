// How blocks share the work of all clients, in units, and where they leave the sums of a client that several share.
//
// Block b has units [first_unit(b), first_unit(b + 1)). Its sums for client c are part b + c: from one part to the next
// b or c grows, or both, so no two parts coincide, and the parts of a client follow each other.

typedef long long int64;

__device__ __forceinline__ int64 first_unit(int64 block, int64 blocks, int64 units) { return units * block / blocks; }

__device__ __forceinline__ int64 block_of(int64 unit, int64 blocks, int64 units) {
  return ((unit + 1) * blocks - 1) / units;
}
