#include "all_reduce.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "spin.h"
#include "summation_tree.h"

namespace octavo {

namespace {

constexpr size_t kCacheLine = 64;
// How often a waiting thread checks the others before it yields its core, and how rarely it checks the connections.
constexpr int kSpinsBeforeYield = 500;
constexpr auto kLookAtConnections = std::chrono::milliseconds(2);
constexpr int64_t kTasksPerThread = 4;
constexpr double kFloatNs = 0.3;  // to copy or add one float, roughly

static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Floats that are added at a time, and the most partial sums that wait meanwhile.
constexpr int64_t kSumFloats = 256;
constexpr int kMaxWaiting = 16;

// Computes out[0 .. width) as the sum of `count` summands, which lie `stride` apart, in the order of summation_tree.h.
void sum_in_tree(const float* from, int64_t stride, int count, int64_t width, float* out) {
    float sums[kMaxWaiting][kSumFloats];
    const float* waiting[kMaxWaiting];  // summands, or sums of summands
    in_tree(
        count, [&](int index, int depth) { waiting[depth] = from + index * stride; },
        [&](int depth) {
            float* to = sums[depth - 1];
            for (int64_t i = 0; i < width; ++i) to[i] = waiting[depth - 1][i] + waiting[depth][i];
            waiting[depth - 1] = to;
        });
    memcpy(out, waiting[0], static_cast<size_t>(width) * sizeof(float));
}

// Returns the rows [begin, end) of a task.
std::pair<int64_t, int64_t> rows_of(const ExchangeArgs& a, int64_t task) {
    const int64_t begin = task * a.rows_per_task;
    return {begin, std::min(begin + a.rows_per_task, a.rows)};
}

}  // namespace

Group::Group(int rank, int size, void* memory, size_t num_bytes, std::vector<int> watched)
    : rank_(rank), size_(size), watched_(std::move(watched)) {
    const size_t head = static_cast<size_t>(size) * kCacheLine;
    if (size < 1 || rank < 0 || rank >= size || num_bytes <= head) {
        throw std::invalid_argument("no group of " + std::to_string(size) + " processes with rank " +
                                    std::to_string(rank) + " in " + std::to_string(num_bytes) + " bytes.");
    }
    arrivals_ = static_cast<std::atomic<uint64_t>*>(memory);
    floats_ = reinterpret_cast<float*>(static_cast<char*>(memory) + head);
    half_floats_ = (num_bytes - head) / (2 * sizeof(float));
}

void Group::arrive() {
    arrivals_[static_cast<size_t>(rank_) * (kCacheLine / sizeof(uint64_t))].store(turn_ + 1, std::memory_order_release);
}

bool Group::has_hung_up() const {
    std::vector<pollfd> fds;
    for (const int fd : watched_) fds.push_back({fd, 0, 0});
    if (fds.empty() || poll(fds.data(), fds.size(), 0) <= 0) return false;
    return std::any_of(fds.begin(), fds.end(),
                       [](const pollfd& p) { return p.revents & (POLLHUP | POLLERR | POLLNVAL); });
}

void Group::wait_for_all() {
    auto next_look = std::chrono::steady_clock::now() + kLookAtConnections;
    for (int rank = 0; rank < size_; ++rank) {
        const std::atomic<uint64_t>& arrived = arrivals_[static_cast<size_t>(rank) * (kCacheLine / sizeof(uint64_t))];
        for (int spins = 1; arrived.load(std::memory_order_acquire) <= turn_; ++spins) {
            if (is_broken()) return;
            if (spins % kSpinsBeforeYield != 0) {
                pause();
                continue;
            }
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() < next_look) continue;
            if (has_hung_up()) is_broken_.store(true, std::memory_order_release);
            next_look = std::chrono::steady_clock::now() + kLookAtConnections;
        }
    }
}

void put_rows(const void* args, int64_t task) {
    const ExchangeArgs& a = *static_cast<const ExchangeArgs*>(args);
    Group& group = *a.group;
    // For a sum the rows of each process follow those of the process before; for a gather the columns of all lie side
    // by side.
    float* to = group.half() + (a.sums ? group.rank() * a.rows * a.width : a.begin);
    const auto [begin, end] = rows_of(a, task);
    for (int64_t row = begin; row < end; ++row) {
        memcpy(to + row * a.width, a.x + row * a.x_stride, static_cast<size_t>(a.x_width) * sizeof(float));
    }
    if (group.tasks_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == a.num_tasks) {
        group.tasks_done_.store(0, std::memory_order_relaxed);
        group.arrive();
    }
}

void collect_rows(const void* args, int64_t task) {
    const ExchangeArgs& a = *static_cast<const ExchangeArgs*>(args);
    Group& group = *a.group;
    group.wait_for_all();
    const float* from = group.half();
    const auto [begin, end] = rows_of(a, task);
    for (int64_t row = begin; row < end; ++row) {
        float* out = a.out + row * a.width;
        if (!a.sums) {
            memcpy(out, from + row * a.width, static_cast<size_t>(a.width) * sizeof(float));
            continue;
        }
        for (int64_t i = 0; i < a.width; i += kSumFloats) {
            const int64_t width = std::min(kSumFloats, a.width - i);
            sum_in_tree(from + row * a.width + i, a.rows * a.width, group.size(), width, out + i);
        }
        for (int64_t i = 0; a.bias != nullptr && i < a.width; ++i) out[i] += a.bias[i];
    }
    if (group.tasks_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == a.num_tasks) {
        group.tasks_done_.store(0, std::memory_order_relaxed);
        ++group.turn_;
    }
}

std::vector<Launch> plan_exchange(ExchangeArgs& args, int threads) {
    const int64_t floats = args.rows * args.width * (args.sums ? args.group->size() : 1);
    if (floats > args.group->capacity()) {
        throw std::invalid_argument("an exchange of " + std::to_string(floats) + " numbers was asked of a group with " +
                                    "room for " + std::to_string(args.group->capacity()) + ".");
    }
    const int64_t tasks = std::clamp<int64_t>(args.rows, 1, kTasksPerThread * threads);
    args.rows_per_task = (args.rows + tasks - 1) / tasks;
    args.num_tasks = (args.rows + args.rows_per_task - 1) / args.rows_per_task;
    const double cost_ns = static_cast<double>(floats) * kFloatNs;
    return {{put_rows, &args, args.num_tasks, cost_ns}, {collect_rows, &args, args.num_tasks, cost_ns}};
}

void check_group(const Group& group) {
    if (group.is_broken()) {
        throw std::runtime_error("another worker of this model has ended.");
    }
}

}  // namespace octavo
