// Workers spin briefly for the next call (the kernels of a step follow each other within microseconds), then sleep.
// Task numbers are claimed from one counter, which also publishes the call: a claim that succeeds has seen its call's
// fields, and the call cannot end before the claimed task does. After fork() the child starts a pool of its own.
#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace octavo {

namespace {

// Below this a call is over before a worker would have noticed it.
constexpr double kInlineNs = 5000;
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kMaxThreads = 1024;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    explicit Pool(int size) : size_(size) {}

    int size() const { return size_; }

    void run(const Launch& launch) {
        std::lock_guard<std::mutex> turn(callers_);
        if (workers_.empty()) start();
        launch_ = &launch;
        done_.store(0, std::memory_order_relaxed);
        unclaimed_.store(launch.num_tasks, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            {
                std::lock_guard<std::mutex> lock(sleep_);
            }
            wake_.notify_all();
        }
        while (run_one_task()) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) != launch.num_tasks; ++spins) {
            // A worker that the kernel has put aside holds the rest: give it this core.
            if (spins < 20000) {
                pause();
            } else {
                std::this_thread::yield();
            }
        }
    }

    void stop() {
        std::lock_guard<std::mutex> turn(callers_);
        stopping_.store(true, std::memory_order_seq_cst);
        {
            std::lock_guard<std::mutex> lock(sleep_);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

  private:
    void start() {
        // Signals are for the interpreter's threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int i = 1; i < size_; ++i) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
            // The system grants no more threads: those it granted, and the caller, do the work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    bool run_one_task() {
        int64_t left = unclaimed_.load(std::memory_order_seq_cst);
        do {
            if (left == 0) return false;
        } while (!unclaimed_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel));
        const Launch& launch = *launch_;
        launch.kernel(launch.args, launch.num_tasks - left);
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    bool has_news() const {
        return unclaimed_.load(std::memory_order_seq_cst) != 0 || stopping_.load(std::memory_order_seq_cst);
    }

    void work() {
        while (!stopping_.load(std::memory_order_relaxed)) {
            while (run_one_task()) {
            }
            const auto until = std::chrono::steady_clock::now() + kSpinTime;
            while (!has_news() && std::chrono::steady_clock::now() < until) {
                for (int i = 0; i < 16 && !has_news(); ++i) pause();
            }
            if (has_news()) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [this] { return has_news(); });
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    const int size_;
    std::vector<std::thread> workers_;
    std::mutex callers_;
    const Launch* launch_ = nullptr;
    alignas(64) std::atomic<int64_t> unclaimed_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex sleep_;
    std::condition_variable wake_;
};

// Never destroyed: workers may outlive static objects when the interpreter exits.
std::atomic<Pool*> the_pool{nullptr};
std::atomic<int> configured_threads{0};
std::mutex* pool_change = new std::mutex;

// In a forked child the workers do not exist and a lock may be held by a thread that does not either: forget both.
void forget_pool() {
    the_pool.store(nullptr);
    pool_change = new std::mutex;
}

Pool& pool() {
    Pool* current = the_pool.load(std::memory_order_acquire);
    if (current != nullptr) return *current;
    std::lock_guard<std::mutex> lock(*pool_change);
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
    current = the_pool.load(std::memory_order_acquire);
    if (current == nullptr) {
        if (configured_threads.load() == 0) configured_threads.store(default_num_threads());
        current = new Pool(configured_threads.load());
        the_pool.store(current, std::memory_order_release);
    }
    return *current;
}

}  // namespace

int num_threads() { return pool().size(); }

void set_num_threads(int n) {
    if (n < 1 || n > kMaxThreads) {
        throw std::invalid_argument("the number of threads must be 1 to " + std::to_string(kMaxThreads) + ", not " +
                                    std::to_string(n) + ".");
    }
    Pool& before = pool();
    if (before.size() == n) return;
    std::lock_guard<std::mutex> lock(*pool_change);
    configured_threads.store(n);
    the_pool.store(new Pool(n), std::memory_order_release);
    // A caller may still hold a reference to the old pool, so only its threads go. It can run without them.
    before.stop();
}

bool is_parallel(const Launch& launch) {
    return launch.num_tasks > 1 && launch.cost_ns > kInlineNs && num_threads() > 1;
}

void run(const Launch& launch) {
    if (is_parallel(launch)) {
        pool().run(launch);
    } else {
        for (int64_t task = 0; task < launch.num_tasks; ++task) launch.kernel(launch.args, task);
    }
}

}  // namespace octavo
