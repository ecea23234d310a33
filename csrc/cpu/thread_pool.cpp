// The thread pool. A call is a list of launches. Workers enter it and stay from its first launch to its last, spinning
// between launches: these follow each other within microseconds, and waking a sleeper takes longer than most of them.
//
// Each thread has a share of a launch's tasks. It claims its tasks one by one by counting up a word of its own, so in
// the common case no cache line moves. A thread that is done with its share goes on with the rest of the others'
// shares. A word also holds the number of the launch that it counts, and any thread may move it on to the next launch
// once that has begun. So a thread that the system has put aside, or that has not woken up yet, holds up nothing but
// the one task that it is in.
#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "launch_number.h"
#include "spin.h"

namespace octavo {

namespace {

// A call that takes less is over before a worker notices it: the caller runs it alone.
constexpr double kInlineNs = 5000;
// Workers spin this long for the next call before they sleep: longer than the time between two steps of a stream.
constexpr auto kSpinTime = std::chrono::microseconds(300);
// Attention over chosen keys has some 540 KB of tiles on its stack; threads get 512 KB on macOS and 128 KB from musl.
constexpr size_t kStackBytes = size_t{2} << 20;
// A thread looks at a value so often, some ten microseconds, before it offers its core to other threads.
constexpr int kSpinsBeforeYield = 500;
constexpr int kMaxThreads = 1024;
constexpr size_t kCacheLine = 64;

// Launches are numbered from 1 over the life of the process; the claims of a fresh pool have number 0.
std::atomic<uint64_t> next_launch{1};
thread_local uint64_t running_launch = 0;

// Spins until `done`. Gives the core away now and then: on a full machine the thread that is waited for may need it.
template <class Done>
inline void spin_until(Done done) {
    for (int spins = 1; !done(); ++spins) {
        if (spins % kSpinsBeforeYield != 0) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

// A thread's claims: the number of a launch (44 bits, enough for years), and how many tasks of this thread's share in
// it are taken (20 bits).
struct alignas(kCacheLine) Claims {
    std::atomic<uint64_t> word{0};
};
constexpr int kTakenBits = 20;
constexpr uint64_t kTakenMask = (uint64_t{1} << kTakenBits) - 1;

class Pool {
  public:
    explicit Pool(const Placement& placement)
        : size_(placement.threads), cpus_(placement.cpus), claims_(new Claims[static_cast<size_t>(size_)]) {
        if (cpus_.size() == static_cast<size_t>(size_)) {
            for (const int cpu : cpus_) nodes_.push_back(numa_node(cpu));
            if (std::all_of(nodes_.begin(), nodes_.end(), [&](int node) { return node == nodes_[0]; })) nodes_.clear();
        }
        for (int thread = 0; thread < size_ && !nodes_.empty(); ++thread) {
            for (int step = 1; step < size_; ++step) victims_.push_back(victim(nodes_, size_, thread, step));
        }
    }

    int size() const { return size_; }
    const std::vector<int>& nodes() const { return nodes_; }

    void run(const Launch* launches, size_t count) {
        std::lock_guard<std::mutex> turn(callers_);
        if (workers_.empty() && size_ > 1) start();
        // The call is written first; opening the gate shows it to the workers.
        launches_ = launches;
        count_ = count;
        first_launch_ = next_launch.fetch_add(count, std::memory_order_relaxed);
        completed_.store(0, std::memory_order_relaxed);
        gate_.store(static_cast<uint64_t>(++call_) << kCallShift | kOpen, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            {
                std::lock_guard<std::mutex> lock(sleep_);
            }
            wake_.notify_all();
        }
        work_through(0);
        gate_.fetch_and(~kOpen, std::memory_order_seq_cst);
        spin_until([this] { return (gate_.load(std::memory_order_acquire) & kWorkersMask) == 0; });
    }

    void stop() {
        std::lock_guard<std::mutex> turn(callers_);
        stopping_.store(true, std::memory_order_seq_cst);
        {
            std::lock_guard<std::mutex> lock(sleep_);
        }
        wake_.notify_all();
        for (Worker& worker : workers_) pthread_join(worker.thread, nullptr);
    }

  private:
    // The gate, one word: bit 0 says whether a call is open, the bits up to kCallShift count the workers inside, the
    // rest is the call's number.
    static constexpr uint64_t kOpen = 1;
    static constexpr uint64_t kWorker = 2;
    static constexpr int kCallShift = 32;
    static constexpr uint64_t kWorkersMask = (uint64_t{1} << kCallShift) - kWorker;

    struct Worker {
        Pool* pool;
        int number;
        pthread_t thread;
    };

    static void* run_worker(void* of) {
        const Worker& worker = *static_cast<Worker*>(of);
        worker.pool->work(worker.number);
        return nullptr;
    }

    void start() {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, kStackBytes);
        workers_.reserve(static_cast<size_t>(size_));  // their addresses stay
        // Workers block all signals, which are for the interpreter's threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 1; i < size_; ++i) {
            Worker& worker = workers_.emplace_back(Worker{this, i, {}});
            if (pthread_create(&worker.thread, &attributes, run_worker, &worker) != 0) {
                workers_.pop_back();  // the caller and the threads that the system granted do the work
                break;
            }
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_attr_destroy(&attributes);
    }

    // Claims a task of `owner`'s share. Returns its number within the share, or -1 if none is left.
    int64_t claim(int owner, uint64_t launch, int64_t share) {
        std::atomic<uint64_t>& word = claims_[static_cast<size_t>(owner)].word;
        uint64_t seen = word.load(std::memory_order_relaxed);
        for (;;) {
            // A word of an earlier launch counts as untouched, a word of a later launch as used up.
            const uint64_t at = seen >> kTakenBits;
            const uint64_t taken = at < launch ? 0 : seen & kTakenMask;
            if (at > launch || static_cast<int64_t>(taken) >= share) return -1;
            if (word.compare_exchange_weak(seen, launch << kTakenBits | (taken + 1), std::memory_order_acq_rel)) {
                return static_cast<int64_t>(taken);
            }
        }
    }

    // Runs tasks of `owner`'s share until none is left. Returns how many it ran.
    int64_t run_share(int owner, uint64_t launch, const Launch& l) {
        // Rounded up, so that the caller, who is never late, gets the odd tasks.
        const int64_t begin = (l.num_tasks * owner + size_ - 1) / size_;
        const int64_t end = (l.num_tasks * (owner + 1) + size_ - 1) / size_;
        int64_t ran = 0;
        running_launch = launch;
        for (int64_t i; (i = claim(owner, launch, end - begin)) >= 0; ++ran) l.kernel(l.args, begin + i);
        return ran;
    }

    int victim_of(int thread, int step) const {
        if (victims_.empty()) return victim(nodes_, size_, thread, step);
        return victims_[static_cast<size_t>(thread) * static_cast<size_t>(size_ - 1) + static_cast<size_t>(step - 1)];
    }

    // Works through all launches of the call: own share, the others' shares, then waits for the tasks that others run.
    void work_through(int thread) {
        int64_t target = 0;
        for (size_t i = 0; i < count_; ++i) {
            const Launch& l = launches_[i];
            const uint64_t launch = first_launch_ + i;
            target += l.num_tasks;
            int64_t ran = run_share(thread, launch, l);
            for (int step = 1; step < size_; ++step) {
                if (completed_.load(std::memory_order_acquire) + ran >= target) break;
                ran += run_share(victim_of(thread, step), launch, l);
            }
            if (ran > 0) completed_.fetch_add(ran, std::memory_order_acq_rel);
            spin_until([&] { return completed_.load(std::memory_order_acquire) >= target; });
        }
    }

    // Joins the call that is open, unless this worker has just left it. Returns whether it joined.
    bool enter(uint32_t& last_call) {
        uint64_t gate = gate_.load(std::memory_order_seq_cst);
        while ((gate & kOpen) && static_cast<uint32_t>(gate >> kCallShift) != last_call) {
            if (!gate_.compare_exchange_weak(gate, gate + kWorker, std::memory_order_acq_rel)) continue;
            last_call = static_cast<uint32_t>(gate >> kCallShift);
            return true;
        }
        return false;
    }

    // Returns whether there is a new call to join, or the pool stops.
    bool has_news(uint32_t last_call) const {
        const uint64_t gate = gate_.load(std::memory_order_seq_cst);
        return ((gate & kOpen) && static_cast<uint32_t>(gate >> kCallShift) != last_call) ||
               stopping_.load(std::memory_order_seq_cst);
    }

    void work(int thread) {
        const bool one_each = cpus_.size() == static_cast<size_t>(size_);
        bind_thread(one_each ? std::vector<int>{cpus_[static_cast<size_t>(thread)]} : cpus_);
        uint32_t last_call = 0;
        while (!stopping_.load(std::memory_order_relaxed)) {
            if (enter(last_call)) {
                work_through(thread);
                gate_.fetch_sub(kWorker, std::memory_order_acq_rel);
            }
            const auto until = std::chrono::steady_clock::now() + kSpinTime;
            spin_until([&] { return has_news(last_call) || std::chrono::steady_clock::now() > until; });
            if (has_news(last_call)) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return has_news(last_call); });
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    const int size_;
    const std::vector<int> cpus_;
    std::vector<int> nodes_;    // of the threads; empty if they are not bound, or all on one
    std::vector<int> victims_;  // of each thread in turn, on several nodes
    const std::unique_ptr<Claims[]> claims_;
    std::vector<Worker> workers_;
    std::mutex callers_;

    // The call: written before the gate opens.
    const Launch* launches_ = nullptr;
    size_t count_ = 0;
    uint64_t first_launch_ = 0;
    uint32_t call_ = 0;

    alignas(kCacheLine) std::atomic<uint64_t> gate_{0};
    alignas(kCacheLine) std::atomic<int64_t> completed_{0};
    alignas(kCacheLine) std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex sleep_;
    std::condition_variable wake_;
};

// Never destroyed: workers may outlive static objects when the interpreter exits.
std::atomic<Pool*> the_pool{nullptr};
Placement* configured = new Placement;  // 0 threads: not configured yet
std::mutex* pool_change = new std::mutex;

// In a forked child the workers do not exist, and a lock may be held by a thread that does not exist either: both are
// forgotten.
void forget_pool() {
    the_pool.store(nullptr);
    pool_change = new std::mutex;
}

// Returns the pool, made if there is none. The caller holds `pool_change`.
Pool& pool_of_holder() {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
    Pool* current = the_pool.load(std::memory_order_acquire);
    if (current == nullptr) {
        if (configured->threads == 0) *configured = default_placement();
        current = new Pool(*configured);
        the_pool.store(current, std::memory_order_release);
    }
    return *current;
}

Pool& pool() {
    Pool* current = the_pool.load(std::memory_order_acquire);
    if (current != nullptr) return *current;
    std::lock_guard<std::mutex> lock(*pool_change);
    return pool_of_holder();
}

}  // namespace

uint64_t launch_number() { return running_launch; }

int num_threads() { return pool().size(); }

std::vector<int> nodes_of_threads() { return pool().nodes(); }

void set_threads(int n, const std::vector<int>& cpus) {
    if (n < 1 || n > kMaxThreads) {
        throw std::invalid_argument("the number of threads must be 1 to " + std::to_string(kMaxThreads) + ", not " +
                                    std::to_string(n) + ".");
    }
    // Two callers at once take turns from here on: each stops only the pool that it has replaced.
    std::lock_guard<std::mutex> lock(*pool_change);
    Pool& before = pool_of_holder();
    if (configured->threads == n && configured->cpus == cpus) return;
    *configured = Placement{n, cpus};
    the_pool.store(new Pool(*configured), std::memory_order_release);
    // A caller may still hold a reference to the old pool, so the pool stays and only its threads go. It can run
    // without them.
    before.stop();
}

void run(const Launch* launches, size_t count) {
    double cost_ns = 0;
    int64_t most_tasks = 0;
    for (size_t i = 0; i < count; ++i) {
        cost_ns += launches[i].cost_ns;
        most_tasks = std::max(most_tasks, launches[i].num_tasks);
    }
    Pool& p = pool();
    if (p.size() > 1 && most_tasks > 1 && cost_ns > kInlineNs) {
        p.run(launches, count);
        return;
    }
    const uint64_t first = next_launch.fetch_add(count, std::memory_order_relaxed);
    for (size_t i = 0; i < count; ++i) {
        running_launch = first + i;
        for (int64_t task = 0; task < launches[i].num_tasks; ++task) launches[i].kernel(launches[i].args, task);
    }
}

}  // namespace octavo
