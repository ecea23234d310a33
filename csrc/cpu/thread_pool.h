// The pool that runs kernel tasks. It does not know what they compute. Launches run one after another; the tasks of
// each run on all threads, the calling one included. One pool serves the process; callers take turns. How many threads:
// topology.cpp.
#pragma once

#include <cstddef>
#include <vector>

#include "launch.h"

namespace octavo {

// How many threads to use (0: not decided yet), and the processors that they stay on (empty: any).
struct Placement {
    int threads = 0;
    std::vector<int> cpus;
};
// Returns the physical cores that this process may use: those of one NUMA node in its affinity mask, limited by the CPU
// quota of its cgroup.
Placement default_placement();
// Keeps the calling thread on these processors. Returns false if the system refuses or cannot do it.
bool bind_thread(const std::vector<int>& cpus);

int num_threads();
// Sets the number of threads that a call may use, the calling one included, and their processors: none (anywhere), one
// for each thread, or a set that all share. Waits for a running call to end. Throws std::invalid_argument for a number
// of threads that is too small or too large.
void set_threads(int n, const std::vector<int>& cpus);

// Runs `count` launches. Each begins when all tasks of the launch before it have ended. Returns when the last has.
void run(const Launch* launches, size_t count);
inline void run(const Launch& launch) { run(&launch, 1); }

}  // namespace octavo
