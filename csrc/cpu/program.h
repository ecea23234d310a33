// A model's step as data: the kernel calls that the model made when it was recorded, over fixed addresses. Running it
// plans each call for the rows of the step at hand and hands all of them to the thread pool at once.
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

    // The program that calls of this thread are recorded into instead of being run, or null. There is no other notion
    // of it: octavo.ops.cpu_program asks here.
    static Program* recording();
    static void stop_recording();
    // The calls that follow have as many rows as a step has tokens, or rows whose logits are wanted.
    void record(bool per_sample);

    void add(const Args& args);
    // Runs the step. The arrays that the recorded calls read must hold this step's values. Throws std::out_of_range for
    // a token id, position or slot that points nowhere, std::invalid_argument for lengths that contradict each other
    // and for more rows than were recorded.
    void run(int64_t tokens, int32_t seqs, int64_t samples);
    // The same, call by call: the name of each and its nanoseconds.
    std::vector<std::pair<std::string, double>> profile(int64_t tokens, int32_t seqs, int64_t samples);

    size_t size() const { return calls_.size(); }

  private:
    struct Call {
        Args args;
        bool per_sample;
        int64_t recorded_rows;
        AttentionPlan* attention;              // of an attention call: shared with the layers that look alike
        std::unique_ptr<ExpertsPlan> experts;  // of a call of experts
        AdapterPlan* adapters;                 // of a call for adapters: shared by those that read the same slots
    };
    void plan(int64_t tokens, int32_t seqs, int64_t samples);

    std::vector<Call> calls_;
    std::vector<std::unique_ptr<AttentionPlan>> attention_plans_;
    std::vector<std::unique_ptr<AdapterPlan>> adapter_plans_;
    ExpertsScratch experts_scratch_;
    std::vector<Launch> launches_;
    std::vector<const char*> names_;
    const Group* group_ = nullptr;  // that its calls exchange rows with
};

}  // namespace octavo
