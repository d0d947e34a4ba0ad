// Every kernel calls this first: it may have been launched while kernels before it still run. The next kernel may then be
// launched, too, and waits here in its turn, so that the time of a launch is hidden.
__device__ __forceinline__ void await_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
