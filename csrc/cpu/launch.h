// How a kernel call becomes tasks. plan() fills in the planned fields of an argument struct and returns a Launch: the
// whole call as plain data, which can be run now (thread_pool.h) or stored and replayed (program.h). Called by
// module.cpp and program.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace octavo {

struct Launch {
    Kernel kernel;
    const void* args;
    int64_t num_tasks;
    // A rough time on one thread. It decides whether to wake other threads and whether to let go of the interpreter
    // lock.
    double cost_ns;
};

// Throws std::out_of_range for an index out of range, with which a kernel would read or write other memory. Checking an
// index takes a nanosecond. Most operations have no indices.
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
// These use a plan of the calling thread: the Launch is valid until the thread's next call of the same function.
Launch plan(ShrinkArgs& args, const KernelTable& table, int threads);
Launch plan(AttentionArgs& args, const KernelTable& table, int threads);

// Memory that calls of experts share, one call at a time. It grows to the largest need of all calls that were planned.
class ExpertsScratch {
  public:
    ExpertsScratch() = default;
    ExpertsScratch(const ExpertsScratch&) = delete;
    ExpertsScratch& operator=(const ExpertsScratch&) = delete;

    void reserve(size_t entries, size_t parts, size_t input_bytes, size_t inner_bytes);
    // Memory for adapters: the rows that they have shrunk, and the rows that tasks copy.
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

// A call of experts: its passes over the tokens, and their launches with names, four a pass and up to two more where
// tokens have adapters. The launches point to this object, to the arguments and to the scratch memory, so all of these
// must outlive them.
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

// Returns how many rows of scratch a call of ShrinkArgs for `rows` rows needs.
int64_t shrink_scratch_rows(int64_t rows);
// Returns how many rows of scratch a call of ChooseArgs needs to share keys out among threads.
int64_t choose_scratch_rows();

// A step's rows in the order of their adapters, planned once for all calls that read the same slots.
class AdapterPlan {
  public:
    AdapterPlan() = default;
    AdapterPlan(const AdapterPlan&) = delete;
    AdapterPlan& operator=(const AdapterPlan&) = delete;

    // Plans the rows. Reads nothing but the slots of `args`.
    void plan(const ShrinkArgs& args, int threads);
    // Returns the launch of one call. It has no tasks if no row has an adapter.
    Launch launch(ShrinkArgs& args, const KernelTable& table) const;

  private:
    AdapterSchedule schedule_{};
    std::vector<int32_t> rows_;
    std::vector<AdapterRows> parts_;
};

// The attention tasks of a step and the memory that they share. A step plans once, from lengths alone, and launches for
// every layer. Memory is kept from step to step, so a decode step allocates nothing. The schedule that arguments point
// to has a fixed address: arguments that were filled in once stay valid for every later plan.
class AttentionPlan {
  public:
    AttentionPlan() = default;
    AttentionPlan(const AttentionPlan&) = delete;
    AttentionPlan& operator=(const AttentionPlan&) = delete;

    // Plans a step. Reads the lengths, head counts, sizes and the window of `args`, no tensors. Throws
    // std::invalid_argument if lengths and block tables contradict each other.
    void plan(const AttentionArgs& args, int threads);
    // Returns the launch of one call. Launches of one plan may follow each other but must not overlap.
    Launch launch(AttentionArgs& args, const KernelTable& table) const;

  private:
    struct CostedTask {
        double cost_ns;
        int64_t first, end;  // The keys [first, end) that its rows see.
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
