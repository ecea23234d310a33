// Collectives of processes on one host: rows of float32 that all of them contribute to, through memory that they share.
// They take no locks, and sums are in an order that only the number of ranks decides, so that every process has the
// same bits in every run.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "launch.h"

namespace octavo {

// One process's view of a group. All of its processes exchange the same rows in the same order. What they put lies in
// one of two halves of the memory, in turns: who puts into a half again has met all others since they read it.
class Group {
  public:
    // Of `size` processes this is `rank`. `memory`, of `num_bytes`, is shared by all and was zeros before the first of
    // them came. `watched` are connections to the other processes, as far as this one has some: if one hangs up,
    // nobody waits for it any more.
    Group(int rank, int size, void* memory, size_t num_bytes, std::vector<int> watched);

    int rank() const { return rank_; }
    int size() const { return size_; }
    // Floats that an exchange may put in all.
    int64_t capacity() const { return static_cast<int64_t>(half_floats_); }
    // Whether another process has ended, so that what came of the last exchanges means nothing.
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
    std::atomic<uint64_t>* arrivals_;  // by rank, a cache line each: how many exchanges it has put its rows for
    float* floats_;
    size_t half_floats_;
    uint64_t turn_ = 0;                   // the number of the exchange, changed between launches only
    std::atomic<int64_t> tasks_done_{0};  // of the launch that runs
    std::atomic<bool> is_broken_{false};
};

// Launches of one exchange follow each other: rows are put, and collected when all processes have put theirs.
std::vector<Launch> plan_exchange(ExchangeArgs& args, int threads);

// Throws std::runtime_error if a process of the group has ended.
void check_group(const Group& group);

}  // namespace octavo
