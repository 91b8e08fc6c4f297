"""Kernels for test_interpreter.py: right ones, and one change to them that makes each wrong.

All take `const float* from, float* to` with 64 threads; those of clusters, two CTAs of them.
"""

WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
SUM = """
  extern __shared__ float held[];
  held[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 64; ++i) sum += held[i];
  to[threadIdx.x] = sum;
"""
COPY = """
  __shared__ float4 held[64];
  unsigned place = __cvta_generic_to_shared(held + threadIdx.x);
  if (threadIdx.x < 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place),
                 "l"(from + 4 * threadIdx.x) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  to[threadIdx.x] = held[threadIdx.x / 4].x;
"""
CLUSTER_BARRIER = """
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
"""
# The place of `mine` in the other CTA of the cluster.
OTHER = """
  unsigned rank, other;
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(other) : "r"((unsigned)__cvta_generic_to_shared(&mine)), "r"(rank ^ 1));
"""
CLUSTER = f"""
  __shared__ float mine;
  {OTHER} {CLUSTER_BARRIER}
  if (threadIdx.x == 0) {{
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(other), "f"(from[rank]) : "memory");
  }}
  {CLUSTER_BARRIER}
  to[blockIdx.x * 64 + threadIdx.x] = mine;
"""
SEND = f"""
  __shared__ float4 mine;
  __shared__ unsigned long long barrier;
  unsigned place = __cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(place) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" :: "r"(place)
                 : "memory");
  }}
  {OTHER} {CLUSTER_BARRIER}
  if (threadIdx.x == 0) {{
    unsigned signal;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(signal) : "r"(place), "r"(rank ^ 1));
    float x = from[rank];
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], "
                 "{{%1, %1, %1, %1}}, [%2];" :: "r"(other), "f"(x), "r"(signal) : "memory");
  }}
  asm volatile("{{ .reg .pred done; again: "
               "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0; "
               "@!done bra again; }}" :: "r"(place) : "memory");
  to[blockIdx.x * 64 + threadIdx.x] = mine.w;
"""
GOOD = {"sum": SUM, "copy": COPY, "cluster": CLUSTER, "send": SEND}

MISALIGNED = "reinterpret_cast<const float2*>(from + 1)->x"
MISALIGNED += " + reinterpret_cast<const float2*>(from + 1)->y"
HALF = "if (threadIdx.x < 32) __syncthreads(); to["
ODD = "if (threadIdx.x % 2) __syncthreads(); to["
SHUFFLE = "float sum = 0; if (threadIdx.x % 2) sum = __shfl_sync(0xaaaaaaaa, sum, 0);"
UNKNOWN = 'asm("sin.approx.f32 %0, %0;" : "+f"(sum))'
BAD = {  # what it is made from, what is replaced by what, and what is said of it
    "past the end": ("sum", "from[threadIdx.x]", "from[threadIdx.x + 4]", "there is no memory"),
    "before the start": ("sum", "to[threadIdx.x]", "to[threadIdx.x - 1]", "a store of 4 bytes at"),
    "a store to an input": ("sum", "to[threadIdx.x]", "const_cast<float*>(from)[1]", "the input"),
    "misaligned": ("sum", "from[threadIdx.x]", MISALIGNED, "misaligned"),
    "not all written": ("sum", "to[", "if (threadIdx.x != 9) to[", "written byte 36 of result"),
    "no wait for other kernels": ("sum", WAIT, "", "before griddepcontrol.wait"),
    "no barrier": ("sum", "__syncthreads();", "", "in a race"),
    "a barrier of the warp": ("sum", "__syncthreads();", "__syncwarp();", "in a race"),
    "a barrier for half": ("sum", "to[", HALF, "wait for ever"),
    "a barrier in a branch": ("sum", "to[", ODD, "wait for ever"),
    "past shared memory": ("sum", "held[i]", "held[i + 1]", "outside of its variables"),
    "a shuffle of fewer": ("sum", "float sum = 0;", SHUFFLE, "takes no part"),
    "an unknown instruction": ("sum", "sum += held[i]", UNKNOWN, "sin.*does not know"),
    "a copy not awaited": ("copy", "wait_group 0", "wait_group 1", "has not arrived"),
    "a copy of another thread": ("copy", "__syncthreads();", "", "has not arrived|in a race"),
    "a copy to nowhere": ("copy", "(held + threadIdx.x)", "(held + 60)", "outside|in a race"),
    "no first barrier": ("send", CLUSTER_BARRIER, "", "no mbarrier|is not there"),
    "no last barrier": ("cluster", f"{CLUSTER_BARRIER}\n  to", "  to", "in a race|which has ended"),
    "no such CTA": ("cluster", "rank ^ 1", "rank + 1", "in CTA 2 of a cluster of 2"),
    "a wait in vain": ("send", "[%0], 16;", "[%0], 32;", "wait for ever"),
    "an access to a barrier": ("send", "mine.w", "*(float*)&barrier", "a barrier"),
}
