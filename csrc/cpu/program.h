// A model's step as data: the kernel calls that the model made while it was recorded, over fixed addresses. A run plans
// each call for the rows of its step and gives all of them to the thread pool at once. Used by module.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launch.h"

namespace octavo {

class Program {
  public:
    using Args =
        std::variant<LinearArgs, EmbeddingArgs, TakeRowsArgs, NormArgs, RotaryArgs, AttentionArgs, ArgmaxArgs,
                     ActivationArgs, AddArgs, RouteArgs, ExpertsArgs, MultiplyArgs, ConvArgs, ScanArgs, DeltaArgs,
                     ShrinkArgs, PoolArgs, HeadLinearArgs, ExchangeArgs, ReplaceRowsArgs, RecurrenceArgs, ChooseArgs>;

    Program() = default;
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // Returns the program into which this thread's calls are recorded instead of being run, or null.
    // octavo.ops.cpu_program calls this; no other state tells it.
    static Program* recording();
    static void stop_recording();
    // Begins to record this thread's calls. They have as many rows as a step has tokens or, with `per_sample`, rows
    // whose logits are wanted. Throws std::logic_error if a program is being recorded.
    void record(bool per_sample);

    // Adds a call.
    void add(const Args& args);
    // Runs a step. The arrays that the recorded calls read must hold this step's values. Throws std::out_of_range for a
    // token id, position or slot out of range; std::invalid_argument for lengths that contradict each other and for
    // more rows than were recorded.
    void run(int64_t tokens, int32_t seqs, int64_t samples);
    // Runs a step call by call. Returns each call's name and its nanoseconds.
    std::vector<std::pair<std::string, double>> profile(int64_t tokens, int32_t seqs, int64_t samples);

    size_t size() const { return calls_.size(); }

  private:
    struct Call {
        Args args;
        bool per_sample;
        int64_t recorded_rows;
        AttentionPlan* attention;              // of an attention call: shared by layers with one plan
        std::unique_ptr<ExpertsPlan> experts;  // of a call of experts
        AdapterPlan* adapters;                 // of a call for adapters: shared by calls that read the same slots
    };
    void plan(int64_t tokens, int32_t seqs, int64_t samples);

    std::vector<Call> calls_;
    std::vector<std::unique_ptr<AttentionPlan>> attention_plans_;
    std::vector<std::unique_ptr<AdapterPlan>> adapter_plans_;
    ExpertsScratch experts_scratch_;
    std::vector<Launch> launches_;
    std::vector<const char*> names_;
    const Group* group_ = nullptr;  // the processes that its calls exchange rows with
};

}  // namespace octavo
