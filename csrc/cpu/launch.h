// How a kernel call is cut into tasks. A plan_* function fills in the planned fields of an argument struct and returns
// a Launch: the whole call as plain data, which can be run now (thread_pool.h) or stored and replayed.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace octavo {

struct Launch {
    Kernel kernel;
    const void* args;
    int64_t num_tasks;
    // A rough time on one thread: decides whether it pays to wake others and to let go of the interpreter lock.
    double cost_ns;
};

Launch plan_pack(PackArgs& args);
Launch plan_linear(const KernelTable& table, LinearArgs& args, int threads);
Launch plan_embedding(const KernelTable& table, EmbeddingArgs& args);
Launch plan_norm(const KernelTable& table, NormArgs& args, int threads);
Launch plan_rotary(const KernelTable& table, RotaryArgs& args, int threads);
Launch plan_silu(const KernelTable& table, SiluArgs& args, int threads);
Launch plan_argmax(const KernelTable& table, ArgmaxArgs& args, int64_t rows);
Launch plan_sample(const KernelTable& table, SampleArgs& args, int64_t rows);

// The tasks of one attention call and the memory that they share. Reused from call to call, so that a decode step
// allocates nothing.
class AttentionPlan {
  public:
    // Throws std::invalid_argument where lengths and tables contradict each other.
    Launch plan(const KernelTable& table, AttentionArgs& args, int64_t max_blocks, int threads);

  private:
    struct CostedTask {
        int64_t cost;
        AttentionTask task;
    };
    std::vector<CostedTask> costed_;
    std::vector<AttentionTask> tasks_;
    std::vector<AttentionSplit> splits_;
    std::vector<int32_t> remaining_;
    std::vector<float> partials_;
};

}  // namespace octavo
