// The pool that runs kernel tasks. It knows nothing of what they compute: launches run one after another, the tasks of
// each on all threads, the calling one included. One pool serves the process; callers take turns.
#pragma once

#include <cstddef>

#include "launch.h"

namespace octavo {

// Physical cores that this process may use: its affinity mask, less what a cgroup CPU quota denies it.
int default_num_threads();

int num_threads();
// The number of threads that a call may use, the calling one included. Waits for a running call to end.
void set_num_threads(int n);

// Runs `count` launches: each begins when all tasks of the one before have ended. Returns when the last has.
void run(const Launch* launches, size_t count);
inline void run(const Launch& launch) { run(&launch, 1); }

}  // namespace octavo
