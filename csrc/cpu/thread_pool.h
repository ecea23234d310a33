// The pool that runs kernel tasks. It knows nothing of what they compute: it hands out task numbers, the calling thread
// takes part, and a call returns when all are done. One pool serves the process; callers take turns.
#pragma once

#include "launch.h"

namespace octavo {

// Physical cores that this process may use: its affinity mask, less what a cgroup CPU quota denies it.
int default_num_threads();

int num_threads();
// The number of threads that a call may use, the calling one included. Waits for a running call to end.
void set_num_threads(int n);

// Whether a launch is worth more than one thread.
bool is_parallel(const Launch& launch);
void run(const Launch& launch);

}  // namespace octavo
