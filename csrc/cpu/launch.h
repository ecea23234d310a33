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
// each costs a nanosecond. Most operations have no indices.
template <class Args>
void check(const Args&) {}
void check(const LinearArgs& args);
void check(const ShrinkArgs& args);
void check(const EmbeddingArgs& args);
void check(const ExpertsArgs& args);
void check(const TakeRowsArgs& args);
void check(const ReplaceRowsArgs& args);
void check(const RotaryArgs& args);
void check(const PoolArgs& args);
void check(const MaskArgs& args);
void check(const LogSumArgs& args);
void check(const RankArgs& args);
void check(const ConvArgs& args);
void check(const ScanArgs& args);
void check(const DeltaArgs& args);
void check(const RecurrenceArgs& args);

Launch plan(PackArgs& args, const KernelTable& table, int threads);
Launch plan(LinearArgs& args, const KernelTable& table, int threads);
Launch plan(HeadLinearArgs& args, const KernelTable& table, int threads);
Launch plan(EmbeddingArgs& args, const KernelTable& table, int threads);
Launch plan(TakeRowsArgs& args, const KernelTable& table, int threads);
Launch plan(ReplaceRowsArgs& args, const KernelTable& table, int threads);
Launch plan(PoolArgs& args, const KernelTable& table, int threads);
Launch plan(NormArgs& args, const KernelTable& table, int threads);
Launch plan(ActivationArgs& args, const KernelTable& table, int threads);
Launch plan(AddArgs& args, const KernelTable& table, int threads);
Launch plan(RotaryArgs& args, const KernelTable& table, int threads);
Launch plan(ArgmaxArgs& args, const KernelTable& table, int threads);
Launch plan(SampleArgs& args, const KernelTable& table, int threads);
Launch plan(MaskArgs& args, const KernelTable& table, int threads);
Launch plan(LogSumArgs& args, const KernelTable& table, int threads);
Launch plan(RankArgs& args, const KernelTable& table, int threads);
Launch plan(RouteArgs& args, const KernelTable& table, int threads);
Launch plan(MultiplyArgs& args, const KernelTable& table, int threads);
Launch plan(ConvArgs& args, const KernelTable& table, int threads);
Launch plan(ScanArgs& args, const KernelTable& table, int threads);
Launch plan(DeltaArgs& args, const KernelTable& table, int threads);
Launch plan(RecurrenceArgs& args, const KernelTable& table, int threads);
Launch plan(ChooseArgs& args, const KernelTable& table, int threads);
// By plans of this thread, which are good until the next of its calls.
Launch plan(ShrinkArgs& args, const KernelTable& table, int threads);
Launch plan(AttentionArgs& args, const KernelTable& table, int threads);

// Memory that calls of experts share, each while it runs. It grows to what the calls that were planned need.
class ExpertsScratch {
  public:
    ExpertsScratch() = default;
    ExpertsScratch(const ExpertsScratch&) = delete;
    ExpertsScratch& operator=(const ExpertsScratch&) = delete;

    void reserve(size_t entries, size_t parts, size_t input_bytes, size_t inner_bytes);
    // For adapters: rows that they have shrunk, and those that tasks copy.
    void reserve_adapters(size_t shrunk_bytes, size_t copy_bytes);
    ExpertsSchedule* schedule() { return &schedule_; }

  private:
    struct alignas(64) Line {
        char bytes[64];
    };
    ExpertsSchedule schedule_{};
    std::vector<int32_t> entries_, tokens_, slots_;
    std::vector<float> weights_;
    std::vector<ExpertRows> parts_;
    std::vector<Line> inputs_, inner_, shrunk_, copies_;
};

// A call's passes over its tokens, and the launches that they are with their names: four each, and two more where
// tokens have adapters. What they point to lives as long as this, the arguments and the scratch memory.
class ExpertsPlan {
  public:
    void plan(const ExpertsArgs& args, const KernelTable& table, int threads, ExpertsScratch& scratch);
    const std::vector<Launch>& launches() const { return launches_; }
    const std::vector<const char*>& names() const { return names_; }

  private:
    void add(const char* name, const Launch& launch);

    std::vector<ExpertsPass> passes_;
    std::vector<Launch> launches_;
    std::vector<const char*> names_;
};

// Rows of scratch that calls of ShrinkArgs for `rows` rows need.
int64_t shrink_scratch_rows(int64_t rows);
// For keys that are shared out among threads.
int64_t choose_scratch_rows();

// A step's rows in the order of their adapters: planned once for all calls that read the same slots.
class AdapterPlan {
  public:
    AdapterPlan() = default;
    AdapterPlan(const AdapterPlan&) = delete;
    AdapterPlan& operator=(const AdapterPlan&) = delete;

    // Reads the slots of `args`, nothing else.
    void plan(const ShrinkArgs& args, int threads);
    // One call over what was planned. Without tasks nobody has an adapter.
    Launch launch(ShrinkArgs& args, const KernelTable& table) const;

  private:
    AdapterSchedule schedule_{};
    std::vector<int32_t> rows_;
    std::vector<AdapterRows> parts_;
};

// The attention tasks of a step and the memory that they share. Planned once a step, from lengths alone, then launched
// for every layer; memory is kept from step to step, so that a decode step allocates nothing. The schedule that the
// arguments point to has a fixed address: arguments that were filled in once stay good for every later plan.
class AttentionPlan {
  public:
    AttentionPlan() = default;
    AttentionPlan(const AttentionPlan&) = delete;
    AttentionPlan& operator=(const AttentionPlan&) = delete;

    // Reads the lengths, the head counts, the sizes and the window in `args`, no tensors. Throws std::invalid_argument
    // where lengths and tables contradict each other.
    void plan(const AttentionArgs& args, int threads);
    // One call over what was planned. Launches of one plan may follow each other but not overlap.
    Launch launch(AttentionArgs& args, const KernelTable& table) const;

  private:
    struct CostedTask {
        double cost_ns;
        int64_t first, end;  // Keys that its rows see.
        AttentionTask task;
    };
    void share_out(const AttentionArgs& args, int threads);

    AttentionSchedule schedule_{};
    double cost_ns_ = 0;
    std::vector<CostedTask> costed_;
    std::vector<AttentionTask> tasks_;
    std::vector<AttentionSplit> splits_;
    std::vector<int32_t> remaining_;
    std::vector<float> partials_;
};

}  // namespace octavo
