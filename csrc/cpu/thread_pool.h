// The pool that runs kernel tasks. It knows nothing of what they compute: launches run one after another, the tasks of
// each on all threads, the calling one included. One pool serves the process; callers take turns.
#pragma once

#include <cstddef>
#include <vector>

#include "launch.h"

namespace octavo {

// How many threads to use, and the processors that they should stay on (empty: any).
struct Placement {
    int threads = 0;
    std::vector<int> cpus;
};
// Physical cores that this process may use: those of one NUMA node in its affinity mask, less what a cgroup CPU quota
// denies it.
Placement default_placement();
// Keeps the calling thread on these processors. False where the system refuses, or cannot.
bool bind_thread(const std::vector<int>& cpus);

int num_threads();
// The number of threads that a call may use, the calling one included, and their processors: none (anywhere), one for
// each, or a set that all share. Waits for a running call to end. Throws std::invalid_argument.
void set_threads(int n, const std::vector<int>& cpus);

// Runs `count` launches: each begins when all tasks of the one before have ended. Returns when the last has.
void run(const Launch* launches, size_t count);
inline void run(const Launch& launch) { run(&launch, 1); }

}  // namespace octavo
