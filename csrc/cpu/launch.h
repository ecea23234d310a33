// How a kernel call is cut into tasks. plan() fills in the planned fields of an argument struct and returns
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

// Throw std::out_of_range where an index points nowhere: it would read or write someone else's memory, and looking at
// each costs a nanosecond.
void check(const EmbeddingArgs& args);
void check(const TakeRowsArgs& args);
void check(const RotaryArgs& args);

Launch plan(PackArgs& args);
Launch plan(LinearArgs& args, const KernelTable& table, int threads);
Launch plan(EmbeddingArgs& args, const KernelTable& table, int threads);
Launch plan(TakeRowsArgs& args, const KernelTable& table, int threads);
Launch plan(QuantizeArgs& args, const KernelTable& table, int threads);
Launch plan(NormArgs& args, const KernelTable& table, int threads);
Launch plan(RotaryArgs& args, const KernelTable& table, int threads);
Launch plan(ArgmaxArgs& args, const KernelTable& table, int threads);
Launch plan(SampleArgs& args, const KernelTable& table, int threads);

// The tasks of one attention call and the memory that they share. Reused from call to call, so that a decode step
// allocates nothing.
class AttentionPlan {
  public:
    // Throws std::invalid_argument where lengths and tables contradict each other.
    Launch plan(AttentionArgs& args, const KernelTable& table, int threads);

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
