// Collectives of processes on one host: all of them contribute rows of float32 through shared memory. They take no
// locks. Sums are in an order that only the number of ranks decides, so every process has the same bits in every run.
// Used by module.cpp and program.cpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "launch.h"

namespace octavo {

// One process's view of a group. All processes exchange the same rows in the same order. Exchanges use two halves of
// the memory in turns: before a process writes to a half again, all others have finished reading it.
class Group {
  public:
    // This process is `rank` of `size`. `memory`, of `num_bytes`, is shared by all and must be zeros before the first
    // process comes. `watched` are this process's connections to others, if any: when one is closed, all waits end.
    Group(int rank, int size, void* memory, size_t num_bytes, std::vector<int> watched);

    int rank() const { return rank_; }
    int size() const { return size_; }
    // Returns how many floats an exchange may put, over all processes.
    int64_t capacity() const { return static_cast<int64_t>(half_floats_); }
    // Returns whether another process has ended: then the results of the last exchanges mean nothing.
    bool is_broken() const { return is_broken_.load(std::memory_order_acquire); }

  private:
    friend void put_rows(const void* args, int64_t task);
    friend void collect_rows(const void* args, int64_t task);

    float* half() const { return floats_ + static_cast<size_t>(turn_ & 1) * half_floats_; }
    void arrive();
    void wait_for_all();
    bool has_hung_up() const;

    const int rank_, size_;
    const std::vector<int> watched_;
    std::atomic<uint64_t>* arrivals_;  // by rank, a cache line each: exchanges for which it has put its rows
    float* floats_;
    size_t half_floats_;
    uint64_t turn_ = 0;                   // the number of the exchange; changes after its last launch
    std::atomic<int64_t> tasks_done_{0};  // of the running launch
    std::atomic<bool> is_broken_{false};
};

// Returns the launches of one exchange: rows are put, then collected once all processes have put theirs. Throws
// std::invalid_argument if they are more than the group's capacity.
std::vector<Launch> plan_exchange(ExchangeArgs& args, int threads);

// Throws std::runtime_error if a process of the group has ended.
void check_group(const Group& group);

}  // namespace octavo
